"""DCP in one process: refused saves and loads, committed checkpoints, and reading them without DCP."""

from __future__ import annotations

import gc
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from strata.checkpoint.format.marker import read_manifest
from strata.checkpoint.restore.assembling import Assembler
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client.checkpoints import catalog, upkeep
from strata.client.checkpoints.manager import CheckpointManager
from strata.client.checkpoints.root import OpenRoot
from strata.core.checkpoints.fork import decide_rewind
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointCorrupt, ConfigError, InvalidArgument, StorageError
from strata.integrations.dcp import JsonLoadPlanner, JsonSavePlanner, StrataReader, StrataWriter, reader
from strata.integrations.dcp import writer as writing
from strata.v1 import checkpoints_pb2 as pb
from tests.unit.checkpoint.ports import Cluster, state_of

LIMIT_S = 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def a_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {
            "w": torch.full((3, 5), float(value)),
            "empty": torch.zeros(0, 4),
            "scalar": torch.tensor(float(value)),
        },
        "list": [torch.ones(2) * value, {"deep": torch.ones(1) * value}],
        "plain": {"lr": [value, None], "name": "x"},
        "__metadata__": torch.ones(1) * value,
    }


def flat(state: dict[str, Any]) -> str:
    return repr(state)


def save(path: Path, state: dict[str, Any], step: int, **settings: Any) -> StrataWriter:
    writer = StrataWriter(path, **settings)
    dcp_save(state, checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())
    writer.close()
    return writer


def load(path: Path, state: dict[str, Any], **settings: Any) -> dict[str, Any]:
    dcp_load(state, storage_reader=StrataReader(path, **settings), planner=JsonLoadPlanner())
    return state


def test_a_saved_state_loads_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = save(tmp_path, a_state(2.5), 7, metadata={"note": "n"})
    assert writer.last is not None
    assert (writer.last.step, writer.last.metadata) == (7, {"note": "n"})
    assert writer.last.missing == []
    assert flat(load(tmp_path, a_state(0))) == flat(a_state(2.5))
    assert StrataReader(tmp_path).read_metadata().version == CURRENT_DCP_VERSION
    monkeypatch.setattr(reader, "BATCH_BYTES", 16)
    assert flat(load(tmp_path, a_state(0))) == flat(a_state(2.5))


def test_old_checkpoints_are_deleted_and_a_load_may_choose_a_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, a_state(step), step, keep_count=2)
    assert flat(load(tmp_path, a_state(0))) == flat(a_state(3))
    assert flat(load(tmp_path, a_state(0), step=2)) == flat(a_state(2))
    with pytest.raises(CheckpointException, match="no checkpoint of step 1"):
        load(tmp_path, a_state(0), step=1)


def test_a_save_does_not_wait_for_the_deletion_of_an_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, goes = threading.Event(), threading.Event()
    delete = LocalStorage.delete

    def slowly(self: LocalStorage, path: str) -> None:
        goes.set()
        assert may_go.wait(LIMIT_S)
        delete(self, path)

    monkeypatch.setattr(LocalStorage, "delete", slowly)
    writer = StrataWriter(tmp_path, keep_count=1)
    for step in (1, 2):
        dcp_save(a_state(step), checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())
    assert goes.wait(LIMIT_S)
    assert len(list(tmp_path.glob("step-*"))) == 2
    monkeypatch.setattr(writing, "END_S", 0.01)
    writing._end()  # the exit of the program waits for at most END_S
    assert [
        thread.daemon for thread in threading.enumerate() if "strata-garbage-collection" in thread.name
    ] == [True]
    may_go.set()
    writer.close()
    assert [path.name[:17] for path in tmp_path.glob("step-*")] == ["step-000000000002"]


@pytest.mark.parametrize("then", ["saves", "closes"])
def test_a_failed_removal_is_raised_once_and_costs_no_save(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalStorage, path: str) -> None:
        raise StorageError(f"{path} is in the way")

    def save_step(step: int) -> int:
        dcp_save(a_state(step), checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())
        return last_step()

    def last_step() -> int:
        return writer.last.step if writer.last is not None else 0

    writer = StrataWriter(tmp_path, keep_count=1)
    save_step(1)
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "delete", refuse)
        assert save_step(2) == 2
        if then == "closes":
            with pytest.raises(StorageError, match="is in the way"):
                writer.close()
        else:
            with pytest.raises(CheckpointException, match="is in the way"):
                save_step(3)
            assert last_step() == 3, "it is committed before the trouble with an old one is raised"
            with pytest.raises(StorageError):
                writer.close()
    assert save_step(4) == 4
    writer.close()
    assert flat(load(tmp_path, a_state(0))) == flat(a_state(4))
    assert len(list(tmp_path.glob("step-*"))) == 1


def no_thread(**_: Any) -> threading.Thread:
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.parametrize("ends", [False, True])
def test_old_checkpoints_are_deleted_before_dcps_process_or_the_program_exits(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer waits only for the reply of DCP's process, which then ends; an exiting program starts no threads."""
    writer = StrataWriter(tmp_path, keep_count=1)
    if ends:
        monkeypatch.setattr(writing, "Thread", no_thread)
    else:
        writer = pickle.loads(pickle.dumps(writer))
    for step in (1, 2):
        dcp_save(a_state(step), checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())
    assert [path.name[:17] for path in tmp_path.glob("step-*")] == ["step-000000000002"]
    writer.close()


def test_the_next_save_retries_a_failed_claim_of_the_storage_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: OpenRoot) -> None:
        raise StorageError("no answer")

    writer = StrataWriter(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(OpenRoot, "claim", refuse)
        with pytest.raises(CheckpointException, match="no answer"):
            dcp_save(a_state(), checkpoint_id="1", storage_writer=writer, planner=JsonSavePlanner())
    dcp_save(a_state(), checkpoint_id="1", storage_writer=writer, planner=JsonSavePlanner())
    writer.close()
    with pytest.raises(ConfigError):
        StrataReader(tmp_path, client=Cluster(n1=1).port(0)).read_metadata()


def test_a_dropped_writer_stops_observing_the_cluster(tmp_path: Path) -> None:
    cluster = Cluster(n1=1)
    writer = StrataWriter(tmp_path, client=cluster.port(0))
    before = len(cluster.observers)
    dcp_save(a_state(), checkpoint_id="1", storage_writer=writer, planner=JsonSavePlanner())
    assert len(cluster.observers) > before
    del writer
    gc.collect()
    assert len(cluster.observers) == before


def test_a_checkpoint_removed_during_a_load_is_not_reported_as_damaged(tmp_path: Path) -> None:
    class Slow(StrataReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            save(tmp_path, a_state(2), 2, keep_count=1)
            return super().read_data(plan, planner)

    save(tmp_path, a_state(1), 1)
    with pytest.raises(CheckpointException, match="step 1 was removed while it was read"):
        dcp_load(a_state(0), storage_reader=Slow(tmp_path, step=1), planner=JsonLoadPlanner())


def flip(path: Path, step: int) -> None:
    (image,) = path.glob(f"**/step-{step:012d}-*/*.safetensors")
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)


def reports_to(cluster: Cluster) -> list[pb.ReportDamageRequest]:
    """Return a list that collects the damage reports the coordinators receive from now on."""
    reports: list[pb.ReportDamageRequest] = []
    cluster.on_call = lambda r: reports.append(r) if isinstance(r, pb.ReportDamageRequest) else None
    return reports


@pytest.mark.parametrize("coordinated", [False, True])
def test_an_error_about_a_corrupt_checkpoint_names_the_previous_intact_step(
    tmp_path: Path, coordinated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(n1=1)
    settings: dict[str, Any] = {"corrupt_wait_s": 0.1, "client": cluster.port(0)} if coordinated else {}
    for step in (1, 2, 3, 4):
        save(tmp_path, a_state(step), step, **settings)
    flip(tmp_path, 4)
    (document,) = tmp_path.glob("**/step-000000000003-*/rank-00000.json")
    document.write_bytes(b"{}")
    reports = reports_to(cluster)

    def failure(step: int) -> CheckpointCorrupt:
        with pytest.raises(CheckpointException) as error:
            load(tmp_path, a_state(0), step=step, **settings)
        (found, _trace) = error.value.failures[0]
        assert isinstance(found, CheckpointCorrupt)
        assert found.hint in str(error.value), "what a user sees of it"
        assert found.message.startswith(f"step {step} is corrupt: ")
        return found

    assert "rank-00000.safetensors: tensor" in failure(4).message
    assert 'step 2 is the one before: load it by checkpoint_id="2"' in failure(4).hint
    assert "StrataReader(…, step=2)" in failure(4).hint
    assert {(r.step, r.tier, r.generation) for r in reports} == (
        {(4, "primary", 0)} if coordinated else set()
    )
    assert flat(load(tmp_path, a_state(0), step=2, **settings)) == flat(a_state(2))
    reports.clear()

    def away(storage: Any, folder: str, digest: str) -> Any:
        raise StorageError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("strata.integrations.dcp.damage.read_manifest", away)
        assert "which step before it is good is not known: Input" in failure(4).hint
    assert [r.step for r in reports] == ([4] if coordinated else []), "whatever hides the step before"
    flip(tmp_path, 1)
    assert "no good checkpoint is before it" in failure(1).hint


def test_a_damaged_restore_point_is_reported_for_its_generation(tmp_path: Path) -> None:
    cluster = Cluster(n1=1)
    for step in (1, 2):
        save(tmp_path, a_state(step), step, client=cluster.port(0))
    flip(tmp_path, 2)
    reports = reports_to(cluster)
    port = cluster.port(0, restore=cluster.restore_point())
    with pytest.raises(CheckpointException, match="step 1 is the one before"):
        load(tmp_path, a_state(0), client=port, corrupt_wait_s=0.1)
    assert [(r.step, r.generation) for r in reports] == [(2, port.generation)]
    assert reports[0].object.endswith("/rank-00000.safetensors")


@pytest.mark.parametrize("name", ["Assembler.read", "read_manifest"])
def test_a_read_that_succeeds_on_retry_is_loaded_without_a_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(n1=1)
    save(tmp_path, a_state(2.5), 7, client=cluster.port(0))
    reports = reports_to(cluster)
    reads: list[object] = []
    read: Any = read_manifest if name == "read_manifest" else Assembler.read

    def flaky(*args: Any, **more: Any) -> Any:
        reads.append(args)
        if len(reads) == 1:
            raise CheckpointCorrupt("a bit was flipped on its way")
        return read(*args, **more)

    monkeypatch.setattr(f"strata.integrations.dcp.reader.{name}", flaky)
    assert flat(load(tmp_path, a_state(0), client=cluster.port(0), step=7)) == flat(a_state(2.5))
    assert (len(reads) > 1, reports) == (True, [])


def test_missing_files_are_not_reported_as_corruption(tmp_path: Path) -> None:
    """The file system may not be mounted: a world of one host would else mark an intact checkpoint as corrupt."""
    cluster = Cluster(n1=1)
    save(tmp_path, a_state(2.5), 7, client=cluster.port(0))
    next(tmp_path.glob("job/step-*/rank-00000.safetensors")).unlink()
    for message in ("put the file back or mount it", "has nothing of it"):
        with pytest.raises(CheckpointException, match=message):
            load(tmp_path, a_state(0), step=7, client=cluster.port(0), corrupt_wait_s=0.1)
        shutil.rmtree(tmp_path / "job")
    assert pb.ReportDamageRequest not in cluster.answers
    assert state_of(cluster, 7) is CheckpointState.COMMITTED


def saved_by_both(cluster: Cluster, path: Path) -> None:
    """Let two ranks save step 10."""
    with (
        CheckpointManager(path, client=cluster.port(0), capture_rng=False) as one,
        CheckpointManager(path, client=cluster.port(1), capture_rng=False) as other,
    ):
        for info in [m.save_state(a_state(2.5), 10) for m in (one, other)]:
            info.wait(LIMIT_S)


def test_a_host_that_loads_by_dcp_confirms_damage_found_by_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(a=1, b=1)
    saved_by_both(cluster, tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "host-b")
    other = StrataReader(tmp_path, step=10, client=cluster.port(1))
    for _ in range(2):
        dcp_load(a_state(0), storage_reader=other, planner=JsonLoadPlanner())
    looking = len(cluster.observers)
    corrupt = threading.Event()
    cluster.observers.append(lambda c: corrupt.set() if c.state == pb.CHECKPOINT_STATE_CORRUPT else None)
    (image,) = tmp_path.glob("**/rank-00000.safetensors")
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    monkeypatch.setattr("socket.gethostname", lambda: "host-a")
    with pytest.raises(CheckpointException, match="step 10 is corrupt"):
        load(tmp_path, a_state(0), step=10, client=cluster.port(0))
    assert corrupt.wait(LIMIT_S), "host-b looks as long as its reader lives"
    assert "host-a, host-b" in cluster.records()[0].reason
    gc.collect()
    assert len(cluster.observers) == looking + 1, "host-a's reader is gone"
    del other
    gc.collect()
    assert len(cluster.observers) == 1


@pytest.mark.parametrize("begins", [False, True])
def test_damage_is_raised_even_if_it_cannot_be_reported(
    begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "ASK_S", 0.1)
    for name in ("ABORT_S", "RETRY_S"):
        monkeypatch.setattr(catalog, name, 0.1)
    cluster = Cluster(n1=1)
    save(tmp_path, a_state(), 7, client=cluster.port(0))
    flip(tmp_path, 7)
    port = cluster.port(0, restore=cluster.restore_point() if begins else None)

    class Lost(StrataReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            cluster.down = True
            return super().read_data(plan, planner)

    began = time.monotonic()
    with pytest.raises(
        CheckpointException, match=r"step 7 is corrupt: .*differs from the saved data"
    ) as error:
        dcp_load(a_state(0), storage_reader=Lost(tmp_path, step=7, client=port), planner=JsonLoadPlanner())
    assert "whether it was removed meanwhile is not known" in str(error.value)
    assert "which step before it is good is not known" in str(error.value)
    assert time.monotonic() - began < 20, "the time of a save is longer"


def test_a_load_reports_corruption_even_if_the_storage_fails_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: LocalStorage, name: str) -> bool:
        raise StorageError("Input/output error")

    class Lost(StrataReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            monkeypatch.setattr(LocalStorage, "exists", away)
            return super().read_data(plan, planner)

    save(tmp_path, a_state(), 7)
    flip(tmp_path, 7)
    with pytest.raises(CheckpointException, match=r"step 7 is corrupt: .*differs from the saved data"):
        dcp_load(a_state(0), storage_reader=Lost(tmp_path), planner=JsonLoadPlanner())


def test_the_suggested_previous_step_is_not_one_discarded_by_a_rewind(tmp_path: Path) -> None:
    cluster = Cluster(b=1)
    settings: dict[str, Any] = {"corrupt_wait_s": 0.1, "client": cluster.port(0)}
    for step in (1, 2, 3):
        save(tmp_path, a_state(step), step, **settings)
    cluster.job.store.settle(lambda job: decide_rewind(job, generation=1, step=1, who="ada"))
    cluster.next_world()
    settings["client"] = cluster.port(0)
    save(tmp_path, a_state(20), 2, **settings)
    (image,) = tmp_path.glob("**/step-000000000002-gen-000002-*/*.safetensors")
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointException, match="step 1 is the one before"):
        load(tmp_path, a_state(0), step=2, **settings)


def test_the_step_before_is_never_the_damaged_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, capture_rng=False) as manager:
        for step in (1, 2):
            manager.save_state(a_state(step), step)
        manager.restore(a_state(0), 1)
        manager.save_state(a_state(20), 2)
    *_, image = sorted(tmp_path.glob("step-000000000002-*/*.safetensors"))
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointException, match="step 1 is the one before"):
        load(tmp_path, a_state(0), step=2)


def test_a_corrupt_manifest_is_skipped_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, a_state(step), step)
    (manifest,) = tmp_path.glob("step-000000000002-*/manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"version"', b'"versiom"'))
    assert flat(load(tmp_path, a_state(0))) == flat(a_state(1))
    assert "step 2 is corrupt, trying the one before" in caplog.text
    assert "manifest.json differs" in caplog.text
    with pytest.raises(CheckpointException, match=r"step 2 is corrupt: .*manifest\.json differs") as error:
        load(tmp_path, a_state(0), step=2)
    assert 'step 1 is the one before: load it by checkpoint_id="1"' in str(error.value)
    next(tmp_path.glob("step-000000000001-*/COMMIT")).write_bytes(b"{}")
    with pytest.raises(CheckpointException, match=r"none of the checkpoints is good.*manifest\.json"):
        load(tmp_path, a_state(0))


@pytest.mark.parametrize("coordinated", [False, True])
def test_a_failed_save_is_given_up_and_made_again(coordinated: bool, tmp_path: Path) -> None:
    cluster = Cluster(n1=1)
    client = cluster.port(0) if coordinated else None
    writer = StrataWriter(tmp_path, client=client)
    with pytest.raises(CheckpointException, match="cannot be saved"):
        dcp_save({"x": object()}, checkpoint_id="3", storage_writer=writer, planner=JsonSavePlanner())
    if coordinated:
        with pytest.raises(CheckpointException, match="step 3 is aborted: rank 0: x is a "):
            save(tmp_path, {"x": 1}, 3, client=client)
    dcp_save({"x": 1}, checkpoint_id="3", storage_writer=writer, planner=JsonSavePlanner())
    writer.close()
    assert load(tmp_path, {"x": 0}, step=3, client=client) == {"x": 1}


def test_a_group_that_is_not_the_whole_world_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="group of all ranks"):
        save(tmp_path, a_state(), 1, client=Cluster(n1=2).port(0))


def test_wrong_arguments_to_dcp_are_refused(tmp_path: Path) -> None:
    no_steps = ("newest", "12-final", "-12", "v2-step-12", "loss0.12", "epoch=1-step=12", "step 12", "١٢")
    for name in (*no_steps, "resnet50", "model-v2", "runs/llama3", "footstep12", "ckpt12"):
        with pytest.raises(InvalidArgument, match="names no step"):
            dcp_save(a_state(), checkpoint_id=name, storage_writer=StrataWriter(tmp_path))
    with pytest.raises(CheckpointException, match="no step is given"):
        dcp_save(a_state(), storage_writer=StrataWriter(tmp_path))
    with pytest.raises(ConfigError, match="use_collectives"):
        dcp_save(a_state(), storage_writer=StrataWriter(tmp_path, step=1), use_collectives=False)
    for way in (StrataWriter.validate_checkpoint_id, StrataReader.validate_checkpoint_id):
        assert not way("12")
    with pytest.raises(CheckpointException, match="no checkpoint to begin from"):
        load(tmp_path, a_state())
    with pytest.raises(CheckpointException, match="second storage is for CheckpointManager"):
        load(tmp_path, a_state(), replica_path=tmp_path / "far")
    with pytest.raises(ConfigError, match="unexpected keyword"):
        StrataWriter(tmp_path, colour="blue")
    with pytest.raises(ConfigError, match="connect"):
        StrataWriter(tmp_path, client=object())  # type: ignore[arg-type]  # no session


@pytest.mark.parametrize(
    "name",
    [
        "12",
        "step-12",
        "checkpoint-12",
        "global_step12",
        "checkpoint12",
        "my-model.epoch12",
        "resnet-12",
        "runs/2/iter_0000012",
        "runs/ckpt.12/",
        "step=12",
    ],
)
def test_a_checkpoint_id_names_the_step_it_ends_in(name: str, tmp_path: Path) -> None:
    writer = StrataWriter(tmp_path)
    dcp_save(a_state(3), checkpoint_id=name, storage_writer=writer, planner=JsonSavePlanner())
    writer.close()
    assert writer.last is not None
    assert writer.last.step == 12
    here = a_state(0)
    dcp_load(here, checkpoint_id=name, storage_reader=StrataReader(tmp_path), planner=JsonLoadPlanner())
    assert flat(here) == flat(a_state(3))

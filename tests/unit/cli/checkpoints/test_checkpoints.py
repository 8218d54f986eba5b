"""`strata checkpoints` on a storage root, without coordinators: every command and its refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.storage import root
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.cli.checkpoints.where import chosen
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import CheckpointNotFound, InvalidArgument
from tests.unit.cli.in_process import run_command


def a_state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": np.full((3, 4), float(step)), "frozen": np.arange(5, dtype=np.int16)},
        "step": step,
        "lr": 0.1,
    }


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A root with the steps 10, 20 and 30."""
    folder = tmp_path / "root"
    with CheckpointManager(folder) as manager:
        for step in (10, 20, 30):
            manager.save_state(a_state(step), step, metadata={"note": f"of {step}"}).wait()
    return folder


def run(*words: object, code: int = 0, answer: str = "") -> str:
    return run_command("checkpoints", *words, code=code, answer=answer)


def values(*words: object, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code))


def image(where: Path, step: int) -> Path:
    return next(where.glob(f"step-*{step}-gen-*/rank-00000.safetensors"))


def damage(path: Path, offset: int = 4096) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def restored(where: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"model": {}, "step": None}
    with CheckpointManager(where) as manager:
        manager.restore(state)
    return state


# -- list, show, verify, compare -------------------------------------------------------------------


def test_a_root_is_listed_and_one_checkpoint_is_shown(where: Path) -> None:
    listed = values("list", "--storage", where)
    assert [(c["step"], c["state"], c["latest"]) for c in listed] == [
        (10, "committed", False),
        (20, "committed", False),
        (30, "committed", True),
    ]
    output = run("list", "-s", where.as_uri())
    assert "30 (latest)" in output
    assert "full" in output
    output = run("show", 20, "--tensors", "-s", where)
    for part in ("step 20", "note", "of 20", "lr", "0.1", "model.frozen", "[3, 4]", "step 10, generation 1"):
        assert part in output
    shown = values("show", "-s", where)
    assert (shown["step"], shown["values"], shown["predecessor"][0]) == (30, {"step": "30", "lr": "0.1"}, 20)
    assert shown["tensors"]["model.w"]["shape"] == [3, 4]


def test_a_path_that_is_no_root_is_refused_with_the_reason(tmp_path: Path, where: Path) -> None:
    assert "no storage root: it does not exist" in run("list", "-s", tmp_path / "typo", code=4)
    assert "no storage root: it has no strata.json" in run("list", "-s", tmp_path, code=4)
    (tmp_path / "file").write_bytes(b"x")
    assert "no storage root: it is a file" in run("verify", "-s", tmp_path / "file", code=4)
    assert "the root is the one above" in run("list", "-s", image(where, 20).parent, code=4)
    assert "no checkpoint is '77'" in run("show", 77, "-s", where, code=4)
    assert "has no rank 3" in run("show", "--rank", 3, "-s", where, code=4)


def test_a_tag_must_not_be_a_step_or_latest(where: Path) -> None:
    for word in ("77", "latest"):
        assert "means another one" in run("tag", 20, word, "-s", where, code=2)
    run("tag", 20, "best", "-s", where)
    assert "the steps 10, 20, 30 and the tags best" in run("show", "worst", "-s", where, code=4)


def test_a_broken_tag_is_reported_and_can_be_removed(where: Path) -> None:
    run("tag", 20, "best", "-s", where)
    (where / "tags" / "best").write_bytes(b"{")
    assert [c["tags"] for c in values("list", "-s", where)] == [[], [], []]
    assert "strata checkpoints untag best" in run("delete", 10, "-y", "-s", where, code=4)
    run("untag", "best", "-s", where)
    assert "has the name" in run("untag", "best", "-s", where, code=4)
    run("delete", 10, "-y", "-s", where)


def test_a_pin_for_another_reason_is_refused(where: Path) -> None:
    run("pin", 10, "-s", where)
    output = run("pin", 10, "--why", "the paper's", "-s", where, code=4)
    assert ": (" not in output
    assert "unpin it first" in output


def test_a_root_of_coordinators_is_read_and_not_changed(tmp_path: Path, where: Path) -> None:
    shared = tmp_path / "shared"
    storage = LocalStorage(shared, nonce=lambda: "n")
    root.claim(storage, root.COORDINATED)
    assert "has nothing of job gpt" in run("list", "-s", shared, "-j", "gpt", code=4)
    root.claim(storage, f"{root.COORDINATED}:uid/gpt", folder="gpt")
    for folder in where.glob("step-*"):
        folder.rename(shared / "gpt" / folder.name)
    assert [c["step"] for c in values("list", "-s", shared, "-j", "gpt")] == [10, 20, 30]
    assert "good" in run("verify", "--all", "-s", shared, "-j", "gpt")
    assert [c["step"] for c in values("list", "-s", shared / "gpt")] == [10, 20, 30]
    for words in (("pin", 10), ("tag", 10, "x"), ("untag", "x"), ("delete", 10, "--yes"), ("gc",)):
        output = run(*words, "-s", shared, "-j", "gpt", code=4)
        assert "belongs to coordinators" in output or "has the name" in output


def test_verify_passes_a_good_checkpoint_and_fails_a_damaged_one_with_code_1(where: Path) -> None:
    assert "step 30, generation 1: good" in run("verify", "-s", where)
    damage(image(where, 20))
    output = run("verify", 20, "-s", where, code=1)
    assert "CORRUPT" in output
    assert "tensor model.w differs" in output
    found = values("verify", "--all", "-s", where, code=1)
    assert [(f["step"], f["good"]) for f in found] == [(10, True), (20, False), (30, True)]
    image(where, 20).unlink()
    assert "is missing" in run("verify", 20, "-s", where, code=1)


def test_two_checkpoints_are_compared(where: Path) -> None:
    found = values("diff", 10, 30, "-s", where)
    assert [c["name"] for c in found["changed"]] == ["model.w"]
    assert found["values"] == [{"path": "step", "before": "10", "after": "30"}]
    output = run("diff", 10, "-s", where)
    assert "1 of 1 chunks" in output
    assert "nothing is different" in run("diff", 10, 10, "-s", where)


# -- choosing a checkpoint ---------------------------------------------------------------------


def known() -> Iterator[CheckpointMetadata]:
    for step, generation, attempt, state in (
        (10, 1, "aaaaaa11", CheckpointState.COMMITTED),
        (10, 2, "aaaaaa22", CheckpointState.COMMITTED),
        (10, 3, "bbbbbb33", CheckpointState.CORRUPT),
        (20, 3, "cccccc44", CheckpointState.COMMITTED),
    ):
        yield CheckpointMetadata(
            id=attempt,
            step=step,
            generation=generation,
            path="",
            state=state,
            tags=("best",) if step == 20 else (),
            latest=step == 20,
        )


@pytest.mark.parametrize(
    ("word", "attempt"),
    [
        ("latest", "cccccc44"),
        ("10", "aaaaaa22"),
        ("10@1", "aaaaaa11"),
        ("best", "cccccc44"),
        ("bbbbbb", "bbbbbb33"),
        ("aaaaaa11", "aaaaaa11"),
    ],
)
def test_a_name_selects_one_checkpoint(word: str, attempt: str) -> None:
    assert chosen(list(known()), word).id == attempt


def test_a_name_that_selects_no_or_several_checkpoints_is_refused() -> None:
    for word in ("30", "10@9", "worst", "cccc", ""):
        with pytest.raises(CheckpointNotFound):
            chosen(list(known()), word)
    with pytest.raises(InvalidArgument, match=r"aaaaaa11.*aaaaaa22"):
        chosen(list(known()), "aaaaaa")
    with pytest.raises(InvalidArgument, match="matches each of"):
        chosen(list(known()), "10", alone=True)


# -- retention and deletion ------------------------------------------------------------------


def test_pinned_or_tagged_checkpoints_stay_until_they_are_released(where: Path) -> None:
    run("pin", 10, "--why", "the paper's", "-s", where)
    assert "pinned already" in run("pin", 10, "--why", "another's", "-s", where, code=4)
    run("tag", 20, "best", "-s", where)
    assert "10 (pinned)" in run("list", "-s", where)
    assert "20 (best)" in run("list", "-s", where)
    assert "is pinned" in run("delete", 10, "--yes", "-s", where, code=4)
    assert "has the tag best" in run("delete", "best", "--yes", "-s", where, code=4)
    assert "is the newest" in run("delete", "latest", "--yes", "-s", where, code=4)
    with CheckpointManager(where, keep_count=1) as manager:
        manager.save_state(a_state(40), 40)
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 20, 40], "retention leaves them, and 30 is gone"
    run("tag", 40, "best", "-s", where)
    run("delete", 20, "--yes", "-s", where)
    assert "no checkpoint has the name" in run("untag", "worst", "-s", where, code=4)
    run("unpin", 10, "-s", where)
    run("delete", 10, "--yes", "-s", where)
    assert [(c["step"], c["tags"]) for c in values("list", "-s", where)] == [(40, ["best"])]
    assert len(list(where.glob("step-*"))) == 1


def test_a_deletion_requires_confirmation(where: Path) -> None:
    run("delete", 10, "-s", where, code=1, answer="n\n")
    assert image(where, 10).exists()
    run("delete", 10, "-s", where, answer="y\n")
    assert not list(where.glob("step-*10-*"))


def test_gc_removes_leftovers_of_crashes_and_spares_a_save_in_progress(where: Path) -> None:
    left = where / "step-000000000020-gen-000001-left"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    (left / ".rank-00000.json.n.tmp").write_bytes(b"")
    storage = LocalStorage(where, nonce=lambda: "n")
    storage.create_once("generations/000007", b"{}")
    storage.hold("generations/000007")
    held = where / "step-000000000050-gen-000007-busy"
    held.mkdir()
    try:
        assert "would remove" in run("gc", "--dry-run", "-s", where)
        assert left.exists()
        removed = values("gc", "--keep-count", 2, "-s", where)
        assert [g["removed"] for g in removed] == [True, True]
        assert not left.exists()
        assert held.exists()
        assert [c["step"] for c in values("list", "-s", where)] == [20, 30]
        assert "nothing to remove" in run("gc", "-s", where)
    finally:
        storage.release("generations/000007")
    run("gc", "-s", where)
    assert not held.exists(), "whoever held it is gone"


# -- export, import, fork, repair -----------------------------------------------------------------


def test_a_model_is_exported_for_other_programs(where: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    run("export", "latest", out, "--only", "model", "-s", where)
    tensors = load_file(out)
    assert sorted(tensors) == ["frozen", "w"]
    assert np.array_equal(tensors["w"], np.full((3, 4), 30.0))
    assert "exists already" in run("export", 10, out, "-s", where, code=4)
    run("export", 10, out, "--force", "-s", where)
    assert sorted(load_file(out)) == ["model.frozen", "model.w"]
    archive = tmp_path / "all.npz"
    run("export", 20, archive, "-s", where)
    with np.load(archive) as arrays:
        assert arrays["model.w"][0, 0] == 20
    assert "is not given" in run("export", 20, tmp_path / "x.what", "-s", where, code=2)
    assert "nothing under 'optim'" in run(
        "export", 20, tmp_path / "y.npz", "--only", "optim", "-s", where, code=4
    )
    assert "has no rank 3" in run("export", 20, tmp_path / "y.npz", "--rank", 3, "-s", where, code=4)
    damage(image(where, 20))
    assert "differs from the saved data" in run("export", 20, tmp_path / "z.npz", "-s", where, code=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.npz", "model.safetensors", "root"]


def test_a_full_export_is_imported_unchanged(where: Path, tmp_path: Path) -> None:
    out, new = tmp_path / "whole.safetensors", tmp_path / "new"
    run("export", 20, out, "-s", where)
    run("import", out, "--step", 5, "-s", new)
    state = restored(new)
    assert state["step"] == 20
    assert np.array_equal(state["model"]["w"], a_state(20)["model"]["w"])
    shown = values("show", "-s", new)
    assert (shown["step"], shown["metadata"]) == (5, {"imported_from": "whole.safetensors"})
    assert shown["tensors"]["model.frozen"]["kind"] == "numpy"


def test_a_foreign_safetensors_file_is_imported_under_a_key(tmp_path: Path) -> None:
    file, new = tmp_path / "theirs.safetensors", tmp_path / "new"
    save_file({"layer.0.w": np.ones((2, 2), np.float32), "b": np.zeros(0)}, file)
    run("import", file, "-s", new, "--key", "net")
    state: dict[str, Any] = {"net": {"layer.0.w": np.zeros((2, 2), np.float32)}}
    with CheckpointManager(new) as manager:
        manager.restore(state)
    assert state["net"]["layer.0.w"].tolist() == [[1, 1], [1, 1]]
    assert "cut short" in run("import", image_of(tmp_path, b"\x10\0\0\0\0\0\0\0{}"), "-s", new, code=1)
    assert "no such file" in run("import", tmp_path / "nothing", "-s", new, code=2).lower()


def image_of(folder: Path, data: bytes) -> Path:
    path = folder / "some.safetensors"
    path.write_bytes(data)
    return path


def test_raw_bytes_are_exported_and_imported_unchanged(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(b"weights", 3).wait()
    run("export", 3, tmp_path / "weights", "-s", tmp_path / "a")
    assert (tmp_path / "weights").read_bytes() == b"weights"
    run("import", tmp_path / "weights", "--raw", "--step", 7, "-s", tmp_path / "b")
    with CheckpointManager(tmp_path / "b") as manager:
        assert manager.load_bytes(7) == b"weights"


def test_a_fork_is_a_root_of_its_own(where: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run("fork", 20, "--to", other, "-s", where)
    assert [c["step"] for c in values("list", "-s", other)] == [20]
    assert restored(other)["step"] == 20
    with CheckpointManager(other) as manager:
        manager.save_state(a_state(21), 21).wait()
        assert manager.latest_step() == 21, "what is saved there is newer than where it began"
    assert "has checkpoints already" in run("fork", 10, "--to", other, "-s", where, code=4)
    damage(image(where, 10), -1)
    run("fork", 10, "--to", tmp_path / "third", "-s", where, code=1)
    assert values("list", "-s", tmp_path / "third") == []


def test_repair_makes_a_whole_copy_from_two_damaged_ones_and_changes_neither(tmp_path: Path) -> None:
    near, far, to = tmp_path / "near", tmp_path / "far", tmp_path / "to"
    with CheckpointManager(near, replica_path=far) as manager:
        manager.save_state(a_state(20), 20).wait()
        manager.wait_until_replicated(20)
    damage(image(near, 20))
    (document,) = far.glob("step-*20-gen-*/rank-00000.json")
    damage(document, 40)
    assert "CORRUPT" in run("verify", 20, "-s", near, code=1)
    before = {path: path.read_bytes() for path in (*near.rglob("*"), *far.rglob("*")) if path.is_file()}
    assert "is whole in" in run("repair", 20, "-s", near, "--replica", far, "--to", to)
    assert {path: path.read_bytes() for path in before} == before
    assert "good" in run("verify", 20, "-s", to)
    assert restored(to)["step"] == 20
    assert "has checkpoints already" in run("repair", 20, "-s", near, "--replica", far, "--to", to, code=4)
    damage(image(far, 20))
    output = run("repair", 20, "-s", near, "--replica", far, "--to", tmp_path / "none", code=1)
    assert "rank-00000.safetensors differs from the saved data (bytes" in output


def test_a_fork_of_an_incremental_includes_the_images_it_uses(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    with CheckpointManager(source) as manager:
        manager.save_state(a_state(10), 10).wait()
        changed = {
            **a_state(10),
            "lr": 0.2,
            "model": {**a_state(10)["model"], "frozen": np.zeros(5, np.int16)},
        }
        manager.save_state(changed, 20, checkpoint_type=CheckpointType.INCREMENTAL).wait()
    assert values("show", 20, "-s", source)["type"] == "incremental"
    assert "is used by" in run("delete", 10, "--yes", "-s", source, code=4)
    run("fork", 20, "--to", other, "-s", source)
    run("gc", "-s", other)
    assert "good" in run("verify", 20, "-s", other)
    assert restored(other)["model"]["w"][0, 0] == 10
    with CheckpointManager(other, keep_count=1) as manager:
        manager.save_state(a_state(30), 30)
        manager.wait_until_finished()
        manager.save_state(a_state(40), 40)
        manager.wait_until_finished()
    assert len(list(other.glob("step-*"))) == 1, "and it goes when nobody uses it"
    run("export", 20, tmp_path / "whole.safetensors", "-s", source)
    run("import", tmp_path / "whole.safetensors", "-s", tmp_path / "third")
    assert restored(tmp_path / "third")["model"]["frozen"].tolist() == [0] * 5

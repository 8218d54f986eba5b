"""A step that is saved a second time through DCP: the state of the second save is never silently discarded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.errors import StorageError
from strata.integrations.dcp import JsonSavePlanner, StrataWriter
from tests.unit.checkpoint.ports import Cluster
from tests.unit.integrations.dcp.test_dcp import a_state, flat, load, save

LIMIT_S = 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_by(writer: StrataWriter, value: float, step: int) -> None:
    dcp_save(a_state(value), checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())


def test_without_coordinators_a_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    writer = StrataWriter(tmp_path, keep_count=2)
    for value, step in ((1, 7), (2, 8), (3, 7), (4, 7)):
        save_by(writer, value, step)
        assert flat(load(tmp_path, a_state(0))) == flat(a_state(value))
        assert flat(load(tmp_path, a_state(0), step=step)) == flat(a_state(value))
        assert step == 7 or flat(load(tmp_path, a_state(0), step=7)) == flat(a_state(1))
    assert flat(load(tmp_path, a_state(0), step=8)) == flat(a_state(2)), "7 has one place only"
    save_by(writer, 5, 8)
    writer.close()
    assert flat(load(tmp_path, a_state(0), step=7)) == flat(a_state(4))
    assert flat(load(tmp_path, a_state(0), step=8)) == flat(a_state(5))
    assert len(list(tmp_path.glob("step-*"))) == 2, "the ones before went by the rules"


@pytest.mark.parametrize("steps", [(1, 2, 3, 1), (1, 2, 3, 2, 3, 1), (5, 6, 7, 4, 5)])
def test_an_earlier_step_saved_again_is_the_newest_even_if_it_was_removed(
    steps: tuple[int, ...], tmp_path: Path
) -> None:
    writer = StrataWriter(tmp_path, keep_count=2)
    for value, step in enumerate(steps):
        save_by(writer, value, step)
    writer.close()
    assert flat(load(tmp_path, a_state(0), step=steps[-1])) == flat(a_state(len(steps) - 1))
    assert flat(load(tmp_path, a_state(0))) == flat(a_state(len(steps) - 1)), "the newest of all"


def test_coordinators_refuse_a_second_save_of_a_step(tmp_path: Path) -> None:
    cluster = Cluster(n1=1)
    writer = StrataWriter(tmp_path, client=cluster.port(0))
    save_by(writer, 1, 7)
    with pytest.raises(CheckpointException, match="step 7 is saved already") as error:
        save_by(writer, 2, 7)
    assert "a later step" in str(error.value)
    with pytest.raises(CheckpointException, match="step 7 is saved already"):
        save(tmp_path, a_state(2), 7, client=cluster.port(0))
    assert flat(load(tmp_path, a_state(0), client=cluster.port(0), step=7)) == flat(a_state(1))
    save_by(writer, 2, 8)
    writer.close()
    assert flat(load(tmp_path, a_state(0), client=cluster.port(0), step=8)) == flat(a_state(2))


def test_without_retention_every_save_of_a_step_stays(tmp_path: Path) -> None:
    writer = StrataWriter(tmp_path)
    for value in (1, 2, 3):
        save_by(writer, value, 7)
    writer.close()
    assert len(list(tmp_path.glob("step-*"))) == 3


def refuse_markers(patch: pytest.MonkeyPatch) -> None:
    create = LocalStorage.create_once

    def refuse(self: LocalStorage, name: str, data: bytes) -> bool:
        if name.endswith(MARKER):
            raise StorageError("the disk is full")
        return create(self, name, data)

    patch.setattr(LocalStorage, "create_once", refuse)


@pytest.mark.parametrize("reopened", [True, False])
def test_a_committed_save_that_failed_is_finished_and_refuses_a_second_save(
    reopened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Cluster(n1=1).port(0)
    writer = StrataWriter(tmp_path, client=client)
    with monkeypatch.context() as patch:
        refuse_markers(patch)
        with pytest.raises(CheckpointException, match="the disk is full"):
            save_by(writer, 1, 7)
    if reopened:
        writer.close()
        writer = StrataWriter(tmp_path, client=client)
    with pytest.raises(CheckpointException, match="step 7 is saved already"):
        save_by(writer, 2, 7)
    assert flat(load(tmp_path, a_state(0), step=7, client=client)) == flat(a_state(1))
    assert len(list(tmp_path.rglob(MARKER))) == 1
    save_by(writer, 2, 8)
    writer.close()
    assert flat(load(tmp_path, a_state(0), step=8, client=client)) == flat(a_state(2))


def test_a_save_whose_marker_failed_is_replaced_by_the_next_save_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StrataWriter(tmp_path)
    with monkeypatch.context() as patch:
        refuse_markers(patch)
        with pytest.raises(CheckpointException, match="the disk is full"):
            save_by(writer, 1, 7)
    save_by(writer, 2, 7)
    writer.close()
    assert flat(load(tmp_path, a_state(0), step=7)) == flat(a_state(2))
    assert flat(load(tmp_path, a_state(0))) == flat(a_state(2))
    assert len(list(tmp_path.rglob(MARKER))) == 1
    assert len(list(tmp_path.glob("step-*"))) == 1, "a full disk gets its space back"


class Late(JsonSavePlanner):
    """A planner that waits until the test sets `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.planning, self.go_on = threading.Event(), threading.Event()

    def create_local_plan(self) -> SavePlan:
        self.planning.set()
        assert self.go_on.wait(LIMIT_S)
        return super().create_local_plan()


@pytest.mark.parametrize("coordinated", [False, True])
def test_a_new_save_aborts_the_save_in_progress(coordinated: bool, tmp_path: Path) -> None:
    """Neither save may store its state under the step of the other save."""
    cluster = Cluster(n1=1)
    writer = StrataWriter(tmp_path, keep_count=0, client=cluster.port(0) if coordinated else None)
    first, second = Late(), Late()

    def begin(value: float, planner: Late) -> Any:
        saving = async_save(
            a_state(value),
            checkpoint_id=str(int(value)),
            storage_writer=writer,
            planner=planner,
            no_dist=True,
        )
        assert planner.planning.wait(LIMIT_S)
        return saving

    ten = begin(10, first)
    twenty = begin(20, second)
    first.go_on.set()
    with pytest.raises(CheckpointException, match="step 10 was given up: that of step 20 began"):
        ten.result(LIMIT_S)
    second.go_on.set()
    twenty.result(LIMIT_S)
    writer.close()
    again = cluster.port(0) if coordinated else None
    assert flat(load(tmp_path, a_state(0), step=20, client=again)) == flat(a_state(20))
    with pytest.raises(CheckpointException, match="no checkpoint of step 10"):
        load(tmp_path, a_state(0), step=10, client=again)

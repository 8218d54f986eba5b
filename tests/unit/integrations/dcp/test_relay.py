"""Requests that DCP's own process sends through the trainer's process."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointNotFound, ConfigError, Refused, StaleIncarnation
from strata.integrations.dcp import JsonSavePlanner, StrataWriter
from strata.integrations.dcp.relay import BorrowedPort, lend
from strata.v1.checkpoints_pb2 import GetCheckpointRequest
from tests.unit.checkpoint.ports import Cluster, state_of
from tests.unit.integrations.dcp.test_dcp import a_state, flat, load

LIMIT_S = 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def borrowed() -> Iterator[BorrowedPort]:
    port = BorrowedPort(pickle.loads(pickle.dumps(lend(Cluster(n1=1).port(0)))))
    yield port
    port._pipe.close()


def lenders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "strata-dcp-lender"]


def test_a_borrowed_port_has_the_identity_of_its_lender(borrowed: BorrowedPort) -> None:
    assert (borrowed.job, borrowed.uid, borrowed.rank, borrowed.world_size) == ("job", "uid-1", 0, 1)
    assert borrowed.restore_point is None
    with pytest.raises(Refused, match="cannot wait at 'x'"):
        borrowed.barrier("x")


def test_a_save_is_committed_over_a_borrowed_port(tmp_path: Path) -> None:
    """The writer is unpickled for each save, as in DCP's own process."""
    cluster = Cluster(n1=1)
    trainers = StrataWriter(tmp_path, client=cluster.port(0), metadata={"a": "b"})
    used: list[Any] = []
    for step in (7, 8):
        writer = pickle.loads(pickle.dumps(trainers))
        used.append(writer)
        assert (writer.metadata, writer.config) == ({"a": "b"}, trainers.config)
        dcp_save(a_state(step), checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())
        assert state_of(cluster, step) is CheckpointState.COMMITTED
        assert flat(load(tmp_path, a_state(0), step=step, client=cluster.port(0))) == flat(a_state(step))
    assert used[0] is used[1], "its memory is used again by the next save"
    used[0].close()
    before = lenders()
    used[0]._port._pipe.close()
    for thread in before:
        thread.join(LIMIT_S)
    assert lenders() == [], "nobody is asked for who has let go"


def test_errors_come_back_as_they_are(borrowed: BorrowedPort) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointNotFound):
            borrowed.call(GetCheckpointRequest(job="job", step=5))


def test_a_call_without_the_trainer_fails_without_a_retry() -> None:
    cluster = Cluster(n1=1)
    port = BorrowedPort(lend(cluster.port(0)))

    def ends(request: object) -> None:
        raise EOFError

    cluster.on_call = ends
    for _ in range(2):
        with pytest.raises(StaleIncarnation, match="trainer"):  # no retry
            port.call(GetCheckpointRequest(job="job", step=5))


def test_a_writer_cannot_be_passed_to_a_new_process(tmp_path: Path) -> None:
    writer = StrataWriter(tmp_path, client=Cluster(n1=1).port(0))
    process = multiprocessing.get_context("spawn").Process(target=print, args=(writer,))
    before = lenders()  # those of other tests may still be ending
    with pytest.raises(ConfigError, match="cannot be an argument"):
        process.start()
    assert set(lenders()) <= set(before)


def test_a_port_lent_during_a_request_survives_the_failure_of_that_request(
    borrowed: BorrowedPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking = threading.Thread(target=borrowed.take, args=(lend(Cluster(n1=1).port(0)),))

    def ends() -> None:
        taking.start()
        taking.join(0.1)
        raise EOFError

    request = GetCheckpointRequest(job="job", step=5)
    monkeypatch.setattr(borrowed._pipe, "recv", ends)
    with pytest.raises(StaleIncarnation):
        borrowed.call(request)
    taking.join(LIMIT_S)
    with pytest.raises(CheckpointNotFound):
        borrowed.call(request)


def test_the_answer_to_an_interrupted_request_does_not_answer_the_next_request(
    borrowed: BorrowedPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    request = GetCheckpointRequest(job="job", step=5)
    with monkeypatch.context() as patch:
        patch.setattr(borrowed._pipe, "recv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            borrowed.call(request)
    with pytest.raises(StaleIncarnation):
        borrowed.call(request)

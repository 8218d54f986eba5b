"""What DCP's process of its own asks through the trainer's."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from strata.checkpoint.catalog import CheckpointAck, CheckpointSeal, SaveRequest
from strata.client.checkpoint_catalog import CoordinatedCatalog
from strata.core.records import CheckpointState
from strata.errors import CheckpointNotFound, Unavailable
from strata.integrations.dcp import StrataWriter
from strata.integrations.dcp.relay import BorrowedPort, Lender
from strata.v1.checkpoints_pb2 import GetCheckpointRequest
from tests.unit.checkpoint.ports import Cluster


@pytest.fixture
def lender() -> Iterator[Lender]:
    found = Lender(Cluster(n1=1).port(0))
    yield found
    found.close()


def test_a_borrowed_port_is_the_rank_that_lent_it(lender: Lender) -> None:
    port = BorrowedPort(pickle.loads(pickle.dumps(lender.address)))
    assert (port.job, port.uid, port.rank, port.world_size) == ("job", "uid-1", 0, 1)
    assert port.restore_point is None


def test_a_save_is_committed_over_it(lender: Lender) -> None:
    catalog = CoordinatedCatalog(
        BorrowedPort(lender.address),
        root_uri="file:///x",
        new_id=lambda: "a1",
        save_wait_s=5,
        ask_again_s=0.01,
    )
    record = catalog.begin(SaveRequest(step=7))
    catalog.ack(record, CheckpointAck(digest="xxh3-128:0", size_bytes=1))
    catalog.seal(
        record, CheckpointSeal(manifest_digest="xxh3-128:1", size_bytes=1, model_hash="m", part_digests=())
    )
    done = catalog.wait(
        record, lambda r: r.state is CheckpointState.COMMITTED, timeout_s=20, cancelled=Event()
    )
    assert done.step == 7


def test_errors_come_back_as_they_are(lender: Lender) -> None:
    with pytest.raises(CheckpointNotFound):
        BorrowedPort(lender.address).call(GetCheckpointRequest(job="job", step=5))


def test_without_the_trainer_nobody_answers(lender: Lender) -> None:
    address = lender.address
    lender.close()
    with pytest.raises(Unavailable, match="trainer"):
        BorrowedPort(address).call(GetCheckpointRequest(job="job", step=5))


def test_a_writer_is_pickled_without_its_session(tmp_path: Path) -> None:
    writer = StrataWriter(tmp_path, step=3, client=Cluster(n1=1).port(0), metadata={"a": "b"})
    data = pickle.dumps(writer)
    other, again = pickle.loads(data), pickle.loads(data)
    assert other is again, "its memory is used again by the next save"
    assert (other.step, other.metadata, other.config) == (3, {"a": "b"}, writer.config)
    writer.close()

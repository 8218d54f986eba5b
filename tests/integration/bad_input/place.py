"""The cluster for the cases of bad input, with members that no case may affect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message

import strata
from strata import CheckpointManager, CoordinatorClient, RankClient
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import StrataError
from strata.v1 import (
    admin_pb2,
    barriers_pb2,
    checkpoints_pb2,
    datasets_pb2,
    members_pb2,
    recovery_pb2,
    worlds_pb2,
)
from strata.v1.worlds_pb2 import JobSpec
from strata.wire.status import from_rpc

LIMIT_S: Final = 30.0
BEAT_S: Final = 0.4
PATHS: Final = {
    method.input_type.full_name: f"/{service.full_name}/{method.name}"
    for file in (
        *(admin_pb2, barriers_pb2, checkpoints_pb2, datasets_pb2, members_pb2, recovery_pb2, worlds_pb2),
    )
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class Living:
    """A member kept alive by heartbeats from its own thread."""

    def __init__(self, endpoints: str, job: str, worker: str, slots: int = 1) -> None:
        self.job, self.worker = job, worker
        self.client = CoordinatorClient.connect(endpoints, job=job)
        answer = self.client.register(
            worker_id=worker, slots=slots, spec=JobSpec(min_workers=1, max_workers=1)
        )
        self.incarnation = answer.incarnation
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def boot(self) -> str:
        return self.client.boot

    def generation(self, after: int = 0) -> int:
        """Return the job's generation once it is above `after` and its world has this member."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            world = self.client.world()
            if world.world.generation > after and any(
                m.incarnation == self.incarnation for m in world.members
            ):
                return world.world.generation
            assert time.monotonic() < deadline, world

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self.client.leave(worker_id=self.worker)
        self.client.close()

    def _live(self) -> None:
        while not self._over.wait(BEAT_S):
            self.client.heartbeat(worker_id=self.worker)


class Place:
    """A cluster with a witness that trains, a member with a pair of ranks, and a job in its second generation."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.endpoints = cluster.endpoints
        self.folder = folder
        self.witness: RankClient = strata.connect(self.endpoints, job="witness", worker_id="w0")
        self.checkpoints = CheckpointManager(folder / "saves", client=self.witness)
        self.checkpoints.save(b"weights", step=1).wait(LIMIT_S)
        self.pair = Living(self.endpoints, "pair", "p0", slots=2)
        self.pair_generation = self.pair.generation()
        moved = Living(self.endpoints, "moved", "m0")
        self.old_generation, self.old_incarnation = moved.generation(), moved.incarnation
        moved.end()
        self.moved = Living(self.endpoints, "moved", "m0")
        self.new_generation = self.moved.generation(self.old_generation)

    def client(self, job: str = "witness") -> CoordinatorClient:
        return CoordinatorClient.connect(self.endpoints, job=job, timeout_s=LIMIT_S)

    def check(self) -> None:
        """Assert that every replica serves, the witness still trains in its world, and its checkpoint is readable."""
        for coordinator in self.cluster.coordinators:
            assert coordinator.child.poll() is None, coordinator.child.tail()
            with CoordinatorClient.connect(coordinator.address, job="witness", timeout_s=LIMIT_S) as client:
                job = client.job_status()
                assert (job.world.generation, job.latest_step) == (self.witness.generation, 1)
        assert self.witness.barrier("alive", b"here", timeout_s=LIMIT_S) == {0: b"here"}
        assert self.checkpoints.load_bytes(step=1) == b"weights"

    def end(self) -> None:
        self.pair.end()
        self.moved.end()
        self.checkpoints.close()
        self.witness.close()


@contextmanager
def place(cluster: LocalCluster, folder: Path) -> Iterator[Place]:
    """Run the members in `cluster` until the end of the block."""
    made = Place(cluster, folder)
    try:
        yield made
    finally:
        made.end()


def call(
    address: str, request: Message, *, timeout_s: float = LIMIT_S, channel: grpc.Channel | None = None
) -> Any:
    """Send a request without Strata's library, as a client in another language does."""
    path = PATHS[request.DESCRIPTOR.full_name]
    return send(address, path, request.SerializeToString(), timeout_s=timeout_s, channel=channel)


def send(
    address: str,
    path: str,
    body: bytes,
    *,
    timeout_s: float = LIMIT_S,
    channel: grpc.Channel | None = None,
) -> bytes:
    """Send these bytes to a method; return the bytes of the response."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with channel or grpc.insecure_channel(address, options=options) as opened:
        method: Any = opened.unary_unary(path)  # no serializer: raw bytes
        answer: bytes = method(body, timeout=timeout_s)
        return answer


def refusal(address: str, request: Message, **more: Any) -> tuple[grpc.StatusCode, StrataError, bool]:
    """Return the status of a rejected request, the error in it, and True if the error was packed in the metadata."""
    try:
        call(address, request, **more)
    except grpc.RpcError as error:
        metadata: Any = error.trailing_metadata() or ()
        packed = any(key == "strata-error-bin" for key, _ in metadata)
        return error.code(), from_rpc(error, address), packed
    raise AssertionError(f"{request.DESCRIPTOR.name} was answered")

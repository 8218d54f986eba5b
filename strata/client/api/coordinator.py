"""`CoordinatorClient`: blocking calls to the coordinators, and membership by heartbeats."""

from __future__ import annotations

import json
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Self

from google.protobuf.message import Message

from strata.client import event_loop
from strata.client.api import arguments
from strata.config import Credentials, LibraryConfig
from strata.core.ids import WorkerId, checked_id
from strata.core.members.registration import DEFAULT_JOB, bare_registration
from strata.errors import ConfigError, InvalidArgument, NotFound
from strata.session.endpoints import Endpoint, parse_endpoints
from strata.transport.unary import ATTEMPT_S, UnaryClient
from strata.v1.admin_pb2 import GetResourceRequest, GetStatusRequest, GetStatusResponse
from strata.v1.barriers_pb2 import ListBarriersRequest, ListBarriersResponse
from strata.v1.checkpoints_pb2 import Checkpoint, GetCheckpointRequest, ListCheckpointsRequest
from strata.v1.datasets_pb2 import Dataset, ListDatasetsRequest, SampleCursor
from strata.v1.members_pb2 import (
    HeartbeatRequest,
    LeaveRequest,
    ListMembersRequest,
    Member,
    RegisterRequest,
    RegisterResponse,
    Registration,
)
from strata.v1.recovery_pb2 import RecoveryRequest, RecoveryResponse
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    DeleteJobRequest,
    Generation,
    GetJobRequest,
    GetWorldRequest,
    GetWorldResponse,
    Job,
    JobSpec,
    ListGenerationsRequest,
    ListJobsRequest,
    ResumeJobRequest,
    ScaleJobRequest,
    StopJobRequest,
    StopNotice,
    World,
)
from strata.wire.pages import whole
from strata.wire.worlds import spec_message

POLL_S: Final = 0.1

ACTIONS: Final = {
    "preempt": STOP_ACTION_PREEMPT,
    "pause": STOP_ACTION_PAUSE,
    "drain": STOP_ACTION_DRAIN,
}

REGISTER_S: Final = 30.0
"""Seconds a registration may take: if another process has the name, the registration waits until that process is
known to be dead or alive.
"""


class CoordinatorClient:
    """A blocking client of a cluster, for any thread.

    Answers are the messages of `strata.v1`. Every call tries one endpoint after the other until `timeout_s`,
    then raises `Unavailable`. All calls are idempotent. Nothing is connected before the first call.

    The client can also act as a simple member: `register` (or the first `heartbeat`) makes a worker a member, and
    `heartbeat` keeps the member alive. Trainers use `strata.connect()` instead: its open session stream is the
    heartbeat. All heartbeats of one client carry the same random boot id. So a second client with the same worker
    id counts as another process, and is refused while the first client lives.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        job: str,
        timeout_s: float,
        credentials: Credentials | None = None,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.credentials = credentials
        self.job = arguments.text("job", job)
        self.timeout_s = arguments.seconds(timeout_s)
        self.boot = uuid.uuid4().hex
        self._loop = event_loop.shared()
        self._unary = UnaryClient(self.endpoints, random.Random(), credentials)
        self._registered: dict[str, Registration] = {}

    @classmethod
    def connect(
        cls,
        endpoints: str | Iterable[str] | None = None,
        *,
        job: str | None = None,
        timeout_s: float = 10.0,
        credentials: Credentials | None = None,
    ) -> Self:
        """Return a client of the coordinators at `endpoints`: "a:50051,b:50051,c:50051".

        Default `endpoints`: STRATA_ENDPOINTS, else `endpoints` in strata.toml. Default `job`: STRATA_JOB, else `job` in
        strata.toml, else "default". Without `credentials`, the environment and strata.toml provide them. Raise
        `ConfigError` if no coordinator is named.
        """
        if endpoints is None:
            found = LibraryConfig.load(env=os.environ)
            if not found.endpoints:
                raise ConfigError(
                    "no coordinator is named",
                    hint="set STRATA_ENDPOINTS to host:port,host:port…, or `endpoints` in strata.toml, or pass them:"
                    ' CoordinatorClient.connect("host:50051")',
                )
            endpoints, job = found.endpoints, found.job if job is None else job
            own = found.credentials if credentials is None else credentials
        else:
            own = Credentials.load(env=os.environ) if credentials is None else credentials
        parsed = parse_endpoints(endpoints, own)
        return cls(parsed, job=DEFAULT_JOB if job is None else job, timeout_s=timeout_s, credentials=own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Workers registered here stay members until they are removed for missing heartbeats."""
        if not self._loop.is_inherited:
            self._loop.call(self._unary.close())

    def call(self, request: Message, *, timeout_s: float | None = None, attempt_s: float = ATTEMPT_S) -> Any:
        """Return the response to any unary request of `strata.v1`."""
        within_s = self.timeout_s if timeout_s is None else arguments.seconds(timeout_s)
        attempt_s = arguments.seconds(attempt_s, what="attempt_s")
        return self._loop.call(self._unary.call(request, timeout_s=within_s, attempt_s=attempt_s))

    def call_whole(self, request: Message) -> Any:
        """Return the response to a list request, with all pages of the list."""
        return whole(self.call, request)

    def call_until(self, request: Message, accept: Callable[[Any], bool]) -> Any:
        """Repeat the request until `accept` is true for the answer; after the client's timeout return the last answer.

        The answer to a list request has all pages of the list.
        """
        send = self.call_whole if "page_token" in request.DESCRIPTOR.fields_by_name else self.call
        deadline = time.monotonic() + self.timeout_s
        while True:
            answer = send(request)
            if accept(answer) or time.monotonic() >= deadline:
                return answer
            time.sleep(POLL_S)

    # -- reading

    def status(self) -> GetStatusResponse:
        """Return the replicas, the leader and etcd's members."""
        answer: GetStatusResponse = self.call(GetStatusRequest())
        return answer

    def resource(self, path: str) -> Any:
        """Return a resource of the HTTP API, parsed by `json.loads`: `resource("/jobs/gpt/ranks")`.

        Raise `NotFound` if there is no resource at `path`, `QuotaExceeded` if it does not fit into an answer.
        """
        return json.loads(self.call(GetResourceRequest(path=path)).json)

    def jobs(self) -> list[Job]:
        """Return every job of the cluster."""
        return list(self.call_whole(ListJobsRequest()).jobs)

    def job_status(self) -> Job:
        """Return this client's job; `NotFound` if it does not exist."""
        job: Job = self.call(GetJobRequest(job=self.job)).job
        return job

    def world(self) -> GetWorldResponse:
        """Return the job's current world and its members."""
        answer: GetWorldResponse = self.call_whole(GetWorldRequest(job=self.job))
        return answer

    def members(self) -> list[Member]:
        """Return the job's members, standbys included, with the progress of their ranks.

        Another client's change may be missing for a moment: each replica answers such reads from its own view.
        """
        return list(self.call_whole(ListMembersRequest(job=self.job)).members)

    def datasets(self) -> list[Dataset]:
        """Return the job's datasets."""
        return list(self.call_whole(ListDatasetsRequest(job=self.job)).datasets)

    def sample_cursors(self) -> list[SampleCursor]:
        """Return how far the training had used its datasets at its newest committed checkpoint."""
        return list(self.call(ListDatasetsRequest(job=self.job, page_size=1)).cursors)

    def barriers(self) -> ListBarriersResponse:
        """Return the job's open barriers, and those that ended most recently."""
        answer: ListBarriersResponse = self.call_whole(ListBarriersRequest(job=self.job))
        return answer

    def checkpoints(self) -> list[Checkpoint]:
        """Return every checkpoint in the job's catalog."""
        return list(self.call_whole(ListCheckpointsRequest(job=self.job)).checkpoints)

    def latest_checkpoint(self) -> Checkpoint:
        """Return the newest committed checkpoint; `CheckpointNotFound` before the first."""
        checkpoint: Checkpoint = self.call(GetCheckpointRequest(job=self.job, latest=True)).checkpoint
        return checkpoint

    def recovery(self, *, worker_id: str) -> RecoveryResponse:
        """Return the recovery state of a worker: world, ranks, checkpoint and shards."""
        worker_id = checked_id("worker", worker_id)
        answer: RecoveryResponse = self.call_whole(RecoveryRequest(job=self.job, worker_id=worker_id))
        return answer

    # -- operating a job

    def generations(self, *, limit: int = 0) -> list[Generation]:
        """Return the job's generations with their reasons, the newest first; `limit` 0: all that are stored."""
        limit = arguments.integer("limit", limit, below=2**31)
        answer = self.call_whole(ListGenerationsRequest(job=self.job, limit=limit))
        return list(answer.generations)

    def scale(self, *, min_workers: int = 0, max_workers: int = 0) -> Job:
        """Change the job's least and greatest number of members; 0 leaves a number unchanged. Return the job."""
        least = arguments.integer("min_workers", min_workers, below=2**31)
        most = arguments.integer("max_workers", max_workers, below=2**31)
        job: Job = self.call(ScaleJobRequest(job=self.job, min_workers=least, max_workers=most)).job
        return job

    def stop(
        self,
        action: str,
        *,
        worker_ids: Iterable[str] = (),
        reason: str = "",
        grace_s: float = 60.0,
        now: bool = False,
    ) -> StopNotice | None:
        """Request all ranks to agree on a step, save it and stop: "preempt", "pause" or "drain".

        With "drain", the members `worker_ids` leave. `now` stops without a save. Return the notice in force, which
        may come from an earlier request. Return None if there was no rank to stop, or if the job was paused
        immediately.
        """
        if action not in ACTIONS:
            raise InvalidArgument(
                f"{str(action)[:80]!r} is no way to stop", hint=f"one of {', '.join(ACTIONS)}"
            )
        request = StopJobRequest(
            job=self.job,
            action=ACTIONS[action],
            reason=arguments.text("reason", reason),
            worker_ids=arguments.texts("worker_ids", worker_ids),
            grace_ms=max(1, round(1000 * arguments.seconds(grace_s, what="grace_s"))),
            now=bool(now),
        )
        answer = self.call(request)
        return answer.notice if answer.HasField("notice") else None

    def resume(self) -> Job:
        """Let the paused job train again; return it."""
        job: Job = self.call(ResumeJobRequest(job=self.job)).job
        return job

    def delete(self) -> None:
        """Delete the job, which must have no members; the files of its checkpoints stay."""
        self.call(DeleteJobRequest(job=self.job))

    # -- membership by heartbeats

    def register(
        self,
        *,
        worker_id: str,
        slots: int = 1,
        host: str | None = None,
        devices: Iterable[str] = (),
        spec: JobSpec | None = None,
    ) -> RegisterResponse:
        """Make `worker_id` a member of the job; if the job is new, create it with `spec`.

        The answer has the incarnation, the current world, and `detect_s`, the seconds within which the next
        heartbeat is due. Registering again is no error. Raise `Conflict` if another live process has this name,
        `StaleIncarnation` if another process has replaced this client's member.
        """
        worker_id = checked_id("worker", worker_id)
        slots = arguments.integer("slots", slots, below=2**31, hint="the number of ranks it runs")
        if slots == 0:
            raise InvalidArgument("slots is 0", hint="the number of ranks that it runs, from 1 on")
        if spec is not None and not isinstance(spec, JobSpec):
            raise InvalidArgument(f"spec is a {type(spec).__name__}", hint="pass a strata.v1 JobSpec")
        known = self._registered.get(worker_id)
        registration = Registration(
            job=self.job,
            worker_id=worker_id,
            boot=self.boot,
            host=socket.gethostname() if host is None else arguments.text("host", host),
            slots=slots,
            devices=arguments.texts("devices", devices),
            pid=os.getpid(),
            spec=spec,
            incarnation=known.incarnation if known is not None else 0,
        )
        return self._register(registration)

    def _register(self, registration: Registration) -> RegisterResponse:
        answer: RegisterResponse = self.call(
            RegisterRequest(registration=registration),
            timeout_s=max(self.timeout_s, REGISTER_S),
            attempt_s=REGISTER_S,
        )
        registration.incarnation = answer.incarnation
        self._registered[registration.worker_id] = registration
        return answer

    def heartbeat(self, *, worker_id: str) -> World:
        """Report that `worker_id` is alive, and return the current world.

        If this client has not registered the worker, the first heartbeat registers the worker, with one slot. If
        this registration creates the job, the job takes from one worker up to the largest number that Strata allows. If a worker was removed for missing
        heartbeats and not replaced, its next heartbeat registers the worker again: the worker gets a new
        incarnation, and counts as a new member in the next world.
        """
        worker_id = checked_id("worker", worker_id)
        known = self._registered.get(worker_id)
        if known is None:
            spec = spec_message(bare_registration(WorkerId(worker_id)).spec)
            return self.register(worker_id=worker_id, spec=spec).world
        request = HeartbeatRequest(
            job=self.job, worker_id=worker_id, boot=self.boot, incarnation=known.incarnation
        )
        try:
            world: World = self.call(request).world
        except NotFound:
            return self._register(known).world
        return world

    def leave(self, *, worker_id: str) -> None:
        """End the membership of a worker that this client registered."""
        worker_id = checked_id("worker", worker_id)
        known = self._registered.get(worker_id)
        if known is None:
            raise InvalidArgument(
                f"this client did not register a worker {worker_id!r}",
                hint="the client that registered it must end it; else it ends by timeout",
            )
        self.call(LeaveRequest(job=self.job, worker_id=worker_id, incarnation=known.incarnation))
        self._registered.pop(worker_id, None)

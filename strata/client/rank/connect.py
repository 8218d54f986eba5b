"""`strata.connect()`: open this process's session, as its environment or its caller specifies."""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from google.protobuf import json_format

from strata.client import event_loop
from strata.client.api import arguments
from strata.client.rank.rank_client import RankClient
from strata.client.rank.shared_session import RankObserver, RankPlace, SharedSession, connected, running
from strata.client.rank.stack_dump import answer_stack_dumps
from strata.client.rank.standalone import join, start_of
from strata.client.rank_session import RankSession
from strata.config import Credentials, LibraryConfig
from strata.config.scheduler import run_identity
from strata.core.ids import checked_id
from strata.core.timing import Timing
from strata.errors import ConfigError, InvalidArgument, Unavailable
from strata.session.endpoints import Endpoint, parse_endpoints
from strata.session.terms import Pace
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import RankHello
from strata.v1.worlds_pb2 import JobSpec, RestorePoint

_RANK_VARIABLES: Final = (
    "STRATA_SOCKET",
    "STRATA_JOB",
    "STRATA_WORKER_ID",
    "STRATA_GENERATION",
    "RANK",
    "WORLD_SIZE",
)


def connect(
    endpoints: str | Iterable[str] | None = None,
    *,
    job: str | None = None,
    worker_id: str | None = None,
    min_workers: int = 1,
    max_workers: int | None = None,
    timeout_s: float | None = None,
    credentials: Credentials | None = None,
    cannot_restart: bool = False,
) -> RankClient:
    """Return this process's rank, once it is part of a world.

    Under `strata run`, and without `endpoints`, this is the rank that the environment names. Elsewhere the process
    becomes a member of `job` with one rank, at `endpoints`, under `worker_id`. Default `job`: STRATA_JOB, else
    `job` in strata.toml, else "default". Default `endpoints`: STRATA_ENDPOINTS, else `endpoints` in strata.toml.
    Default `worker_id`: STRATA_WORKER_ID, else the host's name with the local rank or process id. If the job is
    new, it is created with `min_workers` and `max_workers` (default: `min_workers`). The call returns once a world
    has formed with this process in it; without `timeout_s` it waits without limit.

    `cannot_restart` is for a program that ends when the world changes, such as `strata.init` without an agent. A
    world that has such a member does not grow to admit another one.

    `credentials` are this process's identity and the authorities it trusts; the default comes from the environment
    and strata.toml. A rank under `strata run` needs no credentials: its agent has them.

    Connecting again in the same process returns another client of the same session. A standalone process has one
    session for each combination of endpoints, job and worker id.

    `ConfigError`: neither the environment nor the file names a coordinator. `Unavailable`: no world, or no
    coordinator, within `timeout_s` (for a coordinator 300 s by default). `Conflict`: another live process has this
    name. `JobDone` or `JobFailed`: the job has ended. `Refused`: the ended job belonged to another run, if the
    environment identifies runs (STRATA_RUN_ID, SLURM_JOB_ID).
    """
    environment = os.environ
    timeout_s = None if timeout_s is None else arguments.seconds(timeout_s)
    spec = JobSpec(
        min_workers=_members("min_workers", min_workers),
        max_workers=_members("max_workers", min_workers if max_workers is None else max_workers),
    )
    background = event_loop.shared()
    if endpoints is None and "STRATA_SOCKET" in environment:
        attach = partial(_attach, background, environment)
        return background.call(_share(background, environment["STRATA_SOCKET"], attach, timeout_s))
    all_given = endpoints is not None and job and credentials is not None
    found = LibraryConfig() if all_given else LibraryConfig.load(env=environment)
    addresses = list(found.endpoints) if endpoints is None else endpoints
    if addresses in ("", []):
        raise ConfigError(
            "this process is not under `strata run` and knows no coordinator",
            hint="set STRATA_ENDPOINTS, or `endpoints` in strata.toml, or pass them:"
            ' strata.connect("host:50051")',
        )
    registration = Registration(
        job=checked_id("job", job or found.job),
        worker_id=checked_id(
            "worker", worker_id or environment.get("STRATA_WORKER_ID") or _own_name(environment)
        ),
        boot=uuid.uuid4().hex,
        host=socket.gethostname(),
        slots=1,
        pid=os.getpid(),
        spec=spec,
        cannot_restart=cannot_restart,
        run_id=run_identity(environment),
    )
    try:
        detect_s = float(environment.get("STRATA_DETECT_S", "5"))
        Timing.derive(detect_s)
    except ValueError:
        raise ConfigError(f"STRATA_DETECT_S is {environment['STRATA_DETECT_S']!r}, not a number") from None
    own = found.credentials if credentials is None else credentials
    words = (
        [addresses] if isinstance(addresses, str) or not isinstance(addresses, Iterable) else list(addresses)
    )
    key = frozenset(parse_endpoints(words, own)), registration.job, registration.worker_id
    join_as = partial(join, background, start_of(words, detect_s, own), registration)
    return background.call(_share(background, key, join_as, timeout_s))


def _members(name: str, value: object) -> int:
    """Return a number of members; the coordinator checks that the minimum does not exceed the maximum."""
    count = arguments.integer(name, value, below=2**31, hint="a number of members, from 1 on")
    if count == 0:
        raise InvalidArgument(f"{name} is 0", hint="a world has at least one member")
    return count


@dataclass(slots=True)
class _Shared:
    """The shared session of one rank of this process; the caller that opens the session must hold `lock`."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    shared_session: SharedSession | None = None


_shared: Final[defaultdict[object, _Shared]] = defaultdict(_Shared)
"""The sessions by the agent's socket; for a standalone process, by endpoints, job and worker id. A second session of
the same rank or member would be refused.
"""


async def _share(
    background: event_loop.BackgroundLoop,
    key: object,
    join_session: Callable[[float | None], Awaitable[SharedSession]],
    timeout_s: float | None,
) -> RankClient:
    """Return a client of this process's session as this rank; open the session if none is open."""
    shared, clock = _shared[key], asyncio.get_running_loop().time
    deadline = None if timeout_s is None else clock() + timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            await shared.lock.acquire()
    except TimeoutError:
        raise Unavailable(
            f"within {timeout_s:g} s no world had a place for this member, as which another thread joins"
        ) from None
    try:
        before = shared.shared_session
        if before is None or not before.users or before.session.error is not None:
            shared.shared_session = await join_session(
                None if deadline is None else max(0.0, deadline - clock())
            )
            if before is not None and (before.session.token.uid, before.place) == (
                shared.shared_session.session.token.uid,
                shared.shared_session.place,
            ):
                shared.shared_session.rounds = (
                    before.rounds
                )  # the same rank, so it has completed the same rounds
        assert shared.shared_session is not None
        return RankClient(shared.shared_session, background)
    finally:
        shared.lock.release()


async def _attach(
    background: event_loop.BackgroundLoop, environment: Mapping[str, str], timeout_s: float | None
) -> SharedSession:
    """Attach to the agent as the rank that the environment names."""
    missing = [name for name in _RANK_VARIABLES if name not in environment]
    if missing:
        raise ConfigError(
            f"STRATA_SOCKET is set, but {', '.join(missing)} is not",
            hint="keep the variables that `strata run` gives to a rank",
        )
    try:
        place = RankPlace(
            job=environment["STRATA_JOB"],
            worker_id=environment["STRATA_WORKER_ID"],
            generation=int(environment["STRATA_GENERATION"]),
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            restore_point=_restore_point(environment.get("STRATA_RESTORE")),
        )
        hello = RankHello(
            job=place.job,
            worker_id=place.worker_id,
            generation=place.generation,
            rank=place.rank,
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            pid=os.getpid(),
            in_process=environment.get("STRATA_IN_PROCESS") == "1",
        )
    except ValueError as error:
        raise ConfigError(f"the environment of this rank is not as `strata run` set it: {error}") from None
    answer_stack_dumps(environment)
    watcher = RankObserver()
    session = RankSession(
        Endpoint(path=environment["STRATA_SOCKET"]),
        hello,
        watcher,
        rng=random.Random(),
        pace=Pace(
            progress_s=0.0
        ),  # `ProgressReports` already coalesces: a second timer would wake this process up more often
    )
    session.on_request = watcher.on_request
    serving = running(background, session)
    serving.add_done_callback(watcher.on_ended)
    try:
        await connected(session, timeout_s, "its agent")
    except BaseException:
        serving.cancel()
        raise
    return SharedSession(session=session, watcher=watcher, place=place, owns_member=False)


def _restore_point(text: str | None) -> RestorePoint | None:
    if text is None:
        return None
    try:
        return json_format.Parse(text, RestorePoint(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise ConfigError(f"STRATA_RESTORE is not as `strata run` set it: {error}") from None


def _own_name(environment: Mapping[str, str]) -> str:
    """Return a worker id that no other process of this host uses."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100].lstrip("._-") or "host"
    return f"{host}-{environment.get('LOCAL_RANK') or os.getpid()}"

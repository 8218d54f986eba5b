"""The harness of the abuse tests: one replica under attack, and measurements of its service to legitimate users.

    async with legitimate(victim) as load:
        report = await attacked(victim, "reset", connections=12, seconds=15)
    load.assert_served()

`victim` is a replica process on its own etcd. The replica authenticates callers by token, so an attacker without
credentials gets as far as in production. The replica starts with the soft limit of descriptors that most machines
have. `legitimate` runs three kinds of load: two members of a world that meet at a barrier without pause, unary calls
on one permanent channel and on new channels, and probes of `/readyz`. Each attacker is a separate process
(`attacker.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio

from strata.config import Credentials
from strata.core.access.authority import Role
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.local_cluster import LocalCluster, LocalCoordinator
from strata.devcluster.ports import free_ports
from strata.errors import StrataError
from strata.security.certificates import Authority
from strata.security.private import write_private
from strata.security.tls import read_pem
from strata.security.tokens import TokenFile
from strata.session.link import Link
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from strata.v1.session_pb2 import Down, Up
from strata.v1.session_pb2_grpc import SessionsStub
from strata.v1.worlds_pb2 import ListJobsRequest
from strata.v1.worlds_pb2_grpc import WorldsStub
from strata.wire.status import translated
from strata.wire.streams import dialled
from strata.wire.tls import open_channel, shown
from tests.raw_member import Member
from tests.secured_fixtures import NOW, flags, issued

ATTACKER: Final = Path(__file__).with_name("attacker.py")
SOFT_DESCRIPTORS: Final = 1024
"""The soft limit that systemd and most shells give a process, whatever the hard limit is."""
P99_S: Final = 1.0
MOST_BYTES: Final = 400 << 20
MORE_BYTES: Final = 64 << 20
"""Memory that a repetition of the same attack may add; commit 91987cf added 107 MB. gRPC itself keeps some 16 MB after
eight million reset streams (measured twice), and a quick machine resets that many in one attack."""
CALL_S: Final = 10.0
"""A call that takes longer has failed. The limit is much longer than `P99_S`, so that late answers do not count as
lost."""
JOB: Final = "abused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A replica under attack."""

    replica: LocalCoordinator
    http_port: int
    tls: bool
    folder: Path

    @property
    def grpc_port(self) -> int:
        return int(self.replica.address.rpartition(":")[2])

    def rss_bytes(self) -> int:
        """Return the resident memory of the process."""
        for line in Path(f"/proc/{self.replica.child.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the replica has ended:\n" + self.replica.child.tail())

    def descriptors(self) -> int:
        """Return the number of open descriptors of the process."""
        return sum(1 for _ in Path(f"/proc/{self.replica.child.pid}/fd").iterdir())

    def who(self, role: Role, id: str) -> Credentials:  # noqa: A002
        """Return the credentials of a new token."""
        return _token(self.folder, role, id, tls=self.tls)

    def channel(self, credentials: Credentials) -> grpc.aio.Channel:
        """Return a channel with its own connection."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        pem = read_pem(credentials, NOW) if self.tls else None
        return open_channel(self.replica.address, options=options, pem=pem)


def _token(folder: Path, role: Role, id: str, *, tls: bool) -> Credentials:  # noqa: A002
    entry, text = TokenFile(folder / "accepted.json").add(role=role, id=id, now=NOW)
    path = folder / f"{entry.name}.token"
    write_private(path, text.encode())
    return Credentials(ca_file=folder / "ca" / "ca.pem" if tls else None, token_file=path)


@contextmanager
def victim(folder: Path, binary: EtcdBinary, *, tls: bool, options: tuple[str, ...] = ()) -> Iterator[Victim]:
    """Run a replica of its own, with TLS on both ports or in plaintext; `options` are additional flags."""
    authority = Authority.create(folder / "ca", cluster="default", now=NOW)

    def flags_of(name: str) -> list[str]:
        own = _token(folder, Role.COORDINATOR, name, tls=tls)
        made = [f"--token-file={own.token_file}", f"--accepted-tokens-file={folder / 'accepted.json'}"]
        if tls:  # the status page uses TLS too, because it is not on loopback
            made += [
                *flags(issued(authority, folder / name, Role.COORDINATOR, name)),
                f"--http=0.0.0.0:{http}",
            ]
        return [*made, "--log-format=json", *options]

    port, http = free_ports(2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(SOFT_DESCRIPTORS, before[1]), before[1]))
    try:
        local = LocalCluster.start(
            folder / "data",
            etcd_members=1,
            coordinators=1,
            binary=binary,
            ports=[port],
            http_ports=[http],
            fsync=False,
            options=flags_of,
            credentials=_token(folder, Role.VIEWER, "asking", tls=tls),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        yield Victim(replica=local.coordinators[0], http_port=http, tls=tls, folder=folder)
    finally:
        local.kill()


@dataclass(slots=True)
class Answers:
    """The results of one kind of request: the latency of each answer, and the errors."""

    took_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return sorted(self.took_s)[math.ceil(0.99 * len(self.took_s)) - 1] if self.took_s else math.inf


class Load:
    """The results of legitimate users so far, by kind of request."""

    def __init__(self) -> None:
        self.answers: dict[str, Answers] = {name: Answers() for name in ("call", "new", "probe", "barrier")}

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {len(a.took_s)}: p99 {1000 * a.p99_s:.0f} ms, max {1000 * max(a.took_s, default=0):.0f} ms,"
            f" {len(a.failed)} failed"
            for name, a in self.answers.items()
        )

    def assert_served(self) -> None:
        """Assert that every call, probe and barrier succeeded, 99 of 100 within a second, and that no session ended."""
        for name, answers in self.answers.items():
            assert not answers.failed, (
                f"{name} failed {len(answers.failed)} times: {answers.failed[:3]}; {self}"
            )
            assert answers.took_s, f"no {name} was answered; {self}"
            assert answers.p99_s <= P99_S, f"p99 of {name}: {answers.p99_s:.2f} s; {self}"

    async def repeat(self, name: str, act: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Repeat `act` and record the latency or error of each run."""
        answers = self.answers[name]
        while True:
            begun = time.monotonic()
            try:
                async with asyncio.timeout(CALL_S):
                    await act()
            except (StrataError, OSError, TimeoutError, AssertionError, asyncio.IncompleteReadError) as error:
                answers.failed.append(f"{type(error).__name__}: {error}")
            except grpc.aio.AioRpcError as error:
                answers.failed.append(f"{error.code().name}: {error.details()}")
            else:
                answers.took_s.append(time.monotonic() - begun)
            await asyncio.sleep(every_s)


@asynccontextmanager
async def legitimate(victim: Victim) -> AsyncIterator[Load]:
    """Run barriers, unary calls and probes while the body runs."""
    load, viewer = Load(), victim.who(Role.VIEWER, "viewer")
    tls = None
    if victim.tls:
        tls = ssl.create_default_context(cafile=str(victim.folder / "ca" / "ca.pem"))

    async def list_jobs(channel: grpc.aio.Channel) -> None:
        await WorldsStub(channel).ListJobs(ListJobsRequest(), metadata=shown(viewer))

    async def on_a_new_channel() -> None:
        async with victim.channel(viewer) as channel:
            await list_jobs(channel)

    async def probe() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", victim.http_port, ssl=tls)
        try:
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
        finally:
            writer.transport.abort()

    async with _members(victim) as meet, victim.channel(viewer) as lasting, asyncio.TaskGroup() as tasks:
        uses = [
            tasks.create_task(load.repeat("call", lambda: list_jobs(lasting), 0.1)),
            tasks.create_task(load.repeat("new", on_a_new_channel, 0.25)),
            tasks.create_task(load.repeat("probe", probe, 0.25)),
            tasks.create_task(load.repeat("barrier", meet, 0.2)),
        ]
        yield load
        for use in uses:
            use.cancel()


@asynccontextmanager
async def _members(victim: Victim) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Register two members in a world; yield a function that makes both meet at a barrier once."""
    credentials = {name: victim.who(Role.MEMBER, name) for name in ("w0", "w1")}

    @asynccontextmanager
    async def dial(worker: str, _replica: str) -> AsyncIterator[Link[Down, Up]]:
        async with victim.channel(credentials[worker]) as channel:
            with translated(victim.replica.address):
                call: Any = SessionsStub(channel).Session(metadata=shown(credentials[worker]))
                async with dialled(call, victim.replica.address) as link:
                    yield link

    round_ = 0
    async with asyncio.TaskGroup() as tasks:
        job = f"{JOB}-{time.monotonic_ns()}"
        members = [Member(name, dial, tasks, members=2, limit_s=CALL_S, job=job) for name in credentials]
        for member in members:
            await member.connect("")
        ranks = {member: (await member.world()).place.first_rank for member in members}

        async def meet() -> None:
            nonlocal round_
            round_ += 1
            for member, rank in ranks.items():
                assert not member.over.is_set(), f"a session ended: {member.error}"
                member.arrive([rank], round_)
            for member in ranks:
                assert (await member.outcome(round_)).result == BARRIER_RESULT_RELEASED
                member.received.clear()

        yield meet
        for member in members:
            member.drop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An attack's counts, and the replica's peak memory and peak descriptors during it."""

    printed: Mapping[str, float]
    peak_bytes: int
    peak_descriptors: int

    def __str__(self) -> str:
        return f"{self.peak_bytes >> 20} MiB, {self.peak_descriptors} descriptors; {dict(self.printed)}"


async def attacked(
    victim: Victim, attack: str, *, port: int, connections: int, seconds: float, tls: bool = False
) -> Report:
    """Run the attack of that name to its end and return its report."""
    argv = [sys.executable, "-S", str(ATTACKER), attack, f"--port={port}", f"--connections={connections}"]
    argv += [f"--seconds={seconds}", *(["--tls"] if tls else [])]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    peak_bytes, peak_descriptors = victim.rss_bytes(), victim.descriptors()
    ended = asyncio.create_task(process.communicate())
    try:
        while not ended.done():
            peak_bytes = max(peak_bytes, victim.rss_bytes())
            peak_descriptors = max(peak_descriptors, victim.descriptors())
            await asyncio.wait([ended], timeout=0.25)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    out, _nothing = await ended
    assert process.returncode == 0, f"the attacker of {attack} ended with {process.returncode}: {out!r}"
    return Report(printed=json.loads(out), peak_bytes=peak_bytes, peak_descriptors=peak_descriptors)


def assert_bounded(*reports: Report) -> None:
    """Assert that no attack raised memory above the limit, and the last at most `MORE_BYTES` above the first."""
    summary = "; ".join(map(str, reports))
    assert max(report.peak_bytes for report in reports) <= MOST_BYTES, summary
    assert reports[-1].peak_bytes <= reports[0].peak_bytes + MORE_BYTES, summary

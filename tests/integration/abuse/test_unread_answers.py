"""A viewer or a member that reads none of its answers (FOUND 16) does not affect other clients.

Unread answers have a separate limit, so an attack that reaches the limit within a second is as strong as a long
attack. In a longer attack the replica only closes the connection
(tests/unit/coordinator/calls/test_unread_answers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata import CoordinatorClient, DatasetRegistry
from strata.core.access.authority import Role
from strata.devcluster.etcd_binary import EtcdBinary
from tests.integration.abuse.harness import Report, Victim, assert_bounded, legitimate, victim

pytestmark = [pytest.mark.slow, pytest.mark.alone]

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = "tests.integration.abuse"
JOB = "large"
SECONDS = 4.0


@pytest.fixture(scope="module")
def plain(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A replica whose job `large` has lists of several pages."""
    with victim(tmp_path_factory.mktemp("unread"), etcd_binary, tls=False) as made:
        operator = made.who(Role.OPERATOR, "ann")
        with CoordinatorClient.connect(
            made.replica.address, job=JOB, credentials=made.who(Role.MEMBER, "w")
        ) as mine:
            mine.register(worker_id="w")
        with DatasetRegistry(made.replica.address, job=JOB, credentials=operator) as registry:
            for number in range(20):
                registry.register(f"d{number}", shards=1, uri="/" + "u" * 60_000)
        yield made


async def unread(victim: Victim, method: str, *, connections: int) -> Report:
    """Run an attack by unary calls or watches to its end and return its report."""
    what = [f"--method={method}", f"--job={JOB}", f"--connections={connections}"]
    return await attacked(victim, "unread_attacker", Role.VIEWER, "unread", *what)


async def attacked(victim: Victim, program: str, role: Role, id: str, *what: str) -> Report:  # noqa: A002
    """Run the attacking program with its own token to its end and return its report."""
    token = victim.who(role, id).token_file
    argv = [
        sys.executable,
        "-m",
        f"{PROGRAMS}.{program}",
        f"--port={victim.grpc_port}",
        f"--token-file={token}",
    ]
    argv += [f"--seconds={SECONDS}", *what]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    ended = asyncio.create_task(process.communicate())
    bytes_, descriptors = [victim.rss_bytes()], [victim.descriptors()]
    try:
        while not ended.done():
            bytes_.append(victim.rss_bytes())
            descriptors.append(victim.descriptors())
            await asyncio.wait([ended], timeout=0.25)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    out, _nothing = await ended
    return Report(printed=json.loads(out), peak_bytes=max(bytes_), peak_descriptors=max(descriptors))


@pytest.mark.parametrize(
    ("method", "connections"),
    [("Datasets/ListDatasets", 1), ("Datasets/ListDatasets", 12), ("Watch/Watch", 4)],
)
async def test_unread_answers_do_not_affect_other_clients(
    plain: Victim, method: str, connections: int, record_property: Callable[[str, object], None]
) -> None:
    async with legitimate(plain) as load:
        reports = [await unread(plain, method, connections=connections) for _ in range(3)]
    record_property("shown", f"{method} x {connections}: {load}; {'; '.join(map(str, reports))}")
    load.assert_served()
    assert_bounded(*reports)
    assert all(report.printed["calls"] > 0.8 * 500 * SECONDS for report in reports), reports


async def test_unread_session_replies_do_not_affect_other_clients(
    plain: Victim, record_property: Callable[[str, object], None]
) -> None:
    """The previous release used 1,042 MiB for 16 such sessions, as long as the member stayed."""
    async with legitimate(plain) as load:
        reports = [
            await attacked(
                plain, "session_attacker", Role.MEMBER, "hoarder", "--worker=hoarder", "--sessions=16"
            )
            for _ in range(3)
        ]
    record_property("shown", f"sessions: {load}; {'; '.join(map(str, reports))}")
    load.assert_served()
    assert_bounded(*reports)
    assert all(report.printed["calls"] > 1000 * SECONDS for report in reports), reports

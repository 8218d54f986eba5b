"""A viewer that reads none of its answers, at the rate that it may call at: FOUND 16. The others do not notice.

What is owed has a bound of its own, so a rate that fills it in a second is as strong as one that lasts; longer attacks
would only have their connection closed (tests/unit/coordinator/test_unread_answers.py).
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
from strata.core.authority import Role
from strata.launch.etcd_binary import EtcdBinary
from tests.integration.abuse.harness import Report, Victim, assert_bounded, legitimate, victim

pytestmark = [pytest.mark.slow, pytest.mark.abuse]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.integration.abuse.unread_attacker"
JOB = "large"
SECONDS = 4.0


@pytest.fixture(scope="module")
def plain(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Have a replica whose job `large` has lists of several pages."""
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
    """Return once the attack is over."""
    viewer = victim.who(Role.VIEWER, "unread")
    argv = [sys.executable, "-m", PROGRAM, f"--port={victim.grpc_port}", f"--token-file={viewer.token_file}"]
    argv += [f"--method={method}", f"--job={JOB}", f"--connections={connections}", f"--seconds={SECONDS}"]
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
    return Report(said=json.loads(out), peak_bytes=max(bytes_), peak_descriptors=max(descriptors))


@pytest.mark.parametrize(
    ("method", "connections"),
    [("Datasets/ListDatasets", 1), ("Datasets/ListDatasets", 12), ("Watch/Watch", 4)],
)
async def test_answers_that_nobody_reads_take_nothing_from_others(
    plain: Victim, method: str, connections: int, record_property: Callable[[str, object], None]
) -> None:
    async with legitimate(plain) as load:
        reports = [await unread(plain, method, connections=connections) for _ in range(3)]
    record_property("shown", f"{method} x {connections}: {load}; {'; '.join(map(str, reports))}")
    load.assert_served()
    assert_bounded(*reports)
    assert all(report.said["calls"] > 0.8 * 500 * SECONDS for report in reports), reports

"""Checks of the coordinators for `strata doctor`: readiness, leader, versions, unreachable replicas, clock offsets."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from strata.cli.checks.etcd import RESTORE_AGAIN, etcd_version
from strata.cli.checks.finding import Finding, fail, ok, warn
from strata.cli.checks.machine import NTP
from strata.cli.etcd.remedies import UNKNOWN, Connection, restore_commands
from strata.cli.status import readiness
from strata.client import CoordinatorClient, parse_endpoints
from strata.config import Credentials
from strata.core.members.registration import DEFAULT_JOB
from strata.core.restore.lineage import RESTORING, THE_WAY_BACK, WENT_BACK
from strata.errors import StrataError, Unavailable

if TYPE_CHECKING:
    from strata.v1.admin_pb2 import ReplicaStatus

OFFSET_S: Final = 1.0
"""The greatest accepted offset between two clocks."""
PROBES: Final = 3
"""How often to read a clock; the answer with the shortest round trip counts."""
GO_BACK: Final = (
    "on a host that reaches etcd, the first command that applies: docs/operate/README.md says which"
)
FORGET: Final = "start it again, see docs/operate/lost-coordinator.md; or, if it will not come back:"
UNKNOWN_ENDPOINT: Final = (
    "correct --endpoints (strata status shows the addresses), or start a coordinator there"
)
LEFT_OUT: Final = "add their addresses: a client with one endpoint finds no coordinator when that one is down"
LOST: Final = (
    "on its host: systemctl restart strata-coordinator@NAME, see docs/operate/lost-coordinator.md;"
    " or take it out of --endpoints"
)


def cluster(
    endpoints: str,
    own: Credentials,
    *,
    timeout_s: float,
    alone: bool,
    connection: Connection = UNKNOWN,
    roots: Sequence[str] = (),
) -> Iterator[Finding]:
    """Check the cluster through one coordinator, and the clock of each of `endpoints`.

    `alone`: no other check reads etcd's state. `connection` and `roots` are options of the printed restore commands.
    """
    try:
        with CoordinatorClient.connect(endpoints, timeout_s=timeout_s, credentials=own) as client:
            status = client.status()
    except StrataError as error:
        if is_suspended(error.message):
            yield suspended("coordinators", error.message, connection, roots)
            return
        hint = error.hint or "start coordinators (strata dev, strata coordinator), or set --endpoints"
        if alone or not isinstance(error, Unavailable):
            yield fail("coordinators", error.message, hint)
        else:
            yield warn("coordinators", error.message, hint)
        return
    if status.outage:
        yield fail("writes", status.outage, "")
    yield judged_readiness(status.replicas)
    if status.leader:
        yield ok("leader", f"{status.leader}, epoch {status.leader_epoch}")
    else:
        yield fail("leader", "no leader", "do the coordinators reach a majority of etcd?")
    versions = {r.version for r in status.replicas if not r.unreachable} | {
        metadata.version("strata-control")
    }
    if len(versions) > 1:
        yield warn("versions", ", ".join(sorted(versions)), "update the older ones")
    if alone:
        for member in status.etcd:
            yield etcd_version(member.endpoint, member.version, member.error)
    yield from _each(endpoints, own, timeout_s, connection, roots, status.replicas)


def judged_readiness(replicas: Sequence[ReplicaStatus]) -> Finding:
    """Judge whether all coordinators are ready, unreachable ones included."""
    says, lost = readiness(replicas), [each.replica for each in replicas if each.unreachable]
    if lost:
        return warn("coordinators", says, FORGET, *(f"strata coordinators forget {name}" for name in lost))
    if all(each.ready for each in replicas):
        return ok("coordinators", says)
    return warn("coordinators", says, "see their logs")


# -- a cluster whose etcd was reset to an older state


def is_suspended(message: str) -> bool:
    """Return whether a coordinator refuses all calls because etcd went back or is being restored."""
    return any(words in message for words in (WENT_BACK, RESTORING, THE_WAY_BACK))


def suspended(what: str, message: str, connection: Connection, roots: Sequence[str]) -> Finding:
    """Return the finding for suspended coordinators, with the commands that restore the control plane."""
    # several replicas may give a reason: use the first
    reason = message[max(0, message.find(WENT_BACK)) :].partition("; ")[0]
    hint = RESTORE_AGAIN if RESTORING in reason else GO_BACK
    commands = restore_commands(reason, connection, roots=roots)
    return fail(what, reason, hint, *commands)


# -- each endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """A replica's clock minus this host's clock, and the greatest error of this difference: half of the round trip."""

    replica: str
    offset_s: float
    error_s: float

    @property
    def is_off(self) -> bool:
        """Whether the clocks differ by more than `OFFSET_S` plus the error of the reading."""
        return abs(self.offset_s) - self.error_s > OFFSET_S

    def __str__(self) -> str:
        return f"{self.offset_s:+.3f} s ± {self.error_s:.3f} s ({self.replica})"


def read_clock(
    ask: Callable[[], dict[str, Any]], now: Callable[[], float] = time.time, *, probes: int = PROBES
) -> ClockReading:
    """Return the clock reading of the replica that `ask` calls, from the answer with the shortest round trip."""
    readings = []
    for _ in range(probes):
        sent = now()
        answer = ask()
        received = now()
        offset_s = answer["unix_ms"] / 1000 - (sent + received) / 2
        error_s = (received - sent) / 2 + 0.001  # the answer is rounded to milliseconds
        readings.append(ClockReading(replica=str(answer["answered_by"]), offset_s=offset_s, error_s=error_s))
    return min(readings, key=lambda reading: reading.error_s)


def clock_findings(readings: Sequence[ClockReading]) -> Iterator[Finding]:
    """Judge the replicas' clocks. If most replicas' clocks are off in the same direction, this host's clock is
    wrong.
    """
    if not readings:
        return
    off = [reading for reading in readings if reading.is_off]
    offsets = ", ".join(str(reading) for reading in off or readings)
    if not off:
        widest = max(readings, key=lambda reading: abs(reading.offset_s))
        yield ok(
            "clocks", f"at most {abs(widest.offset_s) + widest.error_s:.3f} s from this host's: {offsets}"
        )
        return
    median_s = statistics.median(reading.offset_s for reading in readings)
    if len(readings) > 2 and abs(median_s) > OFFSET_S:
        who = "this host's clock is off"
    elif len(readings) > 2:
        who = f"{len(off)} of {len(readings)} replicas' clocks are off"
    else:
        who = "a replica's clock or this host's is off"
    yield warn(
        "clocks",
        f"{who}, by replica minus this host: {offsets}",
        "certificates, tokens and ages of backups go by them; on the host that is wrong:",
        *NTP,
    )


def _each(
    endpoints: str,
    own: Credentials,
    timeout_s: float,
    connection: Connection,
    roots: Sequence[str],
    replicas: Sequence[ReplicaStatus],
) -> Iterator[Finding]:
    """Check each endpoint separately: which coordinator answers, and its clock."""
    readings: list[ClockReading] = []
    answered: set[str] = set()
    known = {each.address for each in replicas}
    for endpoint in parse_endpoints(endpoints, own):
        try:
            with CoordinatorClient(
                (endpoint,), job=DEFAULT_JOB, timeout_s=timeout_s, credentials=own
            ) as client:
                answered.add(client.status().answered_by)
                with contextlib.suppress(
                    StrataError
                ):  # the replica answers, but a replica without an HTTP API returns no time
                    readings.append(read_clock(lambda: client.resource("/cluster")))
        except Unavailable as error:
            if is_suspended(error.message):
                yield suspended(f"coordinator {endpoint}", error.message, connection, roots)
            else:
                why = error.message.partition(f"{endpoint}: ")[2] or error.message
                stranger = "" if str(endpoint) in known else ", and no coordinator is known at this address"
                hint = UNKNOWN_ENDPOINT if stranger else LOST
                yield warn(f"coordinator {endpoint}", f"{endpoint} does not answer{stranger}: {why}", hint)
        except StrataError as error:
            yield warn(f"coordinator {endpoint}", error.message, error.hint or "")
    yield from left_out(replicas, answered, {str(each) for each in parse_endpoints(endpoints, own)})
    yield from clock_findings(readings)


def left_out(
    replicas: Sequence[ReplicaStatus], answered: Collection[str], endpoints: Collection[str]
) -> Iterator[Finding]:
    """Report the running coordinators that no endpoint leads to."""
    left = [
        f"{each.replica} ({each.address})"
        for each in replicas
        if not each.unreachable and each.replica not in answered and each.address not in endpoints
    ]
    if left:
        yield warn("endpoints", f"{', '.join(left)}: not among --endpoints", LEFT_OUT)

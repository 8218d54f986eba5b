"""The interface between a session and its owner: dialling, observer, the session's times, final errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from strata import errors
from strata.core.restore.lineage import is_restored, lineage
from strata.errors import StrataError, Unavailable
from strata.session.endpoints import Endpoint
from strata.session.link import Link
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.common_pb2 import Token
from strata.v1.members_pb2 import RankProgress, Registration
from strata.v1.session_pb2 import Down, Hello, Up, Welcome, WorldUpdate


def aged(report: RankProgress, age_s: float) -> RankProgress:
    """Return the report with its age set to `age_s`, in seconds."""
    copy = RankProgress()
    copy.CopyFrom(report)
    copy.age_ms = max(0, round(1000 * age_s))
    return copy


EXIT_REPORT_S: Final = 60.0
"""For how many seconds a process that ends normally tries to report its end to a coordinator. Without the report
the process counts as dead, and a finished training looks like a training that lost its members.
"""

Dial = Callable[[Endpoint], AbstractAsyncContextManager[Link[Down, Up]]]
"""Opens a stream to an endpoint; raises `Unavailable` if the connection cannot be made."""


def member_hello(registration: Registration) -> Callable[[Token, int], Hello]:
    """Return the function that makes a member's Hello: the registration, with the incarnation that the member was
    assigned.
    """

    def introduce(token: Token, incarnation: int) -> Hello:
        member = Registration()
        member.CopyFrom(registration)
        member.incarnation = incarnation
        return Hello(token=token, member=member)

    return introduce


class SessionObserver(Protocol):
    """Callbacks of a session. Called in the session's event loop; must neither block nor raise."""

    def on_connected(self, welcome: Welcome) -> None:
        """A replica serves the session; open requests are being sent again."""

    def on_disconnected(self, reason: StrataError) -> None:
        """No replica serves the session at the moment, or a try to reach one failed."""

    def on_world(self, update: WorldUpdate) -> None:
        """Take the newest world, place in it and job phase; the update may repeat known facts."""

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        """A round ended, awaited here or not. Called before the futures that await the round are set."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """An open checkpoint of this generation changed or ended; the message may repeat known facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The session's times. `coalesce_s` is how long an arrival waits for further arrivals, to be sent together with
    them.

    `unready_s` counts from the first tick that reports the replica unready; at that moment it may have been
    unready for up to one tick already.
    """

    tick_s: float = 1.0
    silent_s: float = 3.0
    unready_s: float = 2.0
    handshake_s: float = 15.0
    coalesce_s: float = 0.0
    progress_s: float = 0.1
    retry_s: float = 0.2


def another_cluster(known: str, served: str, endpoint: str) -> StrataError:
    """Return the error for an endpoint that serves another cluster than the one the caller knows.

    `ClusterRestored` if that cluster was restored from the known one. `Unavailable` if the endpoint serves the
    known cluster as it was before its restore: that replica does not know of the restore yet. Otherwise
    `ClusterReplaced`.
    """
    message = f"this client began with cluster {known}; {endpoint} serves {served}"
    if is_restored(known, served):
        return errors.ClusterRestored(message)
    if lineage(known) == lineage(served):
        return Unavailable(message, hint="that is the cluster before it was restored: try another replica")
    return errors.ClusterReplaced(message)


def is_final(error: StrataError, *, welcomed: bool) -> bool:
    """Return whether a stream that ended with `error` ends the session: every replica would refuse it.

    The loss of a coordinator ends no session. So if etcd is full or one replica has a bug, the session tries
    the other replicas. Once a coordinator has welcomed the session, the session also tries the others in three
    more cases: another program answers on one of the ports, a replica has an older list of tokens, or a
    replica's etcd holds another cluster. A restored control plane always ends the session.
    """
    if error.retryable or type(error) is StrataError:
        return False
    if isinstance(error, errors.QuotaExceeded | errors.OutcomeUnknown):
        return False
    if isinstance(error, errors.ClusterReplaced):
        return isinstance(error, errors.ClusterRestored) or not welcomed
    return not (welcomed and isinstance(error, errors.ConfigError | errors.NotFound | errors.Unauthenticated))

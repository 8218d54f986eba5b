"""What a session and its owner agree on: how to connect, whom to tell, how fast, when it is over."""

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


def aged(said: RankProgress, age_s: float) -> RankProgress:
    """Return a report as it is sent `age_s` after it was made."""
    told = RankProgress()
    told.CopyFrom(said)
    told.age_ms = max(0, round(1000 * age_s))
    return told


UNTOLD_S: Final = 60.0
"""How long a process that has ended in order waits for a coordinator that hears of it: or it is taken for
dead, and a training that is done for one that has lost its members."""

Dial = Callable[[Endpoint], AbstractAsyncContextManager[Link[Down, Up]]]
"""Opens a stream to an endpoint; a connection that cannot be made is `Unavailable`."""


def member_hello(registration: Registration) -> Callable[[Token, int], Hello]:
    """Return how a member introduces itself: with its registration, and the incarnation that it was given."""

    def introduce(token: Token, incarnation: int) -> Hello:
        member = Registration()
        member.CopyFrom(registration)
        member.incarnation = incarnation
        return Hello(token=token, member=member)

    return introduce


class SessionObserver(Protocol):
    """Who is told what happens. Called in the session's event loop; must not block nor raise."""

    def on_connected(self, welcome: Welcome) -> None:
        """A replica serves the session; what is open is being sent again."""

    def on_disconnected(self, reason: StrataError) -> None:
        """No replica serves it at the moment, or a try to reach one failed."""

    def on_world(self, update: WorldUpdate) -> None:
        """The world, the place in it, or the job's phase is this now; may repeat what is known."""

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        """A round ended, awaited here or not; called before the awaiting futures go on."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """An open checkpoint of this generation changed or ended; may repeat what is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The session's times. `coalesce_s` is how long an arrival waits for others to go with it.

    `unready_s` counts from the first tick that says so; the replica was unready for up to a tick then.
    """

    tick_s: float = 1.0
    silent_s: float = 3.0
    unready_s: float = 2.0
    handshake_s: float = 15.0
    coalesce_s: float = 0.0
    progress_s: float = 0.1
    retry_s: float = 0.2


def another_cluster(known: str, served: str, endpoint: str) -> StrataError:
    """Return what it means that `endpoint` serves another cluster than the one that the caller knows.

    `ClusterRestored` if it is the same one, restored since; `Unavailable` if it is that one before its restore: a replica that has
    not heard of it; else `ClusterReplaced`.
    """
    said = f"this client began with cluster {known}; {endpoint} serves {served}"
    if is_restored(known, served):
        return errors.ClusterRestored(said)
    if lineage(known) == lineage(served):
        return Unavailable(said, hint="that is the cluster before it was restored: try another replica")
    return errors.ClusterReplaced(said)


def is_final(error: StrataError, *, welcomed: bool) -> bool:
    """Tell whether the end of a stream with `error` ends the session: all replicas would say so.

    A full etcd, a bug in one replica, and, once a coordinator has welcomed us, a stranger on one
    of their ports, a replica with an older list of tokens, or one whose etcd holds another cluster, are met by going on
    elsewhere: losing coordinators ends nobody. A control plane that was restored has no place for this session.
    """
    if error.retryable or type(error) is StrataError:
        return False
    if isinstance(error, errors.QuotaExceeded | errors.OutcomeUnknown):
        return False
    if isinstance(error, errors.ClusterReplaced):
        return isinstance(error, errors.ClusterRestored) or not welcomed
    return not (welcomed and isinstance(error, errors.ConfigError | errors.NotFound | errors.Unauthenticated))

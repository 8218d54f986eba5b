"""Every span of time that the liveness of members, replicas and barriers rests on.

One knob, `detect_s`: a member whose host froze or vanished is declared dead within it. It is
spent in two parts, one after the other:

    | keepalive_time | keepalive_timeout |   reconnect_grace   |
    | until a ping   | until its answer  | a lost stream may   |
    | is sent        | is given up       | come back elsewhere |

The leader's lease does not follow from it: it belongs to the replicas and to etcd.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import ConfigError

ChannelOptions = tuple[tuple[str, int], ...]
"""gRPC channel arguments, by the names that grpc knows them."""

MIN_DETECT_S = 0.5
"""Below it a garbage collection or a busy core is a death."""

MAX_HEARTBEAT_S = 2.0
"""However long `detect_s`: a client whose replica is gone must be heard elsewhere before `orphan_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What follows from `detect_s`, and the constants beside it. Made by `derive`."""

    detect_s: float
    reconnect_grace_s: float
    keepalive_time_s: float
    keepalive_timeout_s: float

    heartbeat_s: float
    """How often a client without a session calls Heartbeat."""

    tick_s: float = 1.0
    """Both ends of a session say this often that their event loops turn."""
    peer_tick_s: float = 0.5
    peer_ready_s: float = 1.0
    """A peer is ready if it said so within this span."""
    orphan_s: float = 5.0
    """A member whose replica is gone is deleted by the leader after this (PROTOCOLS 5.4)."""
    first_reconnect_s: float = 0.1
    max_reconnect_s: float = 2.0
    arrivals_again_s: float = 1.0
    """Replicas forward all open arrivals again this often (PROTOCOLS 6.3)."""
    counter_after_s: float = 0.1
    counter_every_s: float = 0.5
    """An open barrier's visible counter: first written after, then at most every (6.5)."""

    @classmethod
    def derive(cls, detect_s: float = 5.0) -> Timing:
        """Return the spans that keep `detect_s`: of a ping, most is for the answer, which a busy host may be slow to give."""
        if not MIN_DETECT_S <= detect_s <= 3600:
            raise ConfigError(
                f"detect_s = {detect_s:g} is not in {MIN_DETECT_S:g} .. 3600",
                hint="it is the time within which a frozen host is noticed; 5 is the default",
            )
        grace_s = min(1.0, detect_s / 5)
        ping_s = detect_s - grace_s
        return cls(
            detect_s=detect_s,
            reconnect_grace_s=grace_s,
            keepalive_time_s=ping_s * 3 / 8,
            keepalive_timeout_s=ping_s * 5 / 8,
            heartbeat_s=min(detect_s / 5, MAX_HEARTBEAT_S),
        )

    def server_options(self) -> ChannelOptions:
        """Return what a gRPC server must be given so that it notices a frozen client in time.

        All of them are needed: `http2.ping_timeout_ms` alone would otherwise stand at a minute.
        """
        return (
            *self._keepalive_options(),
            ("grpc.http2.min_ping_interval_without_data_ms", self._least_ping_ms),
            ("grpc.http2.max_ping_strikes", 0),
        )

    def client_options(self) -> ChannelOptions:
        """Return what a gRPC channel must be given: the same pings, and quick reconnects."""
        first_ms, max_ms = _ms(self.first_reconnect_s), _ms(self.max_reconnect_s)
        return (
            *self._keepalive_options(),
            ("grpc.initial_reconnect_backoff_ms", first_ms),
            # gRPC's name for the limit of one connection attempt: a busy host must get through
            ("grpc.min_reconnect_backoff_ms", max_ms),
            ("grpc.max_reconnect_backoff_ms", max_ms),
        )

    def _keepalive_options(self) -> ChannelOptions:
        return (
            ("grpc.keepalive_time_ms", _ms(self.keepalive_time_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.http2.min_time_between_pings_ms", self._least_ping_ms),
            ("grpc.http2.max_pings_without_data", 0),
        )

    @property
    def _least_ping_ms(self) -> int:
        """Half a ping's interval: pings of the other side's own timers must not be refused."""
        return max(1, _ms(self.keepalive_time_s / 2))


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))

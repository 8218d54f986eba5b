"""Timing: all time spans behind the liveness of members, replicas and barriers.

All derive from one setting, `detect_s`: within this time a member is declared dead after its host froze or
vanished. The time has three consecutive spans:

    | keepalive_time | keepalive_timeout |   reconnect_grace   |
    | until a ping   | until its answer  | a lost stream may   |
    | is sent        | is given up       | come back elsewhere |

The leader's lease does not derive from `detect_s`: it concerns replicas and etcd.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import ConfigError

ChannelOptions = tuple[tuple[str, int], ...]
"""gRPC channel arguments, by grpc's names."""

MIN_DETECT_S = 0.5
"""With a lower `detect_s`, a garbage collection or a busy core would count as a death."""

MAX_HEARTBEAT_S = 2.0
"""The limit of `heartbeat_s`, whatever `detect_s` is: a client that lost its replica must reach another one before
`orphan_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The spans derived from `detect_s`, and related constants. Built by `derive`."""

    detect_s: float
    reconnect_grace_s: float
    keepalive_time_s: float
    keepalive_timeout_s: float

    heartbeat_s: float
    """The interval at which a client without a session calls Heartbeat."""

    tick_s: float = 1.0
    """The interval at which both ends of a session report that their event loops run."""
    peer_tick_s: float = 0.5
    peer_ready_s: float = 1.0
    """A peer counts as ready if it reported itself ready within this span."""
    orphan_s: float = 5.0
    """The time after which the leader deletes a member that lost its replica (PROTOCOLS 5.4)."""
    first_reconnect_s: float = 0.1
    max_reconnect_s: float = 2.0
    arrivals_again_s: float = 1.0
    """The interval at which replicas forward all open arrivals again (PROTOCOLS 6.3)."""
    counter_after_s: float = 0.1
    counter_every_s: float = 0.5
    """The delay of an open barrier's first visible counter, and the least interval between its later writes (6.5)."""

    @classmethod
    def derive(cls, detect_s: float = 5.0) -> Timing:
        """Return spans whose sum is `detect_s`.

        Most of a ping's span is for the answer, because a busy host may be slow.
        """
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
        """Return the options with which a gRPC server detects a frozen client in time.

        All options are needed: for example, `http2.ping_timeout_ms` would otherwise default to a minute.
        """
        return (
            *self._keepalive_options(),
            ("grpc.http2.min_ping_interval_without_data_ms", self._least_ping_ms),
            ("grpc.http2.max_ping_strikes", 0),
        )

    def client_options(self) -> ChannelOptions:
        """Return the options of a gRPC channel: the same pings, and quick reconnects."""
        first_ms, max_ms = _ms(self.first_reconnect_s), _ms(self.max_reconnect_s)
        return (
            *self._keepalive_options(),
            ("grpc.initial_reconnect_backoff_ms", first_ms),
            # gRPC's name for the time limit of one connection attempt: a busy host must have time to connect
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
        """Half of the keepalive interval, so that pings by the other side's timers are not refused as too frequent."""
        return max(1, _ms(self.keepalive_time_s / 2))


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))

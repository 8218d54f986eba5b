"""Health of a replica: whether it may serve members, and may declare them dead (PROTOCOLS 5.5).

An unhealthy replica must delete no member. Before each act two questions are answered, each time with a new reading
of the clock:

    ready?         etcd answered within 2 s, the view has not been behind those answers for longer than
                   2 s, and the event loop runs within 1 s of its schedule
    may it delete? nothing in the last 5 s suggests that the replica itself makes its members seem lost:
                   a stall, silence of etcd, a late view, many sessions broken together, the loss of all peers;
                   and etcd takes writes, so that a deleted member can register again

After a stall all timers and broken streams are due at the same moment, in no order. So both questions detect the
stall by the clock, even if the loop's own measurement has not run again yet.

Times are seconds of one clock that runs through suspends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

ETCD_SILENT_S = 2.0
BEHIND_S = 2.0
"""If a view is behind etcd's answers for longer than this, its watch is broken, and outcomes come late."""
BETTER_OFF_S = 1.5
"""If a peer's last contact with etcd is newer than this replica's by more than this time, the peer can reach etcd.

If etcd itself fails, all replicas lose contact within about a second of each other, at their next renewals. So in
that case no replica sends its members to another.
"""
LAG_S = 1.0
TURN_S = 0.25
"""The interval at which the event loop's delay is measured."""
RECOVERY_S = 1.0
"""After a stall the loop must run on time for this long before the replica is ready for members again."""
SPARE_S = 5.0
MASS_S = 1.0
MASS_LEAST = 5
MASS_SHARE = 0.2


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """One replica's knowledge of its own health. `turned_s`: when its loop last ran."""

    turned_s: float
    stalled_s: float = float("-inf")
    """When the last stall was detected."""
    spare_until_s: float = float("-inf")
    spare_reason: str = ""
    _losses_s: deque[float] = field(default_factory=deque)

    def turned(self, now_s: float, *, etcd_silence_s: float, behind_s: float = 0.0) -> None:
        """Record a run of the loop's measurement."""
        self._look(now_s, etcd_silence_s, behind_s)
        self.turned_s = now_s

    def lost(self, now_s: float, *, left: int) -> None:
        """Record that a session broke; `left`: how many remain."""
        losses = self._losses_s
        losses.append(now_s)
        while losses[0] <= now_s - MASS_S:
            losses.popleft()
        if len(losses) > max(MASS_LEAST, MASS_SHARE * (left + len(losses))):
            self.spare(now_s, f"{len(losses)} sessions broke within {MASS_S:g} s")

    def spare(self, now_s: float, reason: str) -> None:
        """Delete no member for `SPARE_S`, for this reason."""
        self.spare_until_s = now_s + SPARE_S
        self.spare_reason = reason

    def unready(self, now_s: float, *, etcd_silence_s: float, behind_s: float = 0.0) -> str:
        """Return why members should use another replica; "" if this one is ready."""
        self._look(now_s, etcd_silence_s, behind_s)
        if etcd_silence_s > ETCD_SILENT_S:
            return f"etcd has not answered for {etcd_silence_s:.1f} s"
        if behind_s > BEHIND_S:
            return f"its view is behind etcd for {behind_s:.1f} s"
        if now_s < self.stalled_s + RECOVERY_S:
            return "its event loop stalled"
        return ""

    def better_off(
        self, now_s: float, *, etcd_silence_s: float, peer_silence_s: float, behind_s: float = 0.0
    ) -> bool:
        """Return whether members should move to a ready peer whose last contact with etcd was `peer_silence_s` ago."""
        if not self.unready(now_s, etcd_silence_s=etcd_silence_s, behind_s=behind_s):
            return False
        return etcd_silence_s <= ETCD_SILENT_S or etcd_silence_s - peer_silence_s > BETTER_OFF_S

    def spares_s(self, now_s: float, *, etcd_silence_s: float, behind_s: float = 0.0) -> float:
        """Return for how many seconds no member may be deleted; 0 if deletion is allowed now."""
        self._look(now_s, etcd_silence_s, behind_s)
        return max(0.0, self.spare_until_s - now_s)

    def _look(self, now_s: float, etcd_silence_s: float, behind_s: float) -> None:
        lag_s = now_s - self.turned_s - TURN_S
        if lag_s > LAG_S:
            self.stalled_s = now_s
            self.spare(now_s, f"its event loop stalled for {lag_s:.1f} s")
        if etcd_silence_s > ETCD_SILENT_S:
            self.spare(now_s, "etcd was silent")
        if behind_s > BEHIND_S:
            self.spare(now_s, "its view was late")

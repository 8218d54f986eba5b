"""Whether a replica may be trusted with members (PROTOCOLS 5.5): a sick replica kills nobody.

Two questions, asked at the moment of each act with the clock read anew:

    ready?         etcd answered within 2 s, the view is not behind its answers for longer than
                   that, and the event loop has turned within 1 s of its time
    may it delete? nothing in the last 5 s suggests that what it sees of its members is its own fault:
                   a stall, a silence of etcd, a late view, sessions that broke in a mass, the loss of all peers;
                   and etcd takes writes, so that whoever is deleted can register again

After a stall everything is due at once, timers and broken streams, in no order. So whoever asks
finds the stall by the clock, whether or not the loop's own measurement has run again by then.

Times are seconds of one clock that runs through suspends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

ETCD_SILENT_S = 2.0
BEHIND_S = 2.0
"""A view that is behind what etcd has answered for longer has a broken watch: outcomes come late."""
BETTER_OFF_S = 1.5
"""A peer that heard of etcd so much later than this replica has etcd still. When etcd itself is gone,
its clients heard the last of it within about a second of each other, by their renewals; then nobody
is sent from one of them to the next."""
LAG_S = 1.0
TURN_S = 0.25
"""How often the loop is measured."""
RECOVERY_S = 1.0
"""After a stall the loop must have turned well for so long before members are welcome again."""
SPARE_S = 5.0
MASS_S = 1.0
MASS_LEAST = 5
MASS_SHARE = 0.2


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """What one replica knows of its own health. `turned_s`: when its loop last turned."""

    turned_s: float
    stalled_s: float = float("-inf")
    """When the last stall was noticed."""
    spare_until_s: float = float("-inf")
    spare_reason: str = ""
    _losses_s: deque[float] = field(default_factory=deque)

    def turned(self, now_s: float, *, etcd_silence_s: float, behind_s: float = 0.0) -> None:
        """Take note of a turn of the loop."""
        self._look(now_s, etcd_silence_s, behind_s)
        self.turned_s = now_s

    def lost(self, now_s: float, *, left: int) -> None:
        """Take note that a session broke, and how many are left."""
        losses = self._losses_s
        losses.append(now_s)
        while losses[0] <= now_s - MASS_S:
            losses.popleft()
        if len(losses) > max(MASS_LEAST, MASS_SHARE * (left + len(losses))):
            self.spare(now_s, f"{len(losses)} sessions broke within {MASS_S:g} s")

    def spare(self, now_s: float, reason: str) -> None:
        """Delete nobody for a while, for this reason."""
        self.spare_until_s = now_s + SPARE_S
        self.spare_reason = reason

    def unready(self, now_s: float, *, etcd_silence_s: float, behind_s: float = 0.0) -> str:
        """Return why members are better served elsewhere; an empty string when they are not."""
        self._look(now_s, etcd_silence_s, behind_s)
        if etcd_silence_s > ETCD_SILENT_S:
            return f"etcd has answered nothing for {etcd_silence_s:.1f} s"
        if behind_s > BEHIND_S:
            return f"its view is behind etcd for {behind_s:.1f} s"
        if now_s < self.stalled_s + RECOVERY_S:
            return "its event loop stalled"
        return ""

    def better_off(
        self, now_s: float, *, etcd_silence_s: float, peer_silence_s: float, behind_s: float = 0.0
    ) -> bool:
        """Tell whether members should leave for a peer that is ready and heard of etcd so long ago."""
        if not self.unready(now_s, etcd_silence_s=etcd_silence_s, behind_s=behind_s):
            return False
        return etcd_silence_s <= ETCD_SILENT_S or etcd_silence_s - peer_silence_s > BETTER_OFF_S

    def spares_s(self, now_s: float, *, etcd_silence_s: float, behind_s: float = 0.0) -> float:
        """Return for how long nobody may be deleted; 0 when somebody may be now."""
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

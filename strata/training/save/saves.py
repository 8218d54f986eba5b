"""The coordinated saves of a run: when one is due, how all ranks meet for it, what it cost.

    due → barrier (each brings its pace, rank 0 the account) → all plan the next save → copy → go on

The writing and the commit go on in the background. A rank that holds a save which its storage refuses, or whose
storage is too slow for another one, brings that to the barrier: no rank saves then, and training goes on. Between two saves no coordinator is needed; a
due one waits for them up to `save_wait_s`, and then raises.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

from strata.checkpoint.save.handle import CheckpointInfo
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.barriers.arrivals import payload_limit
from strata.core.health.goodput import GOODPUT_KEY, STEP, Ledger
from strata.core.kv.records import CheckpointType
from strata.errors import BarrierTimeout, CheckpointAborted, Unavailable
from strata.training.loop.clock import Clock
from strata.training.loop.cursors import CURSORS_KEY
from strata.training.loop.ddp_buckets import BUCKETS_KEY
from strata.training.rank_context import RankContext
from strata.training.save.cadence import PRIOR_S, Pace, Plan, Rule, agreed, next_save, pace_of, payload_of
from strata.training.save.state import LOADER_KEY, OWN_KEY, PACE_KEY, Position, saved_position
from strata.training.stop.bounded import within

SAVE_BARRIER: Final = "strata.save"
"""Where the ranks meet before any save: one may close at a step after which another one's save is due."""
SAVE: Final = "save"
"""The phase of a rank that waits for a save."""
TELL_S: Final = 2.0
"""How often a rank that waits for a save says so."""
LOOK_S: Final = 0.25
"""How often it looks whether it is to leave instead."""
UNSAVED: Final = -1
"""What is the saved step of who has saved none."""
HELD_S: Final = 5.0
"""How long a run that fails waits for what is in flight while a rank holds a save."""
HELD: Final = "held"
"""The key of what a rank brings to the barrier while it holds a save: why."""
MUST: Final = "must"
"""The key of what a rank brings that saves whoever holds an earlier save: it is at its end."""
MAX_HELD_CHARS: Final = 120
ROOM_S: Final = 3.0
"""How long a due save waits for those in flight: then training goes on without it."""

log: Final = logging.getLogger("strata.training")


class Saves:
    """Saves of one run, in the trainer's thread."""

    def __init__(
        self,
        context: RankContext,
        checkpoints: CheckpointManager,
        *,
        rule: Rule,
        wait_s: float,
        clock: Clock,
        ledger: Ledger,
        position: Position,
        saved: Mapping[str, Any],
        failure_s: float = PRIOR_S,
        cursors: Callable[[], str] = lambda: "",
        buckets: Callable[[], str] = lambda: "",
    ) -> None:
        """`saved` is what the checkpoint that this generation began from says of its pace.

        `cursors` and `buckets` return what this rank's part is to say of shards, and of DDP's buckets.
        """
        self._cursors = cursors
        self._buckets = buckets
        self._context = context
        self._checkpoints = checkpoints
        self._rule = rule
        self._wait_s = wait_s
        self._clock = clock
        self._ledger = ledger
        self.failure_s = failure_s
        self.out_of_time: Callable[[], bool] = lambda: False
        """Whether this process should have left by now, as it was asked to."""
        self._made = 0
        self._skipped = False
        """Whether the save that was due last was skipped."""
        self._last: tuple[CheckpointInfo, float, list[float]] | None = None
        """The newest save, when its copy began, and when it was committed, once it is."""
        self._save_s = self._copy_s = self._commit_s = 0.0
        """`_save_s` is with the wait for the other ranks, which is no part of the copy."""
        self._since = position.step, self._stepping_s()
        self.saved_step = position.step
        self.plan: Plan = next_save(rule, step=position.step, before=0, pace=pace_of(saved))

    def due(self, step: int) -> bool:
        """Tell whether step `step`, just complete, is to be saved: alike on every rank."""
        self._watch()
        return step >= self.plan.step

    def expected_s(self) -> float:
        """Return how long a save takes until it is committed, as far as one was measured; else 0.

        That is from the moment on in which all ranks are there.
        """
        self._watch()
        return self._copy_s + self._commit_s

    def save(
        self,
        state: MutableMapping[str, Any],
        position: Position,
        facts: Mapping[str, Any],
        *,
        patient: bool,
    ) -> CheckpointInfo:
        """Save together with all ranks; return once the state is copied."""
        self._watch()
        begun_s = self._clock.monotonic_s()
        told = self._meet(self._payload(position.step, **{MUST: True}), patient=patient)
        return self._copy(state, position, facts, told, begun_s=begun_s)

    def save_common(
        self,
        state: MutableMapping[str, Any],
        position: Position,
        facts: Mapping[str, Any],
        *,
        over: Callable[[], bool],
    ) -> CheckpointInfo:
        """Save the step that all ranks stop at; return once the state is copied. `Unavailable` when it is `over` here.

        No rank gives up before all are here, but by its end: the copy may be a collective of all.
        """
        self._watch()
        self._checkpoints.holds.drop()  # the newer state is the one to save while there is time
        within(None, self._checkpoints.settle, what="saves in flight", over=over)
        begun_s, payload = self._clock.monotonic_s(), self._payload(position.step, **{MUST: True})
        told = within(
            None, lambda: self._context.barrier(SAVE_BARRIER, payload), what="meeting for the save", over=over
        )
        return self._copy(state, position, facts, told, begun_s=begun_s)

    def save_unless_held(
        self, state: MutableMapping[str, Any], position: Position, facts: Mapping[str, Any], *, patient: bool
    ) -> CheckpointInfo | None:
        """Do the same, or return None on all ranks alike, because one of them holds an earlier save."""
        self._watch()
        # the ranks whose parts are written cannot know for how long another one's is held: they wait once
        held = self._checkpoints.holds.wait_room(0.0 if self._skipped else ROOM_S)
        also = {HELD: held[:MAX_HELD_CHARS]} if held else {}
        begun_s = self._clock.monotonic_s()
        told = self._meet(self._payload(position.step, **also), patient=patient)
        why = _held(told)
        self._skipped = bool(why)
        if not why:
            return self._copy(state, position, facts, told, begun_s=begun_s)
        self._plan(position, agreed(told))
        log.warning("step %d is not saved, for an earlier one is not yet: %s", position.step, why)
        return None

    def _plan(self, position: Position, pace: Pace) -> None:
        self.plan = next_save(
            self._rule, step=position.step, before=self.plan.interval, pace=pace if pace.step_s else None
        )

    def _copy(
        self,
        state: MutableMapping[str, Any],
        position: Position,
        facts: Mapping[str, Any],
        told: Mapping[int, bytes],
        *,
        begun_s: float,
    ) -> CheckpointInfo:
        """Hand the state over to be saved, now that all ranks do."""
        met_s = self._clock.monotonic_s()
        self._telling(position.step, self._checkpoints.holds.make_room)
        pace = agreed(told)
        account = json.loads(told[0]).get("account", {}) if 0 in told else {}
        self._plan(position, pace)
        own = {
            **saved_position(position),
            LOADER_KEY: dict(facts),
            PACE_KEY: json.loads(payload_of(pace)),
            CURSORS_KEY: self._cursors(),
            BUCKETS_KEY: self._buckets(),
        }
        state[OWN_KEY] = own
        metadata = {GOODPUT_KEY: json.dumps(account)} if account else {}
        info = self._checkpoints.save_state(
            state,
            step=position.step,
            epoch=position.epoch,
            checkpoint_type=(
                CheckpointType.FULL if self._rule.is_whole(self._made) else CheckpointType.INCREMENTAL
            ),
            metadata=metadata,
        )
        self._made += 1
        self.saved_step = position.step
        self._since = position.step, self._stepping_s()
        copied_s = self._clock.monotonic_s()
        self._save_s, self._copy_s = copied_s - begun_s, copied_s - met_s
        committed_s: list[float] = []
        info.on_commit(lambda: committed_s.append(self._clock.monotonic_s()))
        self._last = info, met_s, committed_s
        log.info(
            "saving step %d; the next after step %d: %s", position.step, self.plan.step, self.plan.reason
        )
        return info

    def wait_ended(self, info: CheckpointInfo) -> None:
        """Return once a save is committed, or was dropped; raise what it failed of.

        All ranks wait for it, so all know when it was dropped: its step may be saved again then.
        """
        try:
            self._telling(info.step, info.wait, done=lambda: info.done)
        except CheckpointAborted:
            if not info.dropped:
                raise
            if self.saved_step == info.step:
                self.saved_step = UNSAVED

    def finish(self, step: int) -> None:
        """Return once no save is in flight, whatever became of them."""
        self._telling(step, self._checkpoints.settle)

    def _telling(
        self, step: int, wait: Callable[[float], object], *, done: Callable[[], bool] = lambda: False
    ) -> None:
        """Do `wait`; say every few seconds that this rank does, or it would seem to stand still while one is held.

        It goes on until `done`, and no save is held any longer once this process is `out_of_time`.
        """
        tell = self.teller(step)
        while True:
            try:
                wait(LOOK_S)
            except Unavailable:  # it takes longer, unless that is what it failed of
                if done():
                    wait(0.0)
                    return
            else:
                return
            if self.out_of_time():
                self._checkpoints.holds.drop()
            tell()

    def teller(self, step: int) -> Callable[[], None]:
        """Return what, called often, says every few seconds for how long this rank has waited for a save."""
        begun_s = told_s = self._clock.monotonic_s()

        def tell() -> None:
            nonlocal told_s
            if (now_s := self._clock.monotonic_s()) - told_s >= TELL_S:
                told_s = now_s
                self._context.progress(step, f"{SAVE} {now_s - begun_s:.0f} s")

        return tell

    def give_up_held(self, limit_s: float | None) -> float | None:
        """Drop what is held here, at the end of a run; return how long what is in flight may take, of `limit_s`."""
        self._checkpoints.holds.drop()
        return HELD_S if limit_s is None and self._skipped else limit_s  # another rank may hold its part

    @property
    def lost(self) -> str:
        """Why the newest save was dropped, as where it was held for too long; "" if it was not."""
        info = self._last[0] if self._last is not None else None
        return str(info.error) if info is not None and info.dropped else ""

    def cancel(self) -> None:
        """Give up what is in flight: its generation has ended, so nothing of it is committed any more."""
        self._checkpoints.holds.drop()
        if self._last is not None:
            self._last[0].cancel()

    def _payload(self, step: int, **also: Any) -> bytes:
        before, stepping_s = self._since
        steps = step - before
        pace = Pace(
            step_s=(self._stepping_s() - stepping_s) / steps if steps > 0 else 0.0,
            save_s=self._save_s,
            commit_s=self._commit_s,
            failure_s=self.failure_s,
        )
        if self._context.rank != 0:
            return payload_of(pace, **also)
        account = json.loads(self._ledger.saved(self._clock.monotonic_s(), self._clock.unix_s()))
        whole = payload_of(pace, account=account, **also)
        return whole if len(whole) <= payload_limit(self._context.world_size) else payload_of(pace, **also)

    def _meet(self, payload: bytes, *, patient: bool) -> dict[int, bytes]:
        """Return what each rank brought, once every one is here; those that are late are named."""
        while True:
            try:
                return self._context.barrier(SAVE_BARRIER, payload, timeout_s=self._wait_s)
            except BarrierTimeout as late:
                if not patient:
                    raise
                # the round is over for all alike, so all come again
                log.warning("waiting on for a save: %s", late.message)

    def _watch(self) -> None:
        """Take note of how long the last save took, once it is committed."""
        if self._last is not None and self._last[0].committed:
            info, met_s, (committed_s,) = self._last
            self._commit_s = max(0.0, committed_s - met_s - self._copy_s)
            self._last = None
            log.debug("step %d is committed", info.step)

    def _stepping_s(self) -> float:
        return self._ledger.goodput(self._clock.monotonic_s()).spent_s.get(STEP, 0.0)


def _held(told: Mapping[int, bytes]) -> str:
    """Return why a rank holds a save, as the first that does brought it; "" where none does, or one must save."""
    brought = {rank: json.loads(payload) for rank, payload in sorted(told.items())}
    if any(one.get(MUST) for one in brought.values()):
        return ""
    return next((f"rank {rank}: {one[HELD]}" for rank, one in brought.items() if one.get(HELD)), "")

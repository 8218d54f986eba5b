"""The coordinated saves of a run: when a save is due, how all ranks meet for it, what it cost.

    due → barrier (each rank brings its pace, rank 0 the account) → all plan the next save → copy → train on

Writing and commit continue in the background. A rank whose storage refuses a save *holds* it: the rank keeps the save
and retries. If a rank holds a save, or its storage is too slow for a further save, its barrier payload contains the
reason. Then no rank saves, and training continues. Between two saves no coordinator is needed. A due save waits for
the coordinators up to `save_wait_s`, and then raises.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

from strata.checkpoint.save.handle import CheckpointInfo
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.barriers.arrivals import payload_limit
from strata.core.datasets.cursors import SAMPLES_KEY
from strata.core.health.goodput import GOODPUT_KEY, STEP, Ledger
from strata.core.health.reported import REPORTED_KEY
from strata.core.kv.records import CheckpointType
from strata.core.words import ranks_text
from strata.errors import BarrierTimeout, CheckpointAborted, DatasetMismatch, StrataError, Unavailable
from strata.training.loop.clock import Clock
from strata.training.loop.cursors import CURSORS_KEY
from strata.training.loop.ddp_buckets import BUCKETS_KEY
from strata.training.loop.training_data import DATASET_KEY, DATASETS_KEY, digest_of_entries
from strata.training.rank_context import RankContext
from strata.training.save.cadence import PRIOR_S, Pace, Plan, Rule, agreed, next_save, pace_of, payload_of
from strata.training.save.run_config import CONFIG_KEY
from strata.training.save.state import OWN_KEY, PACE_KEY, Position, saved_position
from strata.training.stop.bounded import within

SAVE_BARRIER: Final = "strata.save"
"""The one barrier before every kind of save: one rank may close at a step at which another rank's save is due."""
SAVE: Final = "save"
"""The phase of a rank that waits for a save."""
REPORT_S: Final = 2.0
"""How often a rank that waits for a save reports the wait."""
POLL_S: Final = 0.25
"""How often a waiting rank checks whether it must leave instead."""
UNSAVED: Final = -1
"""The value of `saved_step` while no step counts as saved."""
HELD_S: Final = 5.0
"""How long a failing run waits for saves in flight while a rank holds a save."""
HELD: Final = "held"
"""The payload key under which a rank reports at the barrier why it holds a save."""
MUST: Final = "must"
"""The payload key of a rank that saves even if some rank holds an earlier save, because its run is ending."""
DATA: Final = "data"
"""The payload key of the digest of the data that this rank trains on, and of its position in them."""
MAX_HELD_CHARS: Final = 120
BUFFER_WAIT_S: Final = 3.0
"""How long a due save waits for saves in flight; after that, training continues without the due save."""

log: Final = logging.getLogger("strata.training")


class Saves:
    """The saves of one run, for the trainer's thread."""

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
        reported: Callable[[], Mapping[str, float]] = dict,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`saved` is the pace stored in the checkpoint that this generation began from.

        `cursors` and `buckets` return the entries of this rank's part for shard cursors and for DDP's buckets, and
        `reported` the numbers that the program reported; rank 0's are saved. `config` is saved beside the position.
        """
        self._reported = reported
        self._config = config
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
        """Whether the grace of the stop request has ended: this process should have left by now."""
        self._made = 0
        self._skipped = False
        """Whether the save that was due last was skipped."""
        self._last: tuple[CheckpointInfo, float, list[float]] | None = None
        """The newest save, the time its copy began, and the time of its commit, once it is committed."""
        self._save_s = self._copy_s = self._commit_s = 0.0
        """`_save_s` includes the wait for the other ranks; `_copy_s` does not."""
        self._since = position.step, self._stepping_s()
        self.saved_step = position.step
        self.plan: Plan = next_save(rule, step=position.step, before=0, pace=pace_of(saved))

    def due(self, step: int) -> bool:
        """Return whether the just completed step `step` must be saved; all ranks return the same."""
        self._watch()
        return step >= self.plan.step

    def expected_s(self) -> float:
        """Return the measured time of a save in seconds, from the arrival of all ranks to the commit; 0 if unknown."""
        self._watch()
        return self._copy_s + self._commit_s

    def save(
        self,
        state: MutableMapping[str, Any],
        position: Position,
        entries: Mapping[str, Any],
        *,
        patient: bool,
    ) -> CheckpointInfo:
        """Save together with all ranks; return once the state is copied.

        `entries` is saved beside the position. `DatasetMismatch` if the ranks train on different data.
        """
        self._watch()
        begun_s = self._clock.monotonic_s()
        payload = self._payload(position.step, entries, **{MUST: True})
        payloads = self._meet(payload, patient=patient)
        return self._copy(state, position, entries, payloads, begun_s=begun_s)

    def save_common(
        self,
        state: MutableMapping[str, Any],
        position: Position,
        entries: Mapping[str, Any],
        *,
        over: Callable[[], bool],
    ) -> CheckpointInfo:
        """Save the step that all ranks stop at; return once the state is copied. `Unavailable` once `over()` is true.

        A rank stops waiting for the others only when its process ends: the copy may be a collective of all ranks.
        """
        self._watch()
        self._checkpoints.holds.drop()  # the remaining time is for the newer state
        within(None, self._checkpoints.settle, what="saves in flight", over=over)
        begun_s = self._clock.monotonic_s()
        payload = self._payload(position.step, entries, **{MUST: True})
        payloads = within(
            None, lambda: self._context.barrier(SAVE_BARRIER, payload), what="meeting for the save", over=over
        )
        return self._copy(state, position, entries, payloads, begun_s=begun_s)

    def save_unless_held(
        self,
        state: MutableMapping[str, Any],
        position: Position,
        entries: Mapping[str, Any],
        *,
        patient: bool,
    ) -> CheckpointInfo | None:
        """Save as `save` does; if a rank holds an earlier save, return None on all ranks instead."""
        self._watch()
        # a rank whose part is written cannot know how long another rank holds its part, so this wait is not repeated
        held = self._checkpoints.holds.wait_for_buffer(0.0 if self._skipped else BUFFER_WAIT_S)
        also = {HELD: held[:MAX_HELD_CHARS]} if held else {}
        begun_s = self._clock.monotonic_s()
        payloads = self._meet(self._payload(position.step, entries, **also), patient=patient)
        why = _held(payloads)
        self._skipped = bool(why)
        if not why:
            return self._copy(state, position, entries, payloads, begun_s=begun_s)
        self._plan(position, agreed(payloads))
        log.warning("step %d is not saved, because an earlier one is not saved yet: %s", position.step, why)
        return None

    def _plan(self, position: Position, pace: Pace) -> None:
        self.plan = next_save(
            self._rule, step=position.step, before=self.plan.interval, pace=pace if pace.step_s else None
        )

    def _copy(
        self,
        state: MutableMapping[str, Any],
        position: Position,
        entries: Mapping[str, Any],
        payloads: Mapping[int, bytes],
        *,
        begun_s: float,
    ) -> CheckpointInfo:
        """Plan the next save and hand the state over to be saved; called once all ranks have arrived."""
        met_s = self._clock.monotonic_s()
        _check_data(payloads, entries)
        self._wait_reporting(position.step, self._checkpoints.holds.free_buffer)
        pace = agreed(payloads)
        of_rank_0 = json.loads(payloads[0]) if 0 in payloads else {}
        self._plan(position, pace)
        own = {
            **saved_position(position),
            **entries,
            PACE_KEY: json.loads(payload_of(pace)),
            CURSORS_KEY: self._cursors(),
            BUCKETS_KEY: self._buckets(),
        }
        if self._config:
            own[CONFIG_KEY] = dict(self._config)
        state[OWN_KEY] = own
        metadata = {
            key: json.dumps(of_rank_0[name])
            for name, key in (("account", GOODPUT_KEY), ("reported", REPORTED_KEY))
            if of_rank_0.get(name)
        }
        if entries.get(DATASETS_KEY):
            metadata[SAMPLES_KEY] = json.dumps(entries[DATASETS_KEY])
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
        """Return once a save is committed or dropped; raise the error of a failed save.

        All ranks wait, so all of them learn of a drop, and the step may then be saved again.
        """
        try:
            self._wait_reporting(info.step, info.wait, done=lambda: info.done)
        except CheckpointAborted:
            if not info.dropped:
                raise
            if self.saved_step == info.step:
                self.saved_step = UNSAVED

    def finish(self, step: int) -> None:
        """Return once no save is in flight, whether the saves succeeded or not."""
        self._wait_reporting(step, self._checkpoints.settle)

    def _wait_reporting(
        self, step: int, wait: Callable[[float], object], *, done: Callable[[], bool] = lambda: False
    ) -> None:
        """Repeat `wait` until it returns; report progress every few seconds, or this rank would count as stalled.

        Once `done` is true, `wait` is called a last time, and its error is raised. Held saves are dropped once this
        process is `out_of_time`.
        """
        report = self.teller(step)
        while True:
            try:
                wait(POLL_S)
            except Unavailable:  # a timeout of this wait, or the error of the save itself
                if done():
                    wait(0.0)
                    return
            else:
                return
            if self.out_of_time():
                self._checkpoints.holds.drop()
            report()

    def teller(self, step: int) -> Callable[[], None]:
        """Return a function that, called often, reports every few seconds how long this rank has waited for a save."""
        begun_s = reported_s = self._clock.monotonic_s()

        def report() -> None:
            nonlocal reported_s
            if (now_s := self._clock.monotonic_s()) - reported_s >= REPORT_S:
                reported_s = now_s
                self._context.progress(step, f"{SAVE} {now_s - begun_s:.0f} s")

        return report

    def end_early(self, limit_s: float | None) -> None:
        """Drop this rank's held saves; saves in flight may finish within `limit_s`. Their errors are only logged."""
        self._checkpoints.holds.drop()
        if limit_s is None and self._skipped:
            limit_s = HELD_S  # another rank may hold its part
        close = self._checkpoints.close
        try:
            close() if limit_s is None else within(limit_s, close, what="saves in flight")
        except StrataError as error:
            log.error("a save was lost as well: %s", error)  # noqa: TRY400  # the training's own error is reported
        except Exception:  # no other error may replace the training's error or its exit code either
            log.exception("a save was lost as well")

    @property
    def lost(self) -> str:
        """Why the newest save was dropped, such as after being held too long; "" if it was not dropped."""
        info = self._last[0] if self._last is not None else None
        return str(info.error) if info is not None and info.dropped else ""

    def cancel(self) -> None:
        """Cancel the saves in flight: their generation has ended, so none of them can be committed."""
        self._checkpoints.holds.drop()
        if self._last is not None:
            self._last[0].cancel()

    def _payload(self, step: int, entries: Mapping[str, Any], **also: Any) -> bytes:
        also[DATA] = digest_of_entries(entries)
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
        reported = {name: value for name, value in self._reported().items() if math.isfinite(value)}
        limit = payload_limit(self._context.world_size)
        for extra in ({"account": account, "reported": reported}, {"account": account}):
            if len(payload := payload_of(pace, **extra, **also)) <= limit:
                return payload
        return payload_of(pace, **also)

    def _meet(self, payload: bytes, *, patient: bool) -> dict[int, bytes]:
        """Return every rank's payload once all have arrived; unless `patient`, raise when ranks are late."""
        while True:
            try:
                return self._context.barrier(SAVE_BARRIER, payload, timeout_s=self._wait_s)
            except BarrierTimeout as late:
                if not patient:
                    raise
                # the round has ended for all ranks, so all of them enter the next one
                log.warning("still waiting for a save: %s", late.message)

    def _watch(self) -> None:
        """Record how long the last save took, once it is committed."""
        if self._last is not None and self._last[0].committed:
            info, met_s, (committed_s,) = self._last
            self._commit_s = max(0.0, committed_s - met_s - self._copy_s)
            self._last = None
            log.debug("step %d is committed", info.step)

    def _stepping_s(self) -> float:
        return self._ledger.goodput(self._clock.monotonic_s()).spent_s.get(STEP, 0.0)


def _held(payloads: Mapping[int, bytes]) -> str:
    """Return why the first rank that holds a save holds it; "" if no rank holds a save, or if a rank must save."""
    contents = {rank: json.loads(payload) for rank, payload in sorted(payloads.items())}
    if any(one.get(MUST) for one in contents.values()):
        return ""
    return next((f"rank {rank}: {one[HELD]}" for rank, one in contents.items() if one.get(HELD)), "")


def _check_data(payloads: Mapping[int, bytes], entries: Mapping[str, Any]) -> None:
    """Raise `DatasetMismatch` on every rank if some rank trains on other samples than rank 0."""
    found = {rank: json.loads(payload).get(DATA, "") for rank, payload in sorted(payloads.items())}
    digests = {rank: digest for rank, digest in found.items() if digest}
    first = next(iter(digests.values()), "")
    others = [rank for rank, digest in digests.items() if digest != first]
    if others:
        name = entries.get(DATASET_KEY, "")
        here = json.dumps(entries[DATASETS_KEY].get(name, "no dataset"))
        raise DatasetMismatch(
            f"dataset {name!r}: ranks {ranks_text(others)} train on other samples than rank {next(iter(digests))}; this rank: {here}."
            " This step is not saved",
            hint="give all ranks the same dataset, seed and settings",
        )

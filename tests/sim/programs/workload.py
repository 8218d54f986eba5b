"""The program of one rank through the shipped client: barriers and saves, round after round."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from strata.client.event_loop import BackgroundLoop
from strata.client.rank.rank_client import RankClient
from strata.client.rank.shared_session import RankObserver, SharedSession
from strata.core.kv.records import StopNotice
from strata.core.stop.last_step import BEGIN_BARRIER, NO_LIMIT, STOP_BARRIER, Agreement, NextStep
from strata.errors import (
    BarrierTimeout,
    CheckpointAborted,
    CheckpointNotFound,
    Conflict,
    Refused,
    StaleGeneration,
    StaleIncarnation,
    StrataError,
    Unavailable,
)
from strata.v1 import checkpoints_pb2 as pb
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.common_pb2 import Author
from strata.wire.worlds import notice_record
from tests.sim.judges.history import History
from tests.sim.judges.samples import RankSamples
from tests.sim.programs.save_holds import hold_at

_T = TypeVar("_T")

SAVE_EVERY = 4
EAGER_EVERY = 8
"""At these steps rank 0 tries to seal the save before the others have acked."""
PAIR_EVERY = 12
"""Each of these steps is saved after the following step, so its commit is not the newest."""
SUBSET_EVERY = 3
SUBSET_TIMEOUT_S = 4.0
HEAR_S = 0.1
"""Interval at which a rank checks for a stop request."""


class InLoop:
    """Stands in for the client's background thread: a "blocking" call returns an awaitable."""

    is_inherited = False

    def call(self, coroutine: Coroutine[Any, Any, _T], _timeout_s: float | None = None) -> _T:
        return cast("_T", coroutine)

    def soon(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def at_stop(self, act: object) -> None:
        """Do nothing: the client is never stopped, because a member ends by being killed or by leaving."""

    def forget_at_stop(self, act: object) -> None:
        """See `at_stop`."""


class Ears(RankObserver):
    """The shipped observer of a rank's session; it also keeps the outcomes in the order of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[tuple[str, int, int], BarrierOutcome] = {}

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        self.outcomes[outcome.name, outcome.generation, outcome.round] = outcome


class Trainer:
    """One rank's program. `run` ends with the error that ends its generation or its session."""

    def __init__(
        self, shared_session: SharedSession, ears: Ears, history: History, rng: random.Random
    ) -> None:
        self.shared_session = shared_session
        self._ears = ears
        self.client = RankClient(shared_session, cast("BackgroundLoop", InLoop()))
        self.steps = 0
        self.bound = False
        """Whether the rank has begun to train in its generation, and so has state that it cannot abandon."""
        self._history = history
        self._rng = rng
        self._saves: dict[tuple[int, str], pb.Checkpoint] = {}
        self._news = asyncio.Event()
        self._agreement = Agreement()
        shared_session.watcher.checkpoint_callbacks.append(self._note_save)

    def _note_save(self, save: pb.Checkpoint) -> None:
        self._saves[save.step, save.attempt] = save
        self._news.set()

    async def run(self) -> None:
        """Train from the restore point until an error ends it."""
        point = self.client.restore_point
        step = point.step if point is not None else 0
        self._samples = RankSamples(
            self._history.samples,
            generation=self.client.generation,
            rank=self.client.rank,
            world_size=self.client.world_size,
            attempt=point.attempt if point is not None else "",
        )
        self.bound = False
        stops = self._history.judge.saves_first
        if stops:
            await self.barrier(BEGIN_BARRIER)
        self.bound = True
        self._agreement = Agreement(start=step, begun=step)
        agreeing = asyncio.create_task(self._agree()) if stops else None
        try:
            await self._begin_step(step)
            while True:
                step += 1
                await asyncio.sleep(self._rng.uniform(0.6, 1.6))
                self._samples.train(step)
                self.client.progress(step, "step")
                self._hold(step)
                await self.barrier("step", f"{self.client.rank}:{step}".encode())
                await self._begin_step(step)
                if step % SUBSET_EVERY == 0:
                    await self._subset()
                if step % PAIR_EVERY == 0 and not stops:
                    await self._save_late(step)
                elif step % SAVE_EVERY == 0:
                    await self._save(step)
                self.steps += 1
        finally:
            if agreeing is not None:
                agreeing.cancel()
                await asyncio.wait((agreeing,))

    def _hold(self, step: int) -> None:
        hold = hold_at(step, self.client.rank, self.client.world_size)
        if hold is not None or self.shared_session.save_hold is not None:
            self.client.hold_saves(hold)

    # -- a planned stop

    def _notice(self) -> StopNotice | None:
        """Return the notice for this generation, or None."""
        update = self.shared_session.session.world
        if update is None or not update.HasField("notice"):
            return None
        mine = update.notice.generation == self.client.generation
        return notice_record(update.notice) if mine else None

    async def _agree(self) -> None:
        """Once the generation has a stop notice, meet the other ranks until a step is agreed."""
        try:
            while (notice := self._notice()) is None:  # noqa: ASYNC110  # a real rank has a callback
                await asyncio.sleep(HEAR_S)
            while self._agreement.decision is None:
                await self._round(notice)
        except StrataError:  # a member or the generation has ended
            self._agreement = self._agreement.released()
        self._news.set()

    async def _round(self, notice: StopNotice) -> None:
        judge, size = self._history.judge, self.client.world_size
        left_ms = self._rng.randrange(notice.grace_ms + 1) if notice.has_deadline else NO_LIMIT
        mine = self._agreement.propose(cost_ms=self._rng.choice((0, 0, 500)), left_ms=left_ms)
        proposals = await self.barrier(STOP_BARRIER, mine)
        self._agreement, mine = self._agreement.answer(proposals, ranks=size)
        answers = await self.barrier(STOP_BARRIER, mine)
        self._agreement = self._agreement.conclude(answers, ranks=size)
        self._news.set()
        if self._agreement.decision is None:
            judge.trace.count("rounds that came too late")
        elif (why := judge.stops.decided(self.client.generation, self._agreement.decision)) is not None:
            judge.wrong(why)

    async def _begin_step(self, completed: int) -> None:
        """Begin the step after `completed` once the agreement allows it, or stop here."""
        stops = self._history.judge.stops
        while True:
            self._agreement, next_step = self._agreement.begin(completed)
            if next_step is NextStep.GO:
                if (why := stops.begins(self.client.generation, completed + 1)) is not None:
                    self._history.judge.wrong(why)
                return
            if next_step is NextStep.STOP:
                await self._stop(completed)
            await self._wait_on()

    async def _stop(self, step: int) -> None:
        """Save the common last step, if the decision includes a save, and stay until the agent ends this rank."""
        judge = self._history.judge
        if self._agreement.decision is not None and self._agreement.decision.save:
            await self._save(step)
        judge.trace.count("ranks that stopped at a common step")
        judge.stops.stopped.add((self.client.generation, self.client.rank))
        while True:
            await self._wait_on()

    async def _wait_on(self) -> None:
        self.client.check()
        self._news.clear()  # news of other saves does not matter here
        await self._wait()

    # -- barriers

    async def barrier(
        self,
        name: str,
        payload: bytes = b"",
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        """Arrive and return the payloads of all; retry after a local `Unavailable`."""
        shared_session, rank = self.shared_session, self.client.rank
        participants = len(ranks) if ranks else self.client.world_size
        key = (name, self.client.generation, 0)
        while True:
            if shared_session.rounds.pending(name) is None:
                update = shared_session.session.world
                if update is not None and update.world.generation == self.client.generation:
                    shared_session.rounds.floors(update.barrier_floors)
                key = (name, self.client.generation, shared_session.rounds.next_round(name))
                self._history.arrive(key, rank, payload, timeout_s)
            try:
                call: Any = self.client.barrier(name, payload, ranks=ranks, timeout_s=timeout_s)
                return await cast("Awaitable[dict[int, bytes]]", call)
            except Unavailable:
                if shared_session.session._ended.is_set():
                    raise
            except StaleGeneration as error:
                self._history.refused(f"barrier {key}", key[1], error)
                raise
            finally:
                outcome = self._ears.outcomes.pop(key, None)
                if outcome is not None:
                    self._history.reported(rank, participants, outcome)

    async def _subset(self) -> None:
        """Meet only the other ranks of the same parity."""
        ranks = range(self.client.rank % 2, self.client.world_size, 2)
        name = f"half-{self.client.rank % 2}"
        with suppress(BarrierTimeout):  # all participants get the timeout; the round is over
            await self.barrier(name, b"", tuple(ranks), SUBSET_TIMEOUT_S)

    # -- saves

    async def _call(self, request: Any) -> Any:
        while True:
            try:
                call: Any = self.client.call(request)
                return await call
            except Unavailable:
                self.client.check()
                if self.shared_session.session._ended.is_set():
                    raise

    def _author(self) -> Author:
        client = self.client
        return Author(
            worker_id=client.worker_id,
            incarnation=client.incarnation,
            generation=client.generation,
            rank=client.rank,
        )

    async def _begin(self, step: int) -> pb.Checkpoint:
        request = pb.BeginCheckpointRequest(
            author=self._author(),
            step=step,
            type=pb.CHECKPOINT_TYPE_FULL,
            root="file:///saves",
            attempt=f"a{self._rng.getrandbits(64):016x}",
        )
        if self._history.judge.kept:
            answer = await self._begin_amid_deletions(request)
        else:
            answer = await self._call(request)
        found = cast("pb.Checkpoint", answer.checkpoint)
        self._history.begin(step, self.client.generation, found.attempt)
        return found

    async def _begin_amid_deletions(self, request: pb.BeginCheckpointRequest) -> Any:
        """Begin an Incremental on the newest commit that this rank knows, or a Full if that commit is being deleted.

        While a rewind of the job is requested, nothing is saved: the world ends soon.
        """
        base = self._base()
        if base is not None and self._rng.random() < 0.6:
            request.type = pb.CHECKPOINT_TYPE_INCREMENTAL
            request.base_step, request.base_attempt = base
        while True:
            try:
                return await self._call(request)
            except (StaleGeneration, StaleIncarnation):
                raise
            except (CheckpointNotFound, Refused):
                request.type = pb.CHECKPOINT_TYPE_FULL
                request.ClearField("base_step")
                request.ClearField("base_attempt")
            await asyncio.sleep(0.3)
            self.client.check()

    def _base(self) -> tuple[int, str] | None:
        done = [s for s in self._saves.values() if s.state == pb.CHECKPOINT_STATE_COMMITTED]
        if done:
            newest = max(done, key=lambda save: (save.generation, save.step))
            return newest.step, newest.attempt
        point = self.client.restore_point
        return (point.step, point.attempt) if point is not None else None

    async def _save(self, step: int) -> None:
        """Save a step with all ranks.

        At every other save only rank 0 begins, and sends the attempt to the other ranks.
        """
        try:
            if step % (2 * SAVE_EVERY):
                attempt = (await self._begin(step)).attempt
                await self.barrier("saving")
            else:
                mine = (await self._begin(step)).attempt if self.client.rank == 0 else ""
                attempt = (await self.barrier("attempt", mine.encode()))[0].decode()
            await self._finish(step, attempt)
        except CheckpointAborted:
            return
        except CheckpointNotFound:
            if not self._history.judge.kept:
                raise
            return  # aborted, and deleted before this rank got the news

    async def _save_late(self, step: int) -> None:
        """Begin a save, complete the next step's save, then finish the first save: `latest` stays at the next step."""
        try:
            late, next_one = [(await self._begin(s)).attempt for s in (step, step + 1)]
            await self.barrier("saving")
            await self._finish(step + 1, next_one)
            await self._finish(step, late)
        except CheckpointAborted:
            return
        except CheckpointNotFound:
            if not self._history.judge.kept:
                raise
            return  # aborted, and deleted before this rank got the news

    async def _finish(self, step: int, attempt: str) -> None:
        """Ack, and wait for the end of the save."""
        self._samples.save(attempt, step)
        await self._ack(step, attempt)
        if self.client.rank == 0 and step % EAGER_EVERY == 0:
            with suppress(Refused):  # while another rank has not acked
                await self._seal(step, attempt)
        save = await self._until(step, attempt)
        if save.state == pb.CHECKPOINT_STATE_COMMITTED:
            self._history.commit(step, self.client.generation, attempt, save.manifest_digest)

    async def _ack(self, step: int, attempt: str) -> None:
        request = pb.AckCheckpointRequest(
            author=self._author(),
            step=step,
            attempt=attempt,
            digest=f"digest-{attempt}-{self.client.rank}",
            size_bytes=1,
        )
        try:
            await self._call(request)
        except StrataError as error:
            if not isinstance(error, Unavailable):
                self._history.ack_refused(step, self.client.generation, attempt, error)
            raise
        self._history.ack(step, self.client.generation, attempt, self.client.rank)

    async def _until(self, step: int, attempt: str) -> pb.Checkpoint:
        """Return the save once it has ended; rank 0 seals the save once all ranks have acked."""
        sealed = False
        while True:
            self.client.check()
            self._news.clear()
            save = self._saves.get((step, attempt))
            if save is not None and save.state != pb.CHECKPOINT_STATE_OPEN:
                return save
            if self.client.rank == 0 and not sealed and save is not None and len(save.acked) == save.ranks:
                sealed = True
                await self._seal(step, attempt)
                continue
            await self._wait()

    async def _seal(self, step: int, attempt: str) -> None:
        request = pb.SealCheckpointRequest(
            author=self._author(),
            step=step,
            attempt=attempt,
            manifest_digest=f"digest-{attempt}",
            size_bytes=1,
        )
        with suppress(Conflict):  # an earlier request sealed the save, and the save is committed by now
            await self._call(request)

    async def _wait(self) -> None:
        """Wait for news of a save or of the world."""
        changed = self.shared_session.watcher.changed
        changed.clear()
        waits = [asyncio.ensure_future(self._news.wait()), asyncio.ensure_future(changed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

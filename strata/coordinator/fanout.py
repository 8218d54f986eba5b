"""Distribution of view changes to the parts of the replica that they concern.

Each batch is sorted by job once. Each part of the replica is called at most once a batch and job, only for the
keys that the part uses. An error that one job's records cause does not affect other jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from strata.coordinator.barriers.rounds import Barriers
from strata.coordinator.context import ReplicaContext
from strata.coordinator.members.failure_detector import FailureDetector
from strata.coordinator.members.sessions import Sessions
from strata.coordinator.peers.links import PeerLinks
from strata.coordinator.reports.progress import ProgressBoard
from strata.coordinator.view.rank_indexes import RankIndexes
from strata.core.barriers.outcomes import BarrierKey
from strata.core.job import JobView
from strata.core.kv.records import Phase, PoisonRecord
from strata.core.kv.txn import WatchBatch
from strata.observe import get_logger

log = get_logger()


@dataclass(slots=True)
class _Changes:
    """The changes of one batch in one job."""

    world: bool = False
    """The head or the phase."""
    notice: bool = False
    """A request that a generation's ranks stop."""
    losses: bool = False
    """A worker key was deleted, or a rank ended: a member may be lost."""
    workers: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    """The workers whose key was deleted."""
    rounds: list[BarrierKey] = field(default_factory=list)
    floors: list[tuple[str, int]] = field(default_factory=list)
    saves: set[tuple[int, int]] = field(default_factory=set)


class Fanout:
    """A subscriber of the mirror."""

    def __init__(
        self,
        context: ReplicaContext,
        *,
        board: ProgressBoard,
        ranks: RankIndexes,
        barriers: Barriers,
        sessions: Sessions,
        failure_detector: FailureDetector,
        links: PeerLinks,
    ) -> None:
        self._keys = context.keys
        self._view = context.mirror.view
        self._board = board
        self._ranks = ranks
        self._barriers = barriers
        self._sessions = sessions
        self._failure_detector = failure_detector
        self._links = links

    def take(self, batch: WatchBatch) -> None:
        """Pass each change of this batch to the parts that it concerns."""
        jobs: dict[str, _Changes] = {}
        replicas = False
        for event in batch.events:
            match self._keys.parts(event.kv.key):
                case ("jobs", job, *rest):
                    changes = jobs.setdefault(job, _Changes())
                    try:
                        _sort(changes, job, rest, deleted=event.deleted)
                    except ValueError:  # a hand-written key, with text in the place of a number
                        log.warning("key_not_understood", key=event.kv.key[:500])
                case ("replicas", _):
                    replicas = True
                case _:
                    pass
        for job, changes in jobs.items():
            self._dispatch(job, changes)
        if replicas:
            _guarded("replicas", self._links.on_replicas)

    def _dispatch(self, job: str, changes: _Changes) -> None:
        if changes.world:
            self._ranks.forget(job)
        if changes.losses:
            _guarded(job, partial(self._ranks.wound, job))
        for worker in changes.workers:
            _guarded(job, partial(self._failure_detector.look, job, worker))
            if worker in changes.removed:
                self._board.forget_member(job, worker)
        for key in changes.rounds:
            _guarded(job, partial(self._barriers.on_round, key))
        for name, generation in changes.floors:
            _guarded(job, partial(self._barriers.on_release, job, name, generation))
        if changes.world or changes.notice:
            _guarded(job, partial(self._sessions.on_world, job))
        if changes.world:
            _guarded(job, partial(self._prune, job))
        if changes.world or changes.losses:
            _guarded(job, partial(self._barriers.on_change, job))
        for step, generation in changes.saves:
            _guarded(job, partial(self._sessions.on_save, job, step, generation))

    def _prune(self, job: str) -> None:
        """Drop an ended job's reports from memory: a cluster lives longer than its jobs."""
        view = JobView(self._view, self._keys.job(job))
        if not view.exists or view.phase() in {Phase.DONE, Phase.FAILED}:
            self._board.forget(job)


def _sort(changes: _Changes, job: str, rest: list[str], *, deleted: bool) -> None:
    match rest:
        case ["world" | "phase"]:
            changes.world = True
        case ["workers", worker]:
            changes.workers.add(worker)
            changes.losses |= deleted
            (changes.removed.add if deleted else changes.removed.discard)(worker)
        case ["worlds", _, "failed" | "done" | "stopped", _]:
            changes.losses |= not deleted
        case ["worlds", _, "notice"]:
            changes.notice |= not deleted
        case ["barriers", name, generation, round_, "outcome"]:
            if not deleted:
                changes.rounds.append(BarrierKey(job, name, int(generation), int(round_)))
        case ["barriers", name, generation, "floor"]:
            changes.floors.append((name, int(generation)))
        case ["checkpoints", step, generation, *_]:
            changes.saves.add((int(step), int(generation)))
        case _:
            pass


def _guarded(what: str, deliver: Callable[[], Any]) -> None:
    """Call `deliver`; only log the error of a hand-written record or a bug, so that other changes are delivered."""
    try:
        deliver()
    except PoisonRecord as error:
        log.warning("change_not_delivered", about=what, error=error.message)
    except Exception:
        # an error in one job must not end the mirror, which feeds all other jobs
        log.exception("change_not_delivered", about=what)

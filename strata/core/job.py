"""The view of one job: typed access to its keys, and the facts that decisions share."""

from __future__ import annotations

from collections.abc import Iterator

from strata.core.checkpoints.references import Rewind, SavesHeld
from strata.core.ids import WorkerId
from strata.core.kv.keys import ClusterKeys, JobKeys
from strata.core.kv.records import (
    Anew,
    CheckpointRecord,
    GenerationRecord,
    JobPhase,
    JobRun,
    JobSpec,
    Latest,
    Member,
    MembersChunk,
    Phase,
    RankDone,
    RankFailed,
    RankStopped,
    Restored,
    StopNotice,
    Worker,
    WorldHead,
)
from strata.core.kv.view import Entry, View


class World:
    """The head of a world with its members, by group rank."""

    __slots__ = ("__weakref__", "_by_worker", "head", "members")

    def __init__(self, head: WorldHead, members: tuple[Member, ...]) -> None:
        self.head = head
        self.members = members
        self._by_worker = {member.worker: member for member in members}

    def member_of(self, rank: int) -> Member:
        """Return the member that runs `rank`; `LookupError` if the world has no such rank."""
        for member in self.members:
            if rank in member.ranks:
                return member
        raise LookupError(f"no rank {rank} in a world of {self.head.size}")

    def find(self, worker: str, incarnation: int) -> Member | None:
        """Return the member for this incarnation of `worker`, or None."""
        member = self.holder(worker)
        return member if member is not None and member.incarnation == incarnation else None

    def holder(self, worker: str) -> Member | None:
        """Return the member of this name, whatever its incarnation, or None."""
        return self._by_worker.get(WorkerId(worker))


class JobView:
    """One job as of one revision. Cheap to create; holds no state of its own."""

    def __init__(self, view: View, keys: JobKeys) -> None:
        self.view = view
        self.keys = keys

    @property
    def exists(self) -> bool:
        """Whether a member has registered for the job. A job that was rebuilt from storage has a world but no spec."""
        return any(self.view.get(key) is not None for key in (self.keys.spec, self.keys.head))

    def spec(self) -> Entry[JobSpec] | None:
        return self.view.entry(self.keys.spec, JobSpec)

    def phase(self) -> Phase:
        """Return the job's phase; RUNNING until another one is written."""
        record = self.view.record(self.keys.phase, JobPhase)
        return record.phase if record is not None else Phase.RUNNING

    def attempt(self) -> int:
        """Return the newest attempt at the job that a member registered for; 0 if attempts are not counted."""
        record = self.view.record(self.keys.phase, JobPhase)
        return record.attempt if record is not None else 0

    def run(self) -> JobRun:
        """Return the job's run and its command, as far as members named them."""
        return self.view.record(self.keys.run, JobRun) or JobRun()

    # -- members and the world

    def workers(self) -> list[Entry[Worker]]:
        return list(self.view.entries(self.keys.workers, Worker))

    def worker(self, worker: str) -> Entry[Worker] | None:
        return self.view.entry(self.keys.worker(worker), Worker)

    def head(self) -> Entry[WorldHead] | None:
        return self.view.entry(self.keys.head, WorldHead)

    def generation(self) -> int:
        """Return the current generation; 0 before the first one."""
        head = self.head()
        return head.record.generation if head is not None else 0

    def world(self) -> World | None:
        """Return the current world, or None before the first one.

        Built once for each head: the chunks of a generation never change while its head stays.
        """
        if self.view.get(self.keys.head) is None:
            return None
        return self.view.derived(self.keys.head, self.world_as_written)

    def world_as_written(self) -> World | None:
        """Return the current world from its present chunks, not from the cache: `core.invariants` must see changes."""
        head = self.head()
        if head is None:
            return None
        chunks = self.view.entries(self.keys.members(head.record.generation, head.record.epoch), MembersChunk)
        return World(head.record, tuple(m for chunk in chunks for m in chunk.record.members))

    def failed(self, generation: int) -> dict[int, RankFailed]:
        """Return the ranks of `generation` that ended early, with the reason."""
        entries = self.view.entries(self.keys.failed(generation), RankFailed)
        return {int(e.name): e.record for e in entries}

    def done(self, generation: int) -> set[int]:
        """Return the ranks of `generation` that finished."""
        return {int(e.name) for e in self.view.entries(self.keys.done(generation), RankDone)}

    def stopped(self, generation: int) -> set[int]:
        """Return the ranks of `generation` that ended because its notice asked them to."""
        return {int(e.name) for e in self.view.entries(self.keys.stopped(generation), RankStopped)}

    def held(self, generation: int) -> SavesHeld | None:
        """Return the record of a rank of `generation` that trained but could not save, or None."""
        return self.view.record(self.keys.held(generation), SavesHeld)

    def notice(self, generation: int) -> Entry[StopNotice] | None:
        """Return the notice that asks the ranks of `generation` to stop, or None."""
        return self.view.entry(self.keys.notice(generation), StopNotice)

    def met(self, barrier: str, generation: int) -> bool:
        """Return whether all ranks of `generation` have met at the barrier named `barrier`."""
        return self.view.get(self.keys.barrier_floor(barrier, generation)) is not None

    def history(self) -> list[Entry[GenerationRecord]]:
        """Return the kept records of the generations so far, in order."""
        return list(self.view.entries(self.keys.history, GenerationRecord))

    def restored(self, generation: int) -> int | None:
        """Return the step that `generation` began from; None if it began from no checkpoint."""
        record = self.view.record(self.keys.restored(generation), Restored)
        return record.step if record is not None else None

    # -- checkpoints

    def anew(self) -> int:
        """Return the newest generation whose checkpoints were given up when the job began anew; -1 if it never did.

        -1 and not 0, because a fork is in generation 0, and a job that never began anew still needs its fork.
        """
        record = self.view.record(self.keys.anew, Anew)
        return record.generation if record is not None else -1

    def latest(self) -> Entry[Latest] | None:
        return self.view.entry(self.keys.latest, Latest)

    def rewind(self) -> Entry[Rewind] | None:
        """Return the request that the next generation begins from a chosen checkpoint, or None."""
        return self.view.entry(self.keys.rewind, Rewind)

    def checkpoint(self, step: int, generation: int) -> Entry[CheckpointRecord] | None:
        return self.view.entry(self.keys.checkpoint(step, generation), CheckpointRecord)

    def checkpoints(self) -> Iterator[Entry[CheckpointRecord]]:
        """Yield every record of the catalog, by step, then by generation."""
        return self.view.entries_below(self.keys.checkpoints, CheckpointRecord)


def job_names(view: View, keys: ClusterKeys) -> list[str]:
    """Return the names of all jobs, in order."""
    return view.names(keys.jobs)

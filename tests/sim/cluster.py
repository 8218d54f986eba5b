"""The cluster of one run (three replicas, ten workers, the store and the links) and its judges."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import BarrierOutcome, Worker
from strata.core.kv.txn import Delete, Txn
from strata.core.kv.view import View
from strata.errors import StrataError
from strata.testing.links import Switchboard
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Call
from strata.testing.replicas import MemoryReplica
from tests.sim.etcd import Line
from tests.sim.judges.history import History
from tests.sim.judges.judge import Death, Judge
from tests.sim.judges.transactions import is_of_the_past
from tests.sim.programs.members import JOB, REPLICAS, Member
from tests.sim.trace import Trace

WORKERS = {f"w{number}": 1 if number < 8 else 2 for number in range(10)}
"""The workers and their slots."""
RESTART_S = 1.0
"""Delay after which a replica or a member that ended by itself is restarted, as systemd would."""
PATROL_S = 0.5
DISTURBED_S = 20.0
"""How long after a fault of a member its removal may be a consequence of the fault: longer than the removal's write
may take to reach etcd."""
GRACE_S = 1.0
"""Time from the break of a member's transport to the earliest moment at which the replica may act on the break."""
ORPHAN_S = 5.0
"""Time within which members of a departed replica must be handed over."""
CLAIM_S = 6.0
"""How long an instance may believe that it leads after its key was removed: the duration of a lease."""


class Cluster:
    """The target of the faults and of the judges."""

    def __init__(self, seed: int, tasks: asyncio.TaskGroup, trace: Trace) -> None:
        self.seed = seed
        self.tasks = tasks
        self.trace = trace
        self.keys = ClusterKeys("default")
        self.store = MemoryStore()
        self.board = Switchboard(delay_s=0.0005, rng=self.rng("board"))
        self.lines: dict[str, Line] = {}
        self.replicas: dict[str, MemoryReplica] = {}
        self.members: dict[str, Member] = {}
        """The newest run of each worker."""
        self.runs: dict[str, Member] = {}
        """Every run of every worker, by its boot."""
        self.ending = False
        self.stopped: set[str] = set()
        """Replicas and workers that a fault keeps down."""
        self.ready_s: dict[str, float] = {}
        """Replica -> time since which it has been ready without interruption."""
        self._flaky_s: dict[str, float] = {}
        """Replica -> time at which the replica's connection to etcd last lost or delayed messages."""
        self._linked: dict[tuple[str, str], tuple[float, float]] = {}
        """(boot, replica) -> when `patrol` first and last saw the present link open at the replica."""
        self._count = 0
        self.judge = Judge(
            keys=self.keys, job=self.keys.job(JOB), trace=trace, mourn=self._mourn, timed_out=self._timed_out
        )
        self.history = History(judge=self.judge, keys=self.keys, now_s=lambda: trace.now_s)
        self.store.subscribe(self.judge.seen)

    def rng(self, name: str) -> random.Random:
        """Return a separate random source, so that draws of one part of the run do not change those of another part."""
        return random.Random(f"{self.seed}/{name}")

    # -- replicas

    def start_replica(self, name: str) -> None:
        """Start a replica, for the first time or again."""
        self._count += 1
        self.stopped.discard(name)
        line = self.lines[name] = Line(
            self.rng(f"line {name} {self._count}"), self.judge.applied, partial(self._sent, name)
        )
        client = self.store.client(f"instance-{name}-{self._count}", network=line)
        replica = MemoryReplica(client, self.board, name=name, run=self._count, new_uid=f"uid-{name}")
        self.replicas[name] = replica
        replica.process.start(self._run_replica(replica), tasks=self.tasks)

    async def _run_replica(self, replica: MemoryReplica) -> None:
        try:
            await replica.replica.run()
        except StrataError as error:
            self.trace.note(replica.name, f"exits: {error!r}")
            self.trace.count(f"replica exits: {type(error).__name__}")
            replica.kill()
        finally:
            if (
                not self.ending
                and self.replicas[replica.name] is replica
                and replica.name not in self.stopped
            ):
                self._later(RESTART_S, lambda: self._restart_replica(replica))

    def _restart_replica(self, replica: MemoryReplica) -> None:
        if self.replicas[replica.name] is replica and replica.name not in self.stopped:
            self.start_replica(replica.name)

    def ready(self, name: str) -> bool:
        """Return whether a replica can in fact serve members."""
        replica = self.replicas[name]
        line = self.lines[name]
        return (
            replica.alive
            and not replica.process.frozen
            and replica.serving is not None
            and not all(self.board.blocks(name, member.host) for member in self.members.values())
            and not line.leaderless
            and replica.replica.is_ready()[0]
        )

    def leader(self) -> MemoryReplica | None:
        """Return a running replica that believes it is the leader, or None."""
        return next((r for r in self.replicas.values() if r.alive and r.leads), None)

    # -- members

    def start_member(self, worker: str) -> Member:
        """Start a worker's next run."""
        self._count += 1
        self.stopped.discard(worker)
        member = Member(
            worker,
            self._count,
            WORKERS[worker],
            self.board,
            self.history,
            str(self.seed),
            self.tasks,
            self._unexpected,
        )
        self.members[worker] = self.runs[member.boot] = member
        member.process.start(self._run_member(member), tasks=self.tasks)
        return member

    async def _run_member(self, member: Member) -> None:
        try:
            await member.run()
        finally:
            if (
                not self.ending
                and self.members[member.worker] is member
                and member.worker not in self.stopped
            ):
                self._later(RESTART_S, lambda: self._restart_member(member))

    def _restart_member(self, member: Member) -> None:
        if self.members[member.worker] is member and member.worker not in self.stopped:
            self.start_member(member.worker)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        async def later() -> None:
            await asyncio.sleep(delay_s)
            if not self.ending:
                act()

        self.tasks.create_task(later())

    def note_disturbed(self, member: Member) -> None:
        """Note that a fault outside the replicas kept a member from reaching them."""
        member.disturbed_s = self.trace.now_s

    # -- judging

    def _unexpected(self, who: str, error: BaseException) -> None:
        lines = [f"{who} met what it should not: {error!r}"]
        if isinstance(error, BaseExceptionGroup):
            lines += [repr(inner) for inner in error.exceptions]
        self.judge.wrong("; ".join(lines))

    def _timed_out(self, outcome: BarrierOutcome, key: str) -> str | None:
        return self.history.timed_out(outcome, key)

    def _mourn(self, death: Death) -> str | None:
        """Return why a member's removal was wrong (the member was alive and could reach a replica), or None."""
        member = self.runs.get(death.record.boot)
        if member is None or not member.process.alive or member.killed:
            self.trace.count("deaths of the dead")
            return None
        if member.leaving:
            self.trace.count("leaves")
            return None
        if not death.fenced and death.writer != death.record.served_by:
            return (
                f"{death.worker}, incarnation {death.incarnation}, was declared dead by {death.writer},"
                f" which neither led nor served it: that was {death.record.served_by}"
            )
        now = self.trace.now_s
        if member.process.frozen or now - member.disturbed_s < DISTURBED_S:
            self.trace.count("deaths of the disturbed")
            return None
        if not any(now - since >= DISTURBED_S for since in self.ready_s.values()):
            self.trace.count("deaths while no replica was ready")
            return None
        if death.fenced and self._waits_for_etcd(member, death):
            self.trace.count("deaths at a door whose writes etcd does not take")
            return None
        return (
            f"{death.worker}, incarnation {death.incarnation}, was declared dead by {death.writer}"
            f"{' under its fence' if death.fenced else ''}: it was alive, and served by {death.record.served_by}"
        )

    def _waits_for_etcd(self, member: Member, death: Death) -> bool:
        """Return whether a member has moved to a replica whose writes, hand-overs too, etcd loses or delays (5.4).

        This replica did not serve the member before and does not lead: a leader spares members that have connected to
        it.
        """
        now, others = self.trace.now_s, (death.record.served_by, death.writer)
        return any(
            now - self._linked.get((member.boot, name), (0.0, 0.0))[1] < 1.5 * PATROL_S
            and now - self._flaky_s.get(name, float("-inf")) < ORPHAN_S
            for name in self.replicas
            if self.ready(name) and not any(other.startswith(f"instance-{name}-") for other in others)
        )

    def _sent(self, replica: str, call: Call) -> None:
        """Judge removals of members when they are sent: a member with a recent link to the replica has its grace."""
        if not isinstance(txn := call.argument, Txn):
            return
        for operation in txn.success:
            match self.keys.parts(operation.key):
                case ("jobs", _, "workers", worker) if isinstance(operation, Delete):
                    self._removing(replica, worker, txn)
                case _:
                    pass

    def _removing(self, replica: str, worker: str, txn: Txn) -> None:
        key = self.judge.job.worker(worker)
        held = self.judge.view.record(key, Worker)
        if is_of_the_past(txn, self.judge.view.get(key)):
            return
        member = self.runs.get(held.boot) if held is not None else None
        if member is None or member.killed or member.leaving or member.process.frozen:
            return
        since_s, last_s = self._linked.get((member.boot, replica), (0.0, 0.0))
        now = self.trace.now_s
        if last_s > since_s and now - last_s < GRACE_S - 0.1:
            self.judge.wrong(
                f"{replica} removes {worker}, whose link to it was up {now - last_s:.3f} s ago: the grace is"
                f" {GRACE_S:g} s"
            )

    def _look_at_links(self, now: float) -> None:
        for member in self.members.values():
            for name in self.replicas:
                key = member.boot, name
                if not any(not link.other.over for link in self.board.links(member.host, name)):
                    continue
                since_s, last_s = self._linked.get(key, (0.0, 0.0))
                without_break = last_s > 0 and now - last_s < 1.5 * PATROL_S
                self._linked[key] = (since_s if without_break else now), now

    async def patrol(self) -> None:
        """Check every half second the states that cause no write."""
        while True:
            await asyncio.sleep(PATROL_S)
            now = self.trace.now_s
            for name in self.replicas:
                if not self.ready(name):
                    self.ready_s.pop(name, None)
                elif name not in self.ready_s:
                    self.ready_s[name] = now
                if self.lines[name].is_flaky:
                    self._flaky_s[name] = now
            for member in self.members.values():
                if member.process.frozen:
                    self.note_disturbed(member)
            self._look_at_links(now)
            self._look_at_claims(now)
            for why in self.judge.ranks.overdue():
                self.judge.wrong(why)

    def _look_at_claims(self, now: float) -> None:
        for replica in self.replicas.values():
            epoch = replica.context.election.epoch
            if epoch is None or not replica.alive or replica.process.frozen:
                continue
            term = self.judge.terms.get(epoch)
            if term is None or (term.ended_s is not None and now - term.ended_s > CLAIM_S):
                self.judge.wrong(f"{replica.name} holds that it leads in epoch {epoch}, which has ended")

    # -- the state that must return once faults have ended

    def whole(self) -> str | None:
        """Return why the cluster is not whole, or None if it is."""
        leaders = [r.name for r in self.replicas.values() if r.alive and r.leads]
        if len(leaders) != 1:
            return f"leaders: {leaders}"
        job = JobView(self.judge.view, self.judge.job)
        world = job.world()
        if world is None or world.head.forming:
            return "there is no world"
        inside = {(m.worker, m.incarnation) for m in world.members}
        alive = {(w.name, w.create_revision) for w in job.workers()}
        # newcomers are standbys while the world has a member that cannot restart (PROTOCOLS 6.1)
        stands_by = inside < alive and any(
            w.record.cannot_restart for w in job.workers() if (w.name, w.create_revision) in inside
        )
        if inside != alive and not stands_by:
            return f"the world has {sorted(inside)}, and {sorted(alive)} are registered"
        if {worker for worker, _ in alive} != set(WORKERS):
            return f"{sorted(worker for worker, _ in alive)} are registered"
        for member in self.members.values():
            if (
                member.worker in {m.worker for m in world.members}
            ) and member.generation != world.head.generation:
                return f"{member.worker} is at generation {member.generation} of {world.head.generation}"
        if stuck := list(self.judge.stuck()):
            return "; ".join(stuck)
        return None

    async def compare_views(self) -> None:
        """Compare every replica's view with the store."""
        for replica in self.replicas.values():
            if not replica.alive:
                self.judge.wrong(f"{replica.name} does not run at the end")
                continue
            mirror = replica.context.mirror
            await mirror.fresh()
            truth, seen = _flat(self.judge.view), _flat(replica.view)
            if replica.view.revision == self.judge.view.revision and truth != seen:
                different = sorted(key for key, _ in truth.items() ^ seen.items())
                self.judge.wrong(f"the view of {replica.name} differs at {different[:5]}")
            if await mirror.audit() or mirror.differences:
                self.judge.wrong(f"an audit of {replica.name} found {mirror.differences} differences")

    def start(self) -> None:
        """Start everything."""
        for name in REPLICAS:
            self.start_replica(name)
        for worker in WORKERS:
            self.start_member(worker)

    def end(self) -> None:
        """Kill everything."""
        self.ending = True
        for member in self.runs.values():
            member.kill()
        for process in self.judge.ranks.processes:
            process.kill()
        for replica in self.replicas.values():
            replica.kill()


def _flat(view: View) -> dict[str, int]:
    return {kv.key: kv.mod_revision for kv in view.walk("")}

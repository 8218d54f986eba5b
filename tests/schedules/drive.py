"""Drives one schedule on a real cluster: starts nodes, does the plan's deeds (faults, requests), reads all output."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from strata.client import CoordinatorClient
from strata.core.exit_codes import PREEMPTED
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import StrataError
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_PAUSED, STOP_ACTION_PREEMPT
from tests.processes import Record, Talker, wait_exit
from tests.schedules.judge import History, Looked, NodeEnd
from tests.schedules.plan import Event, Kind, Plan

ROOT = Path(__file__).resolve().parent.parent.parent
LEFT = frozenset({PREEMPTED, 128 + signal.SIGTERM, -signal.SIGTERM})
"""Exit codes of a node that left by request. SIGTERM's own codes occur if it came before Python ran our handler."""
POLL_S = 0.05
"""Interval at which the driver looks. It acts by the clock, independent of the training, as real faults do."""
CHECK_S = 0.2
ANSWER_S = 3.0
STUCK_S = 120.0
"""The training counts as stuck this long after the last deed and the last step."""
ENDED_S = 60.0
QUIET_S = 15.0


@dataclass(slots=True)
class Node:
    """One member: the newest agent process of its name."""

    name: str
    talker: Talker
    late: bool = False
    back_s: float = 1.0
    """How long after its preemption the node is started again."""
    returning: bool = False


@dataclass(slots=True)
class Deeds:
    """Counts the deeds that took effect, and schedules later actions, most of which undo deeds."""

    done: Counter[str] = field(default_factory=Counter)
    later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.later, (time.monotonic() + seconds, next(self.numbers), act))

    def due(self, *, all_of_them: bool = False) -> None:
        """Run the actions that are due now; an action that they schedule waits for the next call."""
        now, due = time.monotonic(), []
        while self.later and (all_of_them or self.later[0][0] <= now):
            due.append(heapq.heappop(self.later)[2])
        for act in due:
            act()


class Drive:
    """Carries out a plan; `run` returns the history to judge."""

    def __init__(self, plan: Plan, cluster: LocalCluster, folder: Path) -> None:
        self.plan = plan
        self.record = Record()
        self.deeds = Deeds()
        self._cluster = cluster
        self._folder = folder
        self._job = f"schedule-{plan.seed}-{os.getpid()}-{time.monotonic_ns()}"
        self._client = CoordinatorClient.connect(cluster.endpoints, job=self._job, timeout_s=ANSWER_S)
        self._looked: list[Looked] = []
        self._look_at = 0.0
        self._phase = 0
        self._ended: list[NodeEnd] = []
        self._committed: list[tuple[int, int]] = []
        self._began_unix_s: float | None = None
        self._nodes = [Node(name=f"n{i}", talker=self._start(f"n{i}")) for i in range(plan.nodes)]

    def run(self) -> History:
        """Return the history; no process of the training is left running."""
        try:
            self._wait_steps(1)
            for event in self.plan.events:
                self._wait_steps(event.steps)
                self._sleep(event.delay_s)
                if self._over():
                    break
                self._do(event)
            self._finish()
            with contextlib.suppress(StrataError):  # if it fails, the nodes' exit codes suffice
                reported = self._client.generations()
                self._committed = [
                    (g.world.generation, g.committed_step) for g in reported if g.has_committed
                ]
                self._began_unix_s = min((g.began_unix_ms / 1000 for g in reported), default=None)
        finally:
            self.deeds.due(all_of_them=True)
            self._end()
            self._client.close()
        return self.history()

    def history(self) -> History:
        """Return the history up to now."""
        return History(
            events=self.record.events,
            looked=self._looked,
            nodes=self._ended,
            committed=self._committed,
            began_unix_s=self._began_unix_s,
        )

    # -- the clock

    def _tick(self) -> None:
        """Run due actions, look at the job, and sleep briefly."""
        self.deeds.due()
        if time.monotonic() >= self._look_at:
            self._look()
        for node in self._nodes:
            if node.talker.child.poll() in LEFT and not node.returning and not self._done():
                node.returning = node.late = True
                self.deeds.after(node.back_s, partial(self._bring_back, node))
        time.sleep(POLL_S)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if left < POLL_S:
                time.sleep(left)
            else:
                self._tick()

    def _look(self) -> None:
        with contextlib.suppress(
            StrataError
        ):  # no replica answers at this moment, or the job does not exist yet
            job = self._client.job_status()
            self._phase = job.phase
            if job.has_latest:
                self._looked.append(Looked(at=time.monotonic(), step=job.latest_step))
        self._look_at = time.monotonic() + CHECK_S

    def _trained(self) -> int:
        return sum(1 for e in self.record.events if e["event"] == "step" and e["rank"] == 0)

    def _wait_steps(self, count: int) -> None:
        """Return once `count` more steps were trained, in any generation, or the training is over or stuck."""
        wanted = self._trained() + count
        deadline = time.monotonic() + STUCK_S
        while self._trained() < wanted and not self._over() and time.monotonic() < deadline:
            self._tick()

    def _over(self) -> bool:
        return bool(self.record.of("end")) or self._done()

    def _done(self) -> bool:
        return self._phase == JOB_PHASE_DONE

    # -- deeds

    def _do(self, event: Event) -> None:
        node = self._nodes[event.node]
        deeds: dict[Kind, Callable[[], bool]] = {
            Kind.KILL_RANK: lambda: self._signal_rank(node, signal.SIGKILL),
            Kind.FREEZE_RANK: lambda: self._signal_rank(node, signal.SIGSTOP),
            Kind.KILL_NODE: lambda: self._kill_node(node, event.lasting_s),
            Kind.FREEZE_NODE: lambda: self._freeze_node(node, event.lasting_s),
            Kind.KILL_LEADER: lambda: self._harm_leader(event.lasting_s, freeze=False),
            Kind.FREEZE_LEADER: lambda: self._harm_leader(event.lasting_s, freeze=True),
            Kind.SCALE: lambda: self._scale(event.amount),
            Kind.PAUSE: lambda: self._pause(event.lasting_s),
            Kind.PREEMPT: lambda: self._preempt(event.lasting_s),
            Kind.TERM_NODE: lambda: self._term_node(node, event.lasting_s),
            Kind.DRAIN: lambda: self._drain(node, event.lasting_s),
        }
        if deeds[event.kind]():
            self.deeds.done[event.kind] += 1

    def _signal_rank(self, node: Node, number: int) -> bool:
        """Signal the newest running rank of a node; return False if the node has none."""
        ranks = [e["pid"] for e in self.record.of("rank.started") if e["source"] == node.name]
        family = node.talker.family()
        alive = [pid for pid in reversed(ranks) if pid in family]
        if not alive:
            return False
        os.kill(alive[0], number)
        return True

    def _kill_node(self, node: Node, back_s: float) -> bool:
        if node.talker.child.poll() is not None:
            return False
        node.talker.child.resume()
        node.talker.child.kill()
        self._ended.append(self._left(node))
        self.deeds.after(back_s, lambda: self._bring_back(node))
        return True

    def _bring_back(self, node: Node) -> None:
        node.returning = False
        if not self._done():
            self._left(node)
            node.talker = self._start(node.name)
            node.late = True

    def _freeze_node(self, node: Node, lasting_s: float) -> bool:
        if node.talker.child.poll() is not None:
            return False
        talker, family = node.talker, list(node.talker.family())
        for pid in family:
            _signal(pid, signal.SIGSTOP)
        node.late = True

        def wake() -> None:
            for pid in {*family, *talker.family()}:
                _signal(pid, signal.SIGCONT)

        self.deeds.after(lasting_s, wake)
        return True

    def _harm_leader(self, lasting_s: float, *, freeze: bool) -> bool:
        try:
            leader = self._cluster.leader(timeout_s=ANSWER_S)
        except StrataError:
            return False  # there is no leader at this moment
        if freeze:
            leader.child.pause()
            self.deeds.after(lasting_s, leader.child.resume)
        else:
            leader.child.kill()
            self.deeds.after(lasting_s, leader.restart)
        return True

    def _scale(self, most: int) -> bool:
        try:
            self._client.scale(min_workers=min(most, self.plan.min_workers), max_workers=most)
        except StrataError:
            return False  # there was no leader, or the answer is unknown
        return True

    def _pause(self, lasting_s: float) -> bool:
        try:
            self._client.stop("pause", grace_s=10.0)
        except StrataError:
            return False
        self.deeds.after(lasting_s, self._resume)
        return True

    def _preempt(self, back_s: float) -> bool:
        for node in self._nodes:
            node.back_s = back_s
        try:
            notice = self._client.stop("preempt", grace_s=10.0)
        except StrataError:
            return False
        return notice is not None and notice.action == STOP_ACTION_PREEMPT

    def _term_node(self, node: Node, back_s: float) -> bool:
        if node.talker.child.poll() is not None:
            return False
        for each in self._nodes:
            each.back_s = back_s
        node.late = True
        node.talker.signal(signal.SIGTERM)
        return True

    def _drain(self, node: Node, back_s: float) -> bool:
        node.back_s = back_s
        try:
            notice = self._client.stop("drain", worker_ids=(node.name,), grace_s=10.0)
        except StrataError:
            return False
        return notice is not None and node.name in notice.worker_ids

    def _resume(self) -> None:
        """Resume the job; if it has not paused yet, try again a little later."""
        with contextlib.suppress(StrataError):
            if self._client.job_status().phase == JOB_PHASE_PAUSED:
                self._client.resume()
                return
        if not self._over():
            self.deeds.after(0.5, self._resume)

    # -- begin and end

    def _start(self, name: str) -> Talker:
        plan = self.plan
        command = [sys.executable, "-m", "strata", "run", "--endpoints", self._cluster.endpoints]
        command += [
            "--job",
            self._job,
            "--run-id",
            self._job,
            "--worker-id",
            name,
            "--slots",
            str(plan.slots),
        ]
        command += ["--min-workers", str(plan.min_workers), "--max-workers", str(plan.nodes)]
        command += ["--settle-s", "0.5", "--max-no-progress-generations", "1000", "--log-format", "json"]
        command += ["--", sys.executable, str(ROOT / "tests" / "ranks" / "learning.py")]
        command += ["--epochs", str(plan.epochs)]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "STRATA_TRAIN_STORAGE": str(self._folder / self._job),
            "STRATA_TRAIN_SAVE_EVERY_STEPS": str(plan.save_every),
        }
        return Talker(command, name=name, record=self.record, env=env)

    def _finish(self) -> None:
        """Return once every node has ended, or the training is stuck."""
        trained, moved = self._trained(), time.monotonic()
        ended_at = 0.0
        while self._alive():
            self._tick()
            if self._trained() > trained:
                trained, moved = self._trained(), time.monotonic()
            if self._over():
                self.deeds.due(all_of_them=True)
                ended_at = ended_at or time.monotonic()
            limit = ended_at + ENDED_S if ended_at else moved + STUCK_S
            if time.monotonic() > limit:
                return

    def _alive(self) -> bool:
        """Return True if any node runs or is about to be started again."""
        codes = [node.talker.child.poll() for node in self._nodes]
        back = not self._done() and (bool(self.deeds.later) or bool(LEFT & set(codes)))
        return None in codes or back

    def _end(self) -> None:
        """Record how each node ended, and end the nodes that still run."""
        for node in self._nodes:
            code = node.talker.child.poll()
            if code is None:
                self._say_where(node)
                node.talker.child.resume()
                node.talker.child.kill()
                self._left(node)
                self._ended.append(NodeEnd(name=node.name, code=None, late=node.late))
            elif code != -signal.SIGKILL:  # killed nodes are recorded already
                left = self._left(node)
                self._ended.append(NodeEnd(name=node.name, code=code, late=node.late, left=left.left))

    def _say_where(self, node: Node) -> None:
        """Record which processes remain of a node that does not end."""
        self.record.add({"event": "stuck", "source": node.name, "family": node.talker.family()})

    def _left(self, node: Node) -> NodeEnd:
        """Kill the processes that an ended agent left; return an end that lists them and counts as intended."""
        deadline = time.monotonic() + QUIET_S
        while left := node.talker.family():
            if not all(wait_exit(pid, deadline - time.monotonic()) for pid in left):
                break
        for pid in left:
            _signal(pid, signal.SIGKILL)
        return NodeEnd(name=node.name, code=0, late=True, left=left)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

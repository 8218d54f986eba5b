"""Drives a training of two nodes with one rank each, and kills its ranks by plan."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.checkpoints_pb2 import CHECKPOINT_STATE_COMMITTED, CheckpointType
from tests.processes import Record, Talker
from tests.rank_kills import judge
from tests.rank_kills.judge import Event
from tests.rank_kills.plan import RANKS, Kill, Moment

ROOT = Path(__file__).resolve().parent.parent.parent
SAVE_EVERY = 5
FULL_EVERY = 3
KEEP_COUNT = 2
"""Fewer than the saves between two Fulls, so that retention by count alone would delete the base of an Incremental."""
PACE_S = 0.03
AHEAD = 80
"""How many steps ahead the last step is set, once all kills are done: no rank may have passed it yet."""
LIMIT_S = 120.0
"""Limit for a recovery and for any other event that must happen, however busy the machine is."""
ENDS = {Moment.MID_SAVE: ("saving", "committed"), Moment.RESTORING: ("restoring", "begun")}
"""The events with which a moment begins and ends."""
USUAL_S = {Moment.MID_STEP: PACE_S, Moment.MID_SAVE: 0.1, Moment.AFTER_COMMIT: 0.0, Moment.RESTORING: 0.1}
"""How long a moment lasts, until this run has measured it."""

_T = TypeVar("_T")


class Broken(Exception):
    """A condition did not hold; the text names the condition."""


class Training:
    """One training on a cluster: start it, read its output; `end` ends it in every state."""

    def __init__(
        self, cluster: LocalCluster, folder: Path, job: str, *, save_every: int, pace_s: float
    ) -> None:
        self.record = Record()
        self.job = job
        self.until = folder / "until"
        self._folder = folder
        self._storage = folder / "checkpoints"
        self._cluster = cluster
        self._talkers: list[Talker] = []
        folder.mkdir(parents=True)
        for name in ("node-1", "node-2"):
            command = ["run", *self._where(), "--worker-id", name, "--log-format", "json"]
            command += ["--min-workers", "2", "--max-workers", "2", "--settle-s", "0.5"]
            command += ["--max-no-progress-generations", "1000"]
            command += ["--", sys.executable, str(ROOT / "tests" / "ranks" / "fine_tuning.py")]
            command += ["--storage", str(self._storage), "--until", str(self.until)]
            command += ["--save-every", str(save_every), "--full-every", str(FULL_EVERY)]
            command += ["--keep-count", str(KEEP_COUNT), "--pace-s", str(pace_s)]
            self._talkers.append(_strata(command, name, self.record))

    def wait(self, what: str, found: Callable[[list[Event]], _T]) -> _T:
        """Return the first true answer of `found` over all events; fail after LIMIT_S."""
        deadline = time.monotonic() + LIMIT_S

        def looked(events: list[Event]) -> _T:
            if not (answer := found(events)) and time.monotonic() > deadline:
                raise Broken(f"{what}: not within {LIMIT_S:g} s")
            return answer

        try:
            return self.record.until(what, looked, limit_s=LIMIT_S)
        except AssertionError as error:
            raise Broken(str(error)) from None

    def strata_checkpoints(self, *words: str) -> str:
        """Return the output of a command about this job's checkpoints; the command must exit with 0."""
        record = Record()
        talker = _strata(["checkpoints", *words, *self._where()], "strata", record)
        try:
            code = talker.join(LIMIT_S)
        finally:
            talker.child.kill()
        printed = "\n".join(str(event.get("text", event)) for event in record.events)
        if code != 0:
            raise Broken(f"`strata checkpoints {' '.join(words)}` ended with {code}:\n{printed}")
        return printed

    def join(self) -> None:
        """Return once both nodes have exited with 0 and left no process."""
        for talker in self._talkers:
            try:
                code = talker.join(LIMIT_S)
                talker.wait_quiet()
            except AssertionError as error:
                raise Broken(str(error)) from None
            if code != 0:
                raise Broken(f"{talker.name} ended with {code}")

    def folders(self) -> list[str]:
        """Return the names of the folders in storage: folders of checkpoints and of unfinished attempts."""
        return sorted(path.name for path in self._storage.rglob("step-*"))

    def end(self) -> None:
        """Kill the processes that still run, and write down all events received."""
        for talker in self._talkers:
            talker.child.kill()
        for talker in self._talkers:
            for pid in talker.family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        lines = (json.dumps(event) + "\n" for event in self.record.events)
        (self._folder / "events.jsonl").write_text("".join(lines))

    def _where(self) -> list[str]:
        return ["--endpoints", self._cluster.endpoints, "--job", self.job]


def _strata(words: list[str], name: str, record: Record) -> Talker:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return Talker([sys.executable, "-m", "strata", *words], name=name, record=record, env=env)


class Drive:
    """Carries out a plan on a cluster; `run` raises `Broken` at the first condition that does not hold."""

    def __init__(
        self, plan: list[Kill], cluster: LocalCluster, folder: Path, job: str, say: Callable[[str], None]
    ) -> None:
        self.number = 0
        """The number of the newest kill."""
        self.types: Counter[str] = Counter()
        """Counts the types of the checkpoints seen in the catalog."""
        self.steps = 0
        self._plan = plan
        self._cluster = cluster
        self._folder = folder
        self._say = say
        self._generation = 0
        self._seen: set[str] = set()
        self._victims: list[tuple[int, int]] = []
        """Generation and rank of each killed process."""
        self._client = CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S)
        self.training = Training(cluster, folder / "killed", job, save_every=SAVE_EVERY, pace_s=PACE_S)

    def run(self) -> None:
        """Return once all kills are done and the training has ended with the same bits as an undisturbed one."""
        self._recovered(seen=0)
        for kill, following in zip(self._plan, [*self._plan[1:], None], strict=True):
            self.number = kill.number
            began, seen = time.monotonic(), self._strike(kill)
            if following is not None and following.moment is Moment.RESTORING:
                self._say(
                    f"kill {kill.number}: rank {kill.rank}, aimed at {kill.moment}; the next one follows"
                )
                continue
            step = self._recovered(seen=seen)
            recovered_s = time.monotonic() - began
            self.training.wait(
                "a first commit", _newest
            )  # before the first commit there is no latest checkpoint
            self.training.strata_checkpoints("verify", "latest")
            self._look()
            self._say(
                f"kill {kill.number}: rank {kill.rank}, aimed at {kill.moment}; generation {self._generation}"
                f" goes on from step {step} after {recovered_s:.1f} s; latest verifies"
            )
        self._finish()

    def end(self) -> None:
        """End all processes that were started."""
        self.training.end()
        self._client.close()

    @property
    def met(self) -> dict[str, int]:
        """Counts the moments at which the ranks died in fact."""
        events = self.training.record.events
        return Counter(
            judge.met([e for e in events if (e.get("generation"), e.get("rank")) == victim])
            for victim in self._victims
        )

    # -- one kill

    def _strike(self, kill: Kill) -> int:
        """Kill the rank at its moment; return the newest step known to be committed before the kill."""
        training, moment = self.training, kill.moment
        if moment is Moment.RESTORING:
            after = self._generation
            victim = training.wait("a restore", lambda events: self._restoring(events, kill.rank, after))
            self._generation = victim["generation"]
        else:
            victim = self._restoring(training.record.events, kill.rank, self._generation - 1)
            self._wait_for(
                "saving" if moment is Moment.MID_SAVE else "committed", kill.rank, count=kill.saves
            )
            if moment is Moment.MID_STEP:
                self._wait_for("step", kill.rank, count=1)
        time.sleep(kill.part * self._usual_s(moment))
        seen = _newest(training.record.events)
        os.kill(victim["pid"], signal.SIGKILL)
        self._victims.append((self._generation, kill.rank))
        return seen

    def _restoring(self, events: list[Event], rank: int, after: int) -> Event:
        """Return the rank's newest `restoring` event of a generation after `after`; empty if there is none."""
        mine = [e for e in events if e["event"] == "restoring" and e["rank"] == rank]
        return next((e for e in reversed(mine) if e["generation"] > after), {})

    def _wait_for(self, kind: str, rank: int, *, count: int) -> None:
        """Return once a rank has reported `count` more events of a kind."""
        place = {"rank": rank, "generation": self._generation}
        before = len(self.training.record.of(kind, **place))
        self.training.wait(kind, lambda _: len(self.training.record.of(kind, **place)) >= before + count)

    def _usual_s(self, moment: Moment) -> float:
        """Return the usual length of such a moment in this run.

        Generation 1, which restores nothing, does not count.
        """
        first, last = ENDS.get(moment, ("", ""))
        began: dict[tuple[int, int], float] = {}
        lasted = []
        for event in self.training.record.events:
            if event["event"] == first:
                began[event["rank"], event["generation"]] = event["heard"]
            elif event["event"] == last and (at := began.pop((event["rank"], event["generation"]), None)):
                lasted += [event["heard"] - at] if event["generation"] > 1 else []
        return statistics.median(lasted) if lasted else USUAL_S[moment]

    def _recovered(self, *, seen: int) -> int:
        """Return the step at which the next generation began, once both of its ranks have begun."""
        after = self._generation

        def begun(events: list[Event]) -> list[Event]:
            newest = max((e["generation"] for e in events if e["event"] == "begun"), default=0)
            mine = [e for e in events if e["event"] == "begun" and e["generation"] == newest > after]
            return mine if len(mine) == RANKS else []

        events = self.training.wait("a recovery", begun)
        self._generation = generation = events[0]["generation"]
        older = [g for g in self._client.generations() if g.world.generation < generation]
        committed = max((g.committed_step for g in older if g.has_committed), default=0)
        _hold(judge.resumption([e["step"] for e in events], seen=seen, committed=committed))
        return int(events[0]["step"])

    def _look(self) -> None:
        """Count the checkpoints of the catalog by type."""
        for checkpoint in self._client.checkpoints():
            if checkpoint.state == CHECKPOINT_STATE_COMMITTED and checkpoint.attempt not in self._seen:
                self._seen.add(checkpoint.attempt)
                name = CheckpointType.Name(checkpoint.type).removeprefix("CHECKPOINT_TYPE_")
                self.types[name.lower()] += 1

    # -- the end

    def _finish(self) -> None:
        training = self.training
        trained = training.record.of("step")[-1]["step"]
        self.steps = trained + AHEAD
        _decide(training.until, self.steps)
        training.join()
        self._say(f"the training has ended at step {self.steps}; now the undisturbed one")
        training.strata_checkpoints("verify", "--all")
        _hold(judge.retention(training.folders(), keep_count=KEEP_COUNT, full_every=FULL_EVERY))
        self._look()
        undisturbed = self._undisturbed()
        events = training.record.events
        _hold(judge.order(events))
        _hold(judge.bits(events, undisturbed.record.events))

    def _undisturbed(self) -> Training:
        training = Training(
            self._cluster,
            self._folder / "undisturbed",
            f"{self.training.job}-undisturbed",
            save_every=10 * SAVE_EVERY,
            pace_s=0.0,
        )
        try:
            _decide(training.until, self.steps)
            training.join()
        finally:
            training.end()
        return training


def _newest(events: list[Event]) -> int:
    """Return the newest step that any rank reported as committed."""
    return max((event["step"] for event in events if event["event"] == "committed"), default=0)


def _decide(until: Path, step: int) -> None:
    part = until.with_suffix(".part")
    part.write_text(str(step))
    part.rename(until)


def _hold(complaints: Iterable[str]) -> None:
    if found := list(complaints):
        raise Broken("; ".join(found[:5]))

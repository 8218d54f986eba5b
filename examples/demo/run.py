"""Strata's purpose in one command: a training goes on although processes of its control plane are killed.

Three etcd members, three coordinators and three nodes of one rank each, all on this machine, train a small
convolutional net. Meanwhile the leading coordinator, a rank, and etcd's leading member are killed with SIGKILL. The
demo prints each event with its time. The exit status is 0 only if every kill took effect, every step was trained,
only steps after the last checkpoint were computed twice, and the net recognises digits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from feed import Feed, wait_for
from rich.console import Console

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import StrataError
from strata.processes.children import Child

HERE = Path(__file__).resolve().parent
JOB = "demo"
NODES = 3
BATCH = 10
STEPS_PER_EPOCH = 1500 // (NODES * BATCH)
SAVE_EVERY = 20
ACCURACY = 0.9
WAIT_S = 60.0
START_S = 300.0
"""Three nodes import torch at the same time, on a machine that may have to read all of it from disk."""

console = Console(highlight=False)


class Demo:
    """One run: its processes, the ranks' events, and the checks that failed."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder = folder
        self.steps = epochs * STEPS_PER_EPOCH
        self.epochs = epochs
        self.began = time.monotonic()
        self.shortfalls: list[str] = []
        self.rows: list[tuple[str, str]] = []
        self.feed = Feed([folder / f"node-{i}.log" for i in range(1, NODES + 1)])
        self.nodes: list[Child] = []
        self.lost = 0
        """Steps that were committed in a checkpoint and lost nevertheless."""

    # -- output

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        console.print(f"[dim]{time.monotonic() - self.began:6.1f} s[/dim]  {text}", soft_wrap=True)

    def expect(self, holds: bool, otherwise: str) -> None:
        """If `holds` is false, record the failed check: the run continues, but its exit status is 1."""
        if not holds:
            self.shortfalls.append(otherwise)
            self.say(f"[red]{otherwise}[/red]")

    # -- the run

    def run(self, cluster: LocalCluster) -> None:
        """Train, and kill a process at three points of the training."""
        self.client = CoordinatorClient.connect(cluster.endpoints, job=JOB)
        self._start_nodes(cluster)
        self._reach(1, "the first step", limit_s=START_S)
        self.say(f"training: {self.steps} steps, {NODES} ranks, a checkpoint every {SAVE_EVERY}")
        self._reach(self.steps // 8, "the first kill")
        self._kill_leader(cluster)
        self._reach(self.steps * 3 // 8, "the second kill")
        self._kill_rank()
        self._reach(self.steps * 6 // 8, "the third kill")
        self._kill_etcd(cluster)
        self._finish()

    def _start_nodes(self, cluster: LocalCluster) -> None:
        for number, log in enumerate(self.feed.logs, 1):
            command = [sys.executable, "-m", "strata", "run"]
            command += ["--endpoints", cluster.endpoints, "--job", JOB, "--worker-id", f"node-{number}"]
            command += [
                "--min-workers",
                str(NODES),
                "--address",
                "127.0.0.1",
                "--log-format",
                "json",
                "--no-prefix",
            ]
            command += ["--", sys.executable, str(HERE / "train.py")]
            command += ["--epochs", str(self.epochs), "--batch", str(BATCH)]
            command += ["--save-every", str(SAVE_EVERY), "--storage", str(self.folder / "checkpoints")]
            self.nodes.append(Child.start(command, name=f"node-{number}", log=log))
        self.say(f"{NODES} nodes started: strata run -- python examples/demo/train.py")

    def _reach(self, step: int, what: str, *, limit_s: float = WAIT_S) -> None:
        self._wait(f"step {step} ({what})", lambda: self.feed.step() >= step, limit_s)

    def _wait(self, what: str, condition: Callable[[], bool], limit_s: float = WAIT_S) -> float:
        def look() -> bool:
            self.feed.read()
            for node in self.nodes:
                if node.poll() not in {None, 0}:
                    raise RuntimeError(f"{node.name} {node.describe()}:\n{node.tail()}")
            return condition()

        with console.status("") as line:

            def poll_and_show() -> bool:
                line.update(f"step {self.feed.step()} of {self.steps}: waiting for {what}")
                return look()

            return wait_for(what, poll_and_show, limit_s=limit_s)

    def _latest(self) -> int:
        job = self.client.job_status()
        return job.latest_step if job.has_latest else 0

    def _kill_leader(self, cluster: LocalCluster) -> None:
        leader, generation, step = cluster.leader(), self.feed.generation(), self.feed.step()
        epoch = self.client.status().leader_epoch
        self.say(f"step {step}: [bold]SIGKILL to {leader.name}[/bold], the leader (pid {leader.child.pid})")
        leader.child.kill()
        code = leader.child.join(5.0)
        self.expect(code == -signal.SIGKILL, f"{leader.name} did not die by the kill ({code})")
        took = self._wait("another leader", lambda: self.client.status().leader_epoch > epoch)
        successor = cluster.leader()
        trained = self.feed.step() - step
        self.expect(trained > 0, "no step was trained while there was no leader")
        self.expect(self.feed.generation() == generation, "losing the leader ended the generation")
        self.say(f"{successor.name} leads after {took:.1f} s; {trained} steps were trained meanwhile")
        self.rows.append(
            (f"leader {leader.name} killed", f"{successor.name} led {took:.1f} s later; 0 steps lost")
        )
        leader.restart()

    def _kill_rank(self) -> None:
        generation = self.feed.generation()
        victim = self.feed.of("start", generation=generation, rank=1)[-1]
        committed, killed_at = self._latest(), time.time()
        os.kill(int(victim["pid"]), signal.SIGKILL)
        reached = self.feed.step()
        self.say(f"step {reached}: [bold]SIGKILL to rank 1[/bold] (pid {victim['pid']})")

        def all_restored() -> bool:
            return (
                len(self.feed.of("restore")) >= NODES * self.feed.generation()
                and self.feed.generation() > generation
            )

        self._wait("a new generation", all_restored)
        restored = {int(e["step"]) for e in self.feed.of("restore") if float(e["at"]) > killed_at}
        self._wait("a step in it", lambda: bool(self._steps_after(killed_at, min(restored))))
        first = self._steps_after(killed_at, min(restored))[0]
        took = first - killed_at
        reached = max(int(e["step"]) for e in self.feed.of("step") if float(e["at"]) < first)
        reason = self.client.world().world.reason
        self.expect("rank 1" in reason and "SIGKILL" in reason, f"the generation ended otherwise: {reason}")
        self.lost = max(0, committed - min(restored))
        self.expect(len(restored) == 1, f"ranks began again from different steps: {sorted(restored)}")
        self.expect(
            min(restored) >= committed, f"began from {min(restored)} although {committed} was committed"
        )
        # two saves may be in flight, and the next is due then
        self.expect(reached - min(restored) <= 3 * SAVE_EVERY, f"{reached - min(restored)} steps were lost")
        self.say(
            f"all ranks began again from checkpoint {min(restored)}; training steps {took:.1f} s after the kill,"
            f" {reached - min(restored)} steps to repeat"
        )
        self.rows.append(
            (
                "rank 1 killed",
                f"trained again {took:.1f} s later; {reached - min(restored)} steps since checkpoint {min(restored)} repeated",
            )
        )

    def _steps_after(self, moment: float, step: int) -> list[float]:
        """Return the times later than `moment` at which the step after `step` was trained."""
        return [float(e["at"]) for e in self.feed.of("step", step=step + 1) if float(e["at"]) > moment]

    def _kill_etcd(self, cluster: LocalCluster) -> None:
        member, step = cluster.etcd.leader(), self.feed.step()
        generation = self.feed.generation()
        self.say(f"step {step}: [bold]SIGKILL to {member.name}[/bold], etcd's leader (pid {member.pid})")
        member.kill()
        self.expect(not member.running, f"{member.name} did not die by the kill")
        took = self._wait("a checkpoint of a step after it", lambda: self._latest() > step)
        self.expect(self.feed.generation() == generation, "losing an etcd member ended the generation")
        self.expect(self.feed.step() > step, "no step was trained until then")
        self.say(f"checkpoint {self._latest()} was committed {took:.1f} s later; training went on")
        self.rows.append(
            (
                f"etcd member {member.name} killed",
                f"the next checkpoint was committed {took:.1f} s later; 0 steps lost",
            )
        )

    def _finish(self) -> None:
        self._wait(
            "the end of training", lambda: all(n.poll() is not None for n in self.nodes), limit_s=120.0
        )
        self.feed.read()
        codes = [n.returncode for n in self.nodes]
        self.expect(codes == [0] * NODES, f"strata run ended with {codes}, not zeros")
        trained = {(int(e["rank"]), int(e["step"])) for e in self.feed.of("step")}
        missing = {(r, s) for r in range(NODES) for s in range(1, self.steps + 1)} - trained
        self.expect(not missing, f"{len(missing)} steps were never trained")
        accuracies = [float(e["value"]) for e in self.feed.of("accuracy")]
        accuracy = accuracies[-1] if accuracies else 0.0
        self.expect(accuracy >= ACCURACY, f"the accuracy {accuracy:.3f} is below {ACCURACY}")
        latest = self._latest()
        self.expect(latest == self.steps, f"the last checkpoint is {latest}, not {self.steps}")
        self.rows.append(
            (
                "training",
                f"{self.steps} steps by {NODES} ranks, every one trained; generation {self.feed.generation()}",
            )
        )
        self.rows.append(("steps lost beyond the last checkpoint", str(self.lost)))
        self.rows.append(("test accuracy", f"{accuracy:.3f} on 297 held-out digits"))
        self.rows.append(("time", f"{time.monotonic() - self.began:.0f} s"))

    def report(self) -> int:
        """Print the table and return the exit status."""
        width = max((len(name) for name, _ in self.rows), default=0)
        console.print()
        for name, value in self.rows:
            console.print(f"[bold]{name:<{width}}[/bold]  {value}", soft_wrap=True)
        for shortfall in self.shortfalls:
            console.print(f"[red]failed: {shortfall}[/red]")
        console.print(
            "[green]all checks passed[/green]" if not self.shortfalls else "[red]not all checks passed[/red]"
        )
        return 0 if not self.shortfalls else 1


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=50, help="50 steps each")
    parser.add_argument("--keep", action="store_true", help="keep logs and checkpoints")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)

    folder = Path(".strata/demo").absolute() / str(os.getpid())
    folder.mkdir(parents=True)
    demo = Demo(folder, options.epochs)
    status = 1
    try:
        with LocalCluster.start(folder, etcd_members=3, coordinators=3, say=demo.say) as cluster:
            try:
                demo.run(cluster)
            finally:
                for node in demo.nodes:
                    node.kill()
        status = demo.report()
    except (StrataError, TimeoutError, RuntimeError) as error:
        console.print(f"[red]the demo failed: {error}[/red]", markup=True)
    except KeyboardInterrupt:
        console.print("interrupted")
        status = 130
    finally:
        if status == 0 and not options.keep:
            shutil.rmtree(folder)
        else:
            console.print(f"logs and checkpoints are in {folder}")
    return status


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

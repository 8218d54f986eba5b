"""The training workload: `strata run` on several nodes, whose ranks meet at barriers and save checkpoints.

Each client process is a *node*: it runs an agent (`strata run`), and starts another agent when that one ends. The
ranks are `training_rank`, in plain Python. The agents replace them whenever the world changes.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from strata.processes.children import Child
from strata_chaos.workloads.program import STOP_S, Options, Stop, Workload, main
from strata_chaos.workloads.recording import Recorder
from strata_chaos.workloads.training_rank import HISTORY

SLOTS: Final = 2
POLL_S: Final = 0.2


def client(options: Options, recorder: Recorder, stop: Stop) -> None:
    """Run a node's agent, and start another agent each time the agent ends."""
    life = 0
    while not stop.is_set():
        life += 1
        child = local_agent(options, life)
        recorder.note("process.started", pid=child.pid, role="agent", worker=options.worker, job=options.job)
        while child.poll() is None and not stop.wait(POLL_S):
            pass
        code = child.stop(STOP_S / 3) if stop.is_set() else child.join()
        recorder.note("process.ended", pid=child.pid, code=code, worker=options.worker)
        stop.wait(POLL_S)


def local_agent(options: Options, life: int) -> Child:
    """Start `strata run` with the ranks of this node."""
    command = [sys.executable, "-m", "strata", "run", "--endpoints", options.endpoints]
    command += ["--job", options.job, "--run-id", options.job]
    command += ["--worker-id", options.worker, "--slots", str(SLOTS)]
    command += ["--min-workers", str(options.clients), "--log-format", "json", "--"]
    command += [sys.executable, "-m", "strata_chaos.workloads.training_rank"]
    command += ["--storage", str(options.storage), "--seed", str(options.seed)]
    log = options.history.with_name("logs") / f"{options.history.stem}-{options.client}.log"
    # each node has its own history file; a variable names it, because all nodes of a job must run the same command
    env = {**os.environ, HISTORY: str(options.file(f"{options.client}-{options.life}.{life}"))}
    return Child.start(command, name=options.worker, log=log, env=env)


WORKLOAD: Final = Workload(name="training", clients=2, client=client, role="node")

if __name__ == "__main__":
    sys.exit(main(WORKLOAD))

"""The churn workload: members join, leave, die and return, and second processes try to join with a living member's id.

Clients with even numbers have sessions (`strata.connect`), clients with odd numbers send heartbeats
(`CoordinatorClient`). The parent kills some clients by SIGKILL and lets others leave. Each of them returns as a new
process, which is a new boot. Now and then the parent starts a *twin*: another process with the id of a living member.
Coordinators must refuse the twin as long as that member lives.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from strata import CoordinatorClient
from strata.errors import Conflict, StaleGeneration, StaleIncarnation, StrataError, Unavailable
from strata.processes.children import Child
from strata_chaos.workloads import joining
from strata_chaos.workloads.program import Fleet, Options, Stop, Workload, main
from strata_chaos.workloads.recording import Recorder

CHECK_S: Final = 0.25
HEARTBEAT_S: Final = 0.4
CHANGE_S: Final = (1.5, 5.0)
"""Range of the time between two changes by the parent."""
TWIN_S: Final = 8.0
TWIN_LIFE: Final = 1_000_000
"""Lives from this number on are twins."""


def min_workers(clients: int) -> int:
    """Return the number of members that a world needs; the other members may be absent."""
    return max(1, clients // 2)


def client(options: Options, recorder: Recorder, stop: Stop) -> None:
    """Be a member until SIGTERM, with a session or with heartbeats."""
    if options.client is not None and options.client % 2:
        live_by_heartbeats(options, recorder, stop)
    else:
        live_by_session(options, recorder, stop)


def live_by_session(options: Options, recorder: Recorder, stop: Stop) -> None:
    twin = options.life >= TWIN_LIFE
    while not stop.is_set():
        rank = joining.join(options, recorder, stop, once=twin, min_workers=min_workers(options.clients))
        if rank is None:
            return
        step = 0
        going = True
        while going and not stop.wait(CHECK_S):
            step += 1
            try:
                rank.progress(step, "churn")
                recorder.note("member.alive", worker=options.worker, incarnation=rank.incarnation)
            except StaleGeneration:
                going = joining.rejoin(options, recorder, stop, rank)
            except StrataError as error:
                going = False
                recorder.note(
                    "member.ended",
                    worker=options.worker,
                    incarnation=rank.incarnation,
                    error=type(error).__name__,
                    message=error.message,
                )


def live_by_heartbeats(options: Options, recorder: Recorder, stop: Stop) -> None:
    """Register and send heartbeats; leave at the end."""
    twin = options.life >= TWIN_LIFE
    with CoordinatorClient.connect(options.endpoints, job=options.job, timeout_s=5.0) as cluster:
        if not register(options, recorder, stop, cluster, once=twin):
            return
        while not stop.wait(HEARTBEAT_S):
            try:
                with recorder.operation(
                    "member.heartbeat", worker=options.worker, job=options.job, pid=os.getpid()
                ) as running:
                    running.result["generation"] = cluster.heartbeat(worker_id=options.worker).generation
            except (StaleIncarnation, Conflict):
                return  # another process has registered with this worker id
            except StrataError:
                continue
        with recorder.operation(
            "member.leave", announce=True, worker=options.worker, job=options.job, pid=os.getpid()
        ):
            cluster.leave(worker_id=options.worker)


def register(
    options: Options, recorder: Recorder, stop: Stop, cluster: CoordinatorClient, *, once: bool
) -> bool:
    while not stop.is_set():
        try:
            with recorder.operation(
                "member.register", announce=True, worker=options.worker, job=options.job, pid=os.getpid()
            ) as running:
                answer = cluster.register(worker_id=options.worker)
                running.result.update(incarnation=answer.incarnation, uid=answer.token.uid)
            return True
        except Unavailable:
            continue
        except StrataError:
            if once:
                return False
            stop.wait(joining.PAUSE_S)
    return False


class Changes:
    """The parent's random changes to its clients: kills, requests to stop, twins."""

    def __init__(self) -> None:
        self._due = 0.0
        self._twins: list[tuple[float, Child]] = []

    def __call__(self, fleet: Fleet) -> None:
        now = fleet.recorder.clock()
        for until, twin in list(self._twins):
            code = twin.poll()
            if code is None and now > until:
                twin.request_stop()
            elif code is not None:
                fleet.recorder.note("process.ended", pid=twin.pid, code=code, twin=True)
                self._twins.remove((until, twin))
        if not self._due:
            self._due = now + CHANGE_S[1]
        if now < self._due or not fleet.children:
            return
        rng = fleet.rng
        self._due = now + rng.uniform(*CHANGE_S)
        number = rng.choice(sorted(fleet.children))
        child = fleet.children[number]
        worker = f"{fleet.options.job}-{number}"
        choice = rng.random()
        if choice < 0.45:
            with fleet.recorder.operation("process.kill", announce=True, pid=child.pid, worker=worker):
                child.kill()
                child.join()
        elif choice < 0.8:
            fleet.recorder.note("process.asked_to_stop", pid=child.pid, worker=worker)
            child.request_stop()
        else:
            twin = fleet.spawn(number, TWIN_LIFE + fleet.next_life(number))
            fleet.recorder.note("process.twin", pid=twin.pid, of=child.pid, worker=worker)
            self._twins.append((now + TWIN_S, twin))


WORKLOAD: Final = Workload(
    name="churn",
    clients=6,
    client=client,
    min_workers=min_workers,
    upkeep=Changes(),
)

if __name__ == "__main__":
    sys.exit(main(WORKLOAD))

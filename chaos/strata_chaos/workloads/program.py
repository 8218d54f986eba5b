"""The common part of workload programs: parse the arguments, keep clients running, shut down cleanly.

A workload is one program with two parts. The *parent* starts the client processes. Until SIGTERM it restarts each
dead client after a pause. The new process is a new boot with its own history file. A *client* is the same program
with `--client N --life M`; the client uses the public library and records its operations. A `process.started` record
makes its client a possible target of faults that kill or freeze processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.client import CoordinatorClient
from strata.errors import NotFound, StrataError, Unavailable
from strata.processes.children import Child
from strata.v1.worlds_pb2 import JobSpec
from strata_chaos.history import HistoryWriter
from strata_chaos.workloads.recording import Recorder

CERTIFICATES: Final = "STRATA_CHAOS_PAPERS"
POLL_S: Final = 0.1
CHECK_S: Final = 0.05
STOP_S: Final = 15.0
"""How long the clients may take to shut down cleanly."""
NEVER: Final = 1_000_000


def boottime_s() -> float:
    """Return CLOCK_BOOTTIME in seconds, which advances while a process is frozen."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line of a workload."""

    endpoints: str
    job: str
    history: Path
    seed: int
    clients: int
    storage: Path
    client: int | None = None
    life: int = 0

    @property
    def worker(self) -> str:
        """Worker id of this client as a member; a rank gets its agent's id from the environment."""
        return os.environ.get("STRATA_WORKER_ID") or f"{self.job}-{self.client}"

    @property
    def is_member(self) -> bool:
        """Whether this client is one of the job's members."""
        return self.client is not None and self.client < self.clients

    def rng(self, *parts: object) -> random.Random:
        """Return a random source that depends only on the seed and `parts`, the same in every process."""
        return random.Random("/".join(map(str, (self.seed, *parts))))

    def file(self, name: str) -> Path:
        """Return the history file of one process of this workload."""
        return self.history.with_name(f"{self.history.stem}.{name}.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One program: its name, its number of clients, and the work of each.

    `client` runs in a client process until `Stop` is set. An error ends the process, and the parent starts another
    process. With `min_workers` the parent creates the job first. `extra` clients, numbered from `clients` on, are not
    members: readers, for example. `role` is the client's role for the nemesis. The parent calls `upkeep` regularly.
    """

    name: str
    clients: int
    client: Callable[[Options, Recorder, Stop], None]
    min_workers: Callable[[int], int] | None = lambda clients: clients
    extra: int = 0
    role: str = "member"
    upkeep: Callable[[Fleet], None] | None = None


class Stop:
    """A flag that SIGTERM sets; after that the main thread calls the function registered with `at_end`.

    Waiters poll the flag, because a signal handler must not take a lock. A handler that calls `threading.Event.set`
    would deadlock if it interrupted a `wait` of the same thread.
    """

    def __init__(self) -> None:
        self._set = False
        self._end: Callable[[], None] | None = None

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, at most `timeout_s`; return whether it is set."""
        deadline = time.monotonic() + timeout_s
        while not self._set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, CHECK_S))
        return self._set

    def at_end(self, call: Callable[[], None] | None) -> None:
        """Register `call`, which ends the wait of the client's thread; it replaces an earlier registration."""
        self._end = call

    def end(self) -> None:
        """Call the registered function, if any."""
        if self._end is not None:
            with contextlib.suppress(StrataError):  # the process ends in any case
                self._end()


def parse(workload: Workload, argv: Sequence[str]) -> Options:
    """Return the options of a command line; exit with 2 if it is invalid."""
    parser = argparse.ArgumentParser(prog=f"strata_chaos.workloads.{workload.name}")
    parser.add_argument("--endpoints", required=True, help="the coordinators: a:50051,b:50051")
    parser.add_argument("--job", required=True)
    parser.add_argument("--history", required=True, type=Path, help="FILE.jsonl; clients write beside it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=workload.clients)
    parser.add_argument("--storage", type=Path, help="where checkpoints go; default: beside the history")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--life", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    history: Path = given.history.absolute()
    return Options(
        endpoints=given.endpoints,
        job=given.job,
        history=history,
        seed=given.seed,
        clients=given.clients,
        storage=(given.storage or history.with_name(f"storage-{given.job}")).absolute(),
        client=given.client,
        life=given.life,
    )


def main(workload: Workload, argv: Sequence[str] | None = None) -> int:
    """Run the parent, or the client if `--client` is given; return the exit code."""
    options = parse(workload, sys.argv[1:] if argv is None else argv)
    show_certificates(options)
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if options.client is None:
        with HistoryWriter(options.history) as writer:
            recorder = Recorder(writer, client=workload.name, clock=boottime_s)
            return Fleet(workload, options, recorder, stop).run()
    return _client(workload, options, stop)


def show_certificates(options: Options) -> None:
    """Present the certificate of this process's own worker, if the run has certificates.

    `STRATA_CHAOS_PAPERS` names a folder with one folder for each worker. The parent presents the certificate of the
    founder.
    """
    if (folder := os.environ.get(CERTIFICATES)) is None:
        return
    own = Path(folder) / (f"{options.job}-founder" if options.client is None else options.worker)
    os.environ |= {
        "STRATA_TLS_CA_FILE": str(own / "ca.pem"),
        "STRATA_TLS_CERT_FILE": str(own / "cert.pem"),
        "STRATA_TLS_KEY_FILE": str(own / "key.pem"),
    }


def _client(workload: Workload, options: Options, stop: Stop) -> int:
    """Run one client in its own thread, so that the main thread is free for SIGTERM."""
    name = f"{options.client}-{options.life}"
    codes: list[int] = []
    with HistoryWriter(options.file(name)) as writer:
        recorder = Recorder(writer, client=f"{workload.name}.{options.client}", clock=boottime_s)
        recorder.started("member" if options.is_member else "reader", worker=options.worker, job=options.job)

        def work() -> None:
            try:
                workload.client(options, recorder, stop)
                codes.append(0)
            except StrataError as error:
                recorder.note("client.failed", type=type(error).__name__, message=error.message)
                codes.append(1)
            finally:
                done.set()

        done = threading.Event()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while not done.wait(POLL_S) and not stop.is_set():
            pass
        if stop.is_set():
            stop.end()
            done.wait(STOP_S / 3)
            recorder.note("process.ending", pid=os.getpid())
    return codes[0] if codes else 0


class Fleet:
    """The parent of the client processes."""

    def __init__(self, workload: Workload, options: Options, recorder: Recorder, stop: Stop) -> None:
        self.workload = workload
        self.options = options
        self.recorder = recorder
        self.stop = stop
        self.children: dict[int, Child] = {}
        self._lives: dict[int, int] = {}
        self._due: dict[int, float] = {}
        self.rng = options.rng("fleet")

    def run(self) -> int:
        """Keep every client running until SIGTERM; return 0."""
        self.recorder.note(
            "workload.started", name=self.workload.name, job=self.options.job, seed=self.options.seed
        )
        if self.workload.min_workers is not None and not found_job(
            self.options, self.recorder, self.stop, self.workload.min_workers(self.options.clients)
        ):
            return 0
        for number in range(self.options.clients + self.workload.extra):
            self.start(number)
        while not self.stop.wait(POLL_S):
            self._keep()
            if self.workload.upkeep is not None:
                self.workload.upkeep(self)
        self._end()
        return 0

    def start(self, number: int, *, life: int | None = None) -> Child:
        """Start a process of client `number`; the parent restarts the process when it ends."""
        life = self._lives.get(number, 0) + 1 if life is None else life
        self._lives[number] = max(life, self._lives.get(number, 0))
        child = self.spawn(number, life)
        self.children[number] = child
        return child

    def spawn(self, number: int, life: int) -> Child:
        """Start a process of client `number` that is not restarted when it ends."""
        options = self.options
        argv = [sys.executable, "-m", f"strata_chaos.workloads.{self.workload.name}"]
        argv += ["--endpoints", options.endpoints, "--job", options.job, "--history", str(options.history)]
        argv += ["--seed", str(options.seed), "--clients", str(options.clients)]
        argv += ["--storage", str(options.storage), "--client", str(number), "--life", str(life)]
        log = options.history.with_name("logs") / f"{options.history.stem}.log"
        return Child.start(argv, name=f"{self.workload.name}-{number}", log=log)

    def next_life(self, number: int) -> int:
        """Return an unused life number for another process of this client."""
        self._lives[number] = self._lives.get(number, 0) + 1
        return self._lives[number]

    def _keep(self) -> None:
        now = self.recorder.clock()
        for number, child in list(self.children.items()):
            code = child.poll()
            if code is not None:
                self.recorder.note(
                    "process.ended", pid=child.pid, code=code, worker=f"{self.options.job}-{number}"
                )
                del self.children[number]
                self._due[number] = now + self.rng.uniform(0.2, 2.0)
        for number, due in list(self._due.items()):
            if now >= due:
                del self._due[number]
                self.start(number)

    def _end(self) -> None:
        for child in self.children.values():
            child.request_stop()
        deadline = time.monotonic() + STOP_S
        for child in self.children.values():
            code = child.stop(max(0.1, deadline - time.monotonic()))
            self.recorder.note("process.ended", pid=child.pid, code=code)
        self.recorder.note("workload.ended", name=self.workload.name)


def found_job(options: Options, recorder: Recorder, stop: Stop, min_workers: int) -> bool:
    """Create the job with limits that faults cannot exhaust; return False if `stop` is set first.

    By default a job fails after three failed generations in a row without a checkpoint, and in a chaos run
    generations fail all the time. So a founder registers first, with a spec that raises that limit, and then leaves.
    """
    spec = JobSpec(
        min_workers=min_workers,
        max_workers=options.clients,
        settle_s=0.3,
        max_no_progress_generations=NEVER,
    )
    worker = f"{options.job}-founder"
    with CoordinatorClient.connect(options.endpoints, job=options.job) as client:
        while not stop.is_set():
            try:
                with recorder.operation("member.register", worker=worker, job=options.job) as running:
                    answer = client.register(worker_id=worker, spec=spec)
                    running.result.update(incarnation=answer.incarnation, uid=answer.token.uid)
                break
            except Unavailable:
                continue
        while not stop.is_set():
            try:
                with recorder.operation("member.leave", announce=True, worker=worker, job=options.job):
                    client.leave(worker_id=worker)
                return True
            except NotFound:
                return True  # an earlier attempt has created the job
            except Unavailable:
                continue
    return False

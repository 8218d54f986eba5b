"""A standalone process that reports the pid of its agent, and that a test ends in many ways.

standalone.py MODE STORAGE     MODE is one of the functions below
"""

from __future__ import annotations

import atexit
import builtins
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import strata
from strata import errors

LEAST, MOST = int(os.environ.get("LEAST", "1")), int(os.environ.get("MOST", os.environ.get("LEAST", "1")))


def say(event: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def agent() -> list[int]:
    """Return the pids of this process's children that are agents."""
    return [
        int(child)
        for child in _children()
        if b"strata.agent.standalone" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def _children() -> list[str]:
    """Return the children of all threads: the kernel lists a child with the thread that started it."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [child for task in tasks for child in task.read_text().split()]


def train(storage: str) -> None:
    """Train two steps, save, and report whether grpc was imported."""
    began = time.monotonic()
    with strata.init(state={"w": 1}, storage_path=storage, save_every_steps=1) as run:
        took_s = time.monotonic() - began
        for _ in run.steps([1, 2]):
            pass
        run.save(wait=True)
        say("trained", step=run.step, took_s=took_s, grpc="grpc" in sys.modules, agents=agent())


def step(storage: str) -> None:
    """Train until the process or the run is ended."""
    run = strata.init(state={"w": 1}, storage_path=storage, min_workers=LEAST, max_workers=MOST)
    printed = False
    for _ in run.steps(range(10**6)):
        if not printed:
            say("steps", agents=agent(), generation=run.world.generation)
        printed = True
        time.sleep(0.05)


def notebook(storage: str) -> None:
    """Train in an interactive session: an error is raised, and the process continues with another run."""
    builtins.__IPYTHON__ = True  # type: ignore[attr-defined]  # as IPython does
    for _ in range(2):
        try:
            step(storage)
        except errors.StrataError as error:
            say("raised", kind=type(error).__name__, pid=os.getpid())


def hang(storage: str) -> None:
    """Train, and hang in a step, as in a collective."""
    run = strata.init(state={"w": 1}, storage_path=storage, min_workers=LEAST, max_workers=MOST)
    for _ in run.steps([1, 2, 3]):
        if run.begun == 2:
            say("hangs", agents=agent())
            time.sleep(1000)


def hold(_storage: str) -> None:
    """Be a rank by `strata.connect`; report the first error that a call raises."""
    client = strata.connect(min_workers=LEAST, max_workers=MOST)
    say("joined", agents=agent(), generation=client.generation)
    while True:
        try:
            client.progress(1)
        except errors.StrataError as error:
            say("raised", kind=type(error).__name__, printed=str(error))
            if isinstance(error, errors.StaleGeneration):
                client.rejoin(timeout_s=30)
                say("rejoined", generation=client.generation)
                client.close()
            return
        time.sleep(0.02)


def dies(_storage: str) -> NoReturn:
    """End in an abnormal way that the test chooses."""
    atexit.register(time.sleep, 1000)  # registered first, so called last
    strata.connect()
    say("joined", agents=agent())
    match sys.stdin.readline().strip():
        case "os._exit":
            os._exit(7)
        case "exec":
            os.execv("/bin/sleep", ["sleep", "1000"])
        case "hang in exit":
            sys.exit(0)
        case "close all":
            os.closerange(3, 1000)
    time.sleep(1000)
    raise AssertionError


def _connected(job: str) -> None:
    with strata.connect(job=job) as client:
        say("child", rank=client.rank)


def children(_storage: str) -> None:
    """Start children: a fork, which cannot use the session, and a spawned process and a shell, which open their own."""
    with strata.connect() as client:
        before = agent()
        if (child := os.fork()) == 0:
            try:
                client.barrier("b")
            except errors.ConfigError as error:
                say("forked", printed=str(error))
            os._exit(0)
        os.waitpid(child, 0)
        spawned = multiprocessing.get_context("spawn").Process(target=_connected, args=("spawned",))
        spawned.start()
        spawned.join()
        code = "import strata; client = strata.connect(job='shelled'); client.close()"
        shell = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}"'], check=False)
        say("children", spawned=spawned.exitcode, shell=shell.returncode, same=agent() == before)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])

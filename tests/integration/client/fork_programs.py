"""Programs that fork while their session is open; run as `python -m tests.integration.client.fork_programs`.

Each program prints one JSON object a line. Arguments: the program's name, then its own.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import strata

LIVES_S = 60.0
LEAST = int(os.environ.get("LEAST", "1"))


def say(**fields: Any) -> None:
    """Print one JSON line for the test."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def loader(endpoint: str, epochs: str) -> None:
    """Iterate over a DataLoader with forked workers for several epochs, with a barrier after each."""
    import torch  # noqa: PLC0415  # the other programs do not need torch
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    torch.set_num_threads(1)
    data = TensorDataset(torch.arange(64))
    with strata.connect(endpoint, worker_id="loader") as client:
        for epoch in range(int(epochs)):
            seen = 0
            for step, (batch,) in enumerate(DataLoader(data, batch_size=8, num_workers=2)):
                seen += len(batch)
                client.progress(step, "train")
            client.barrier("epoch", b"%d" % epoch)
            say(epoch=epoch, seen=seen, connected=client.connected)


def _under_strata_run(endpoint: str) -> strata.RankClient:
    os.environ |= {
        "STRATA_SOCKET": endpoint.removeprefix("unix:"),
        "STRATA_JOB": "default",
        "STRATA_WORKER_ID": "node",
        "STRATA_GENERATION": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    return strata.connect()


def connects_again(endpoint: str) -> None:
    """Connect twice as the same rank, like a script and its CheckpointManager."""
    first, second = _under_strata_run(endpoint), strata.connect()
    first.barrier("b")
    second.barrier("b")
    first.close()
    second.barrier("b")
    third = strata.connect()
    second.close()
    third.barrier("b")
    third.close()
    say(closed=True)
    with strata.connect() as fourth:
        fourth.barrier("b")


def _live_on() -> None:
    os.setsid()  # leaves the process group, which ends with the parent
    say(child=os.getpid())
    os.close(1)  # the test reads stdout until every writer has closed it
    time.sleep(LIVES_S)


def parent(endpoint: str) -> None:
    """Fork a worker that outlives its parent."""
    client = _under_strata_run(endpoint) if endpoint.startswith("unix:") else None
    client = client or strata.connect(endpoint, worker_id="parent", min_workers=LEAST)
    client.barrier("before")
    multiprocessing.get_context("fork").Process(target=_live_on, daemon=True).start()
    client.barrier("after")
    say(parent=os.getpid())
    time.sleep(LIVES_S)


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except strata.ConfigError as error:
        return f"ConfigError: {error}"
    return "went through"


def child_calls(endpoint: str) -> None:
    """Use the parent's client in a forked child that exits as a program does, then in the parent."""
    client = strata.connect(endpoint, worker_id="parent", min_workers=LEAST)
    with strata.CoordinatorClient.connect(endpoint, timeout_s=1.0) as other:
        with contextlib.suppress(strata.StrataError):
            other.status()  # opens this client's own connection
        pid = os.fork()
        if pid == 0:
            with client:  # leaving this block does not end the parent's session
                say(
                    barrier=_refused(lambda: client.barrier("b")),
                    progress=_refused(lambda: client.progress(1)),
                    connect=_refused(lambda: strata.connect(endpoint)),
                    unary=_refused(lambda: strata.CoordinatorClient.connect(endpoint)),
                    status=_refused(other.status),
                )
                sys.exit(7)
    _, status = os.waitpid(pid, 0)
    client.barrier("b")
    client.close()
    say(child_exit=os.waitstatus_to_exitcode(status), connected_before_close=True)


def _connects(endpoint: str, name: str) -> None:
    with strata.connect(endpoint, worker_id=name) as client:
        client.barrier("b")
    say(done=name)


def other_methods(endpoint: str) -> None:
    """Start children by spawn and forkserver; they inherit no session and connect by themselves."""
    with strata.connect(endpoint, worker_id="parent", min_workers=LEAST) as client:
        for method in ("spawn", "forkserver"):
            context: Any = multiprocessing.get_context(method)
            child = context.Process(target=_connects, args=(endpoint, method))
            child.start()
            child.join()
            say(method=method, code=child.exitcode)
        client.barrier("b")


def forked_first(endpoint: str) -> None:
    """Connect in a child that was forked before the parent used the library."""
    child = multiprocessing.get_context("fork").Process(target=_connects, args=(endpoint, "early"))
    child.start()
    child.join()
    say(code=child.exitcode)


def held_gil(endpoint: str, seconds: str) -> None:
    """Hold the GIL in C, as a long call into an extension does."""
    import ctypes  # noqa: PLC0415

    with strata.connect(endpoint, worker_id="holder", min_workers=LEAST) as client:
        say(holding=os.getpid())
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))  # PyDLL keeps the GIL, CDLL releases it
        client.barrier("after")
        say(held=seconds, incarnation=client.incarnation)


def idle(endpoint: str) -> None:
    """Connect and do nothing."""
    client = strata.connect(endpoint, worker_id="idle", min_workers=LEAST)
    say(idle=os.getpid(), incarnation=client.incarnation)
    time.sleep(LIVES_S)


def ends(endpoint: str, how: str) -> None:
    """End in one of the ways in which a program can end, with the client still open."""
    client = strata.connect(endpoint, worker_id="ends")
    client.barrier("b")
    say(ending=how)
    if how == "exit":
        sys.exit(3)
    if how == "error":
        raise ZeroDivisionError
    if how == "os_exit":
        os._exit(4)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

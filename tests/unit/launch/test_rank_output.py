"""Output of ranks passes through the agent: no line may be lost, and no wait may be endless."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strata.launch.console import Console
from strata.launch.rank_output import ENDED_S, RankOutputs
from strata.processes.children import Child

LIMIT_S = 20.0


class Wires:
    """Two pipes in place of this command's stdout and stderr.

    Threads read them, from the start unless `read` is False.
    """

    def __init__(self, *, read: bool = True) -> None:
        self._ends = [os.pipe(), os.pipe()]
        self.outputs = RankOutputs(*(Console(theirs, {}) for _, theirs in self._ends))
        self.received: list[bytearray] = [bytearray(), bytearray()]
        self._readers: list[threading.Thread] = []
        if read:
            self.read()

    def read(self) -> None:
        for (ours, _), received in zip(self._ends, self.received, strict=True):
            reader = threading.Thread(target=self._listen, args=(ours, received), daemon=True)
            reader.start()
            self._readers.append(reader)

    async def record(self, words: bytes) -> None:
        """Return once these bytes have come on stdout."""
        deadline = time.monotonic() + LIMIT_S
        while words not in bytes(self.received[0]):
            assert time.monotonic() < deadline, f"{words!r} did not come"
            await asyncio.sleep(0.02)

    def whole(self) -> tuple[bytes, bytes]:
        """Close the pipes; return all bytes written to stdout and stderr."""
        for _, theirs in self._ends:
            os.close(theirs)
        for reader in self._readers:
            reader.join(LIMIT_S)
        return bytes(self.received[0]), bytes(self.received[1])

    @staticmethod
    def _listen(fd: int, received: bytearray) -> None:
        while data := os.read(fd, 65536):
            received += data
        os.close(fd)


@pytest.fixture
def wires() -> Wires:
    return Wires()


async def to_its_end(
    wires: Wires, script: str, *, rank: int = 3, file: Path | None = None
) -> tuple[Child, bytes, float]:
    """Run a script; return its process, the end of its stderr, and the seconds until its output was passed on."""
    argv = (sys.executable, "-I", "-S", "-c", script)
    child, output = wires.outputs.start(argv, name="rank", env=dict(os.environ))
    output.begin(rank, file.open("ab", buffering=0) if file is not None else None)
    await child.join_async(LIMIT_S)
    began = time.monotonic()
    await output.passed_on()
    return child, output.stderr_tail(), time.monotonic() - began


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_both_streams_arrive_whole_and_in_order(wires: Wires) -> None:
    script = """
import os, sys
for n in range(20000):
    print(n)
sys.stdout.flush()
os.write(2, b"garbage \\xff\\0" + b"y" * 200000 + b"\\nno end")
"""
    _, last, _ = await to_its_end(wires, script)
    out, err = wires.whole()
    assert out == b"".join(b"[rank 3] %d\n" % n for n in range(20000))
    assert err == b"[rank 3] garbage \xff\0" + b"y" * 200000 + b"\n[rank 3] no end"
    assert last.endswith(b"yyy\nno end")


async def test_a_rank_s_orphaned_child_is_not_awaited_and_its_output_is_forwarded(
    wires: Wires, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = f"""
import os, time
ours, its = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.write(its, b"I have left the rank's group")
    while not os.path.exists({str(go)!r}):
        time.sleep(0.02)
    os.write(1, b"still here\\n")
    os._exit(0)
os.read(ours, 1)
os.write(1, b"the rank\\n")
"""
    _, _, took_s = await to_its_end(wires, script)
    assert took_s < ENDED_S
    wires.outputs.wait()
    go.touch()
    await wires.record(b"still here")
    assert wires.whole()[0] == b"[rank 3] the rank\n[rank 3] still here\n"


async def test_an_orphaned_child_that_never_stops_writing_is_not_awaited(
    wires: Wires, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    script = f"""
import os
if os.fork() == 0:
    os.setsid()
    open({str(file)!r}, "w").write(str(os.getpid()))
    while True:
        os.write(1, b"still here\\n")
while not (os.path.exists({str(file)!r}) and open({str(file)!r}).read()):
    pass
os.write(1, b"the rank\\n")
"""
    try:
        _, _, took_s = await to_its_end(wires, script)
        assert took_s < ENDED_S
        await asyncio.wait_for(asyncio.to_thread(wires.outputs.wait), LIMIT_S)
        await wires.record(b"[rank 3] the rank\n")
    finally:
        os.kill(int(await asyncio.to_thread(file.read_text)), signal.SIGKILL)


async def test_a_reader_that_stalls_delays_no_agent_and_loses_no_line() -> None:
    wires = Wires(read=False)
    script = "import os\nfor n in range(12000): os.write(1, b'%06d\\n' % n)"
    argv = (sys.executable, "-I", "-S", "-c", script)
    child, output = wires.outputs.start(argv, name="rank", env=dict(os.environ))
    output.begin(0, None)
    await child.join_async(LIMIT_S)  # its output is in the pipes and in the thread's buffer
    began = time.monotonic()
    await output.passed_on()
    assert time.monotonic() - began < ENDED_S + 1.0
    wires.read()
    await asyncio.to_thread(wires.outputs.wait)
    assert wires.whole()[0] == b"".join(b"[rank 0] %06d\n" % n for n in range(12000))


async def test_the_log_file_holds_the_ranks_exact_output(wires: Wires, tmp_path: Path) -> None:
    file = tmp_path / "rank.log"
    file.write_bytes(b"before\n")
    await to_its_end(wires, "import os\nos.write(1, b'1%\\r2%\\nend')", file=file)
    assert file.read_bytes() == b"before\n1%\r2%\nend"
    assert wires.whole()[0] == b"[rank 3] 1%\r[rank 3] 2%\n[rank 3] end"


async def test_a_full_disk_ends_the_file_and_not_the_output(wires: Wires) -> None:
    await to_its_end(
        wires, "import os\nos.write(1, b'one\\n')\nos.write(1, b'two\\n')", file=Path("/dev/full")
    )
    assert wires.whole()[0] == b"[rank 3] one\n[rank 3] two\n"


@pytest.mark.parametrize("writes", [True, False], ids=["by a write", "by its close alone"])
async def test_a_file_that_cannot_even_be_closed_ends_and_not_the_output(
    wires: Wires, tmp_path: Path, writes: bool
) -> None:
    go = tmp_path / "go"
    script = f"""
import os, time
os.write(1, b"one\\n")
while not os.path.exists({str(go)!r}):
    time.sleep(0.02)
for _ in range(2000 if {writes} else 0):
    os.write(1, b"x" * 99 + b"\\n")
os.close(1)
os.close(2)
time.sleep(0.2)
"""
    argv = (sys.executable, "-I", "-S", "-c", script)
    child, output = wires.outputs.start(argv, name="rank", env=dict(os.environ))
    output.begin(0, AtQuota(tmp_path / "rank.log", writes=not writes))
    await wires.record(b"one\n")
    go.touch()
    await child.join_async(LIMIT_S)
    await asyncio.wait_for(asyncio.to_thread(wires.outputs.wait), LIMIT_S)
    assert output.over
    lines = 2000 if writes else 0
    assert wires.whole()[0] == b"[rank 0] one\n" + (b"[rank 0] " + b"x" * 99 + b"\n") * lines


async def test_a_process_whose_exit_cannot_be_watched_is_killed(
    wires: Wires, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    denied = OSError(errno.EMFILE, "Too many open files")
    before = descriptors()
    argv = ("sh", "-c", f"echo $$ >{file}; exec sleep 100")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", lambda _pid: raised(denied, after=file))
        with pytest.raises(OSError, match="Too many open files"):
            wires.outputs.start(argv, name="rank", env=dict(os.environ))
    deadline = time.monotonic() + LIMIT_S
    while runs(int(await asyncio.to_thread(file.read_text))):
        assert time.monotonic() < deadline, "it runs on"
        await asyncio.sleep(0.02)
    assert descriptors() == before


class AtQuota(io.FileIO):
    """A file on NFS whose user is over quota: a write raises the error, or only the close does."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        super().__init__(path, "ab")
        self._writes = writes

    def write(self, data: Any, /) -> int:
        if not self._writes:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return super().write(data) or 0

    def close(self) -> None:
        if not self.closed:
            super().close()
            raise OSError(errno.EDQUOT, "Disk quota exceeded")


def raised(error: OSError, *, after: Path) -> int:
    """Raise `error` once the process has written its id to `after`."""
    while not (after.exists() and after.read_text().endswith("\n")):
        time.sleep(0.02)
    raise error


def runs(pid: int) -> bool:
    """Return True if this process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_the_output_of_a_process_gets_the_prefix_of_its_new_rank(wires: Wires, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"""
import os, time
os.write(1, b"one\\n")
while not os.path.exists({str(go)!r}):
    time.sleep(0.02)
os.write(1, b"two\\n")
"""
    argv = (sys.executable, "-I", "-S", "-c", script)
    child, output = wires.outputs.start(argv, name="rank", env=dict(os.environ))
    output.begin(1, None)
    await wires.record(b"one")
    output.move(0)
    go.touch()
    await child.join_async(LIMIT_S)
    await output.passed_on()
    assert wires.whole()[0] == b"[rank 1] one\n[rank 0] two\n"


async def test_a_spare_process_that_never_became_a_rank_leaks_no_descriptor(wires: Wires) -> None:
    before = descriptors()
    for _ in range(5):
        child, output = wires.outputs.start(("sleep", "100"), name="spare", env=dict(os.environ))
        output.listen()
        child.kill()
        await child.join_async(LIMIT_S)
        await output.passed_on()
    with pytest.raises(OSError, match="no program"):
        wires.outputs.start(("no-such-program",), name="spare", env=dict(os.environ))
    wires.outputs.wait()
    deadline = time.monotonic() + LIMIT_S
    while descriptors() != before:
        assert time.monotonic() < deadline
        await asyncio.to_thread(time.sleep, 0.02)

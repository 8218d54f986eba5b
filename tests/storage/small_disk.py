"""A small file system of a test's own, which the test can fill."""

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
    """The file system mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def clear(self) -> None:
        """Free the space again."""
        self._filler.unlink()

    def temporary(self) -> list[Path]:
        """Return the temporary files of unfinished writes."""
        return list(self.folder.rglob("*.tmp"))


@contextmanager
def mounted(folder: Path, need: Need, *, size: str = "24m") -> Iterator[SmallDisk]:
    """Mount a tmpfs at the new `folder`; skip the test if mounting is not permitted."""
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    may = os.geteuid() == 0 and shutil.which("mount") is not None
    done = may and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    need("mount", done, "run as root, where a tmpfs may be mounted")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True)

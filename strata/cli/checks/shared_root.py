"""Check that other hosts see a storage root's files: each host writes a mark into the root and reads the others' marks.

A mark is a small file with the host's name and the path of the root on that host. Each run removes marks older than
an hour. Ages are measured on the file system's clock, which sets the times of all marks. A mark's name has the suffix
of unfinished files, so no listing shows the mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.checkpoint.storage.local_file import sync_folder
from strata.cli.checks.finding import Finding, ok, warn
from strata.cli.checks.mounts import PAGE, Mount
from strata.documents.parsing import NOTE, json_object
from strata.documents.reading import read_regular
from strata.errors import StrataError
from strata.observe.words import age

WHAT: Final = "storage shared"
MARK_S: Final = 3600.0
MAX_MARK_BYTES: Final = 4096
MAX_MARKS: Final = 1000
MAX_NAMED: Final = 4
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PREFIX, _SUFFIX = ".strata-seen-", ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """A mark: its host, and how long ago the host wrote it."""

    host: str
    boot: str
    """The boot id, which distinguishes two hosts of one name."""
    root: str
    age_s: float

    def __str__(self) -> str:
        return f"{self.host[:64]} ({age(1000 * self.age_s)} ago)"


def shared_findings(root: Path, mount: Mount | None, *, marking: bool) -> Iterator[Finding]:
    """If `marking`, check by marks that other hosts see this root; else report the command for that check."""
    command = f"strata doctor --shared --storage {shlex.quote(str(root))}"
    if not marking:
        if mount is not None and mount.network:
            says = f"{root}: a run on each host proves by marks whether they see the same files"
            yield Finding(level="OK", what=WHAT, says=says, commands=(command,))
        return
    try:
        others = _meet(root)
    except OSError as error:
        yield warn(WHAT, f"{root}: no mark can be left there: {error.strerror}", f"see {PAGE}", command)
        return
    if others:
        shown = ", ".join(map(str, others[:MAX_NAMED])) + (", …" if len(others) > MAX_NAMED else "")
        yield ok(WHAT, f"{root}: the marks of others are seen here: {shown}")
        return
    hint = f"run it on another host within an hour, then here again; NFS may show a new file a minute late: {PAGE}"
    if mount is not None and not mount.network:
        hint = f"{mount.kind} is a disk of this host, which no other host sees: {PAGE}"
    yield warn(WHAT, f"{root}: no other host's mark is seen here", hint, command)


def _meet(root: Path) -> list[_Mark]:
    """Write this host's mark; return the other hosts' marks, the newest first."""
    me = {"host": socket.gethostname(), "boot": _boot(), "root": str(root.absolute())}
    own = root / f"{_PREFIX}{uuid.uuid4().hex}{_SUFFIX}"
    with own.open("xb") as file:
        file.write(json.dumps(me).encode())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(root)
    now_s = own.stat().st_mtime  # the file system's clock, which set the times of all marks
    found = []
    for each in sorted(root.glob(f"{_PREFIX}*{_SUFFIX}"))[:MAX_MARKS]:
        if each == own or (mark := _read(each, now_s)) is None:
            continue
        own_mark = {"host": mark.host, "boot": mark.boot, "root": mark.root} == me
        if own_mark or mark.age_s > MARK_S:
            with contextlib.suppress(OSError):  # another run may remove it at the same time
                each.unlink()
        else:
            found.append(mark)
    return sorted(found, key=lambda mark: mark.age_s)


def _boot() -> str:
    with contextlib.suppress(OSError, StrataError):
        return read_regular(_BOOT, most_bytes=MAX_MARK_BYTES).decode().strip()
    return ""


def _read(path: Path, now_s: float) -> _Mark | None:
    """Return the mark; None if it was removed meanwhile or is not valid."""
    try:
        fields = json_object(read_regular(path, most_bytes=MAX_MARK_BYTES).decode(), NOTE)
        age_s = max(0.0, now_s - path.stat().st_mtime)
        host, boot, root = (str(fields[name]) for name in ("host", "boot", "root"))
        return _Mark(host=host, boot=boot, root=root, age_s=age_s)
    except (OSError, ValueError, KeyError, StrataError):
        return None

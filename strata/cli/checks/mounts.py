"""Checks of a storage root's mount for `strata doctor`: file system, and mount options that break our guarantees."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.cli.checks.finding import Finding, ok, warn

PAGE: Final = "docs/storage.md"
WHAT: Final = "storage mount"
_NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|afs|ceph|lustre|gpfs|beegfs|wekafs|panfs|pvfs2|orangefs|ocfs2|gfs2|virtiofs|fuse\..+"
)
_SOFT: Final = frozenset({"soft", "softerr"})
_LOCAL_LOCKS: Final = frozenset({"local_lock=all", "local_lock=flock", "nolock", "localflock"})
_SHOWN: Final = re.compile(
    r"vers=.+|hard|soft|softerr|local_lock=.+|nolock|nconnect=.+|[rw]size=.+|ac.+=.+|noac|lookupcache=.+"
    r"|flock|localflock|noflock"
)
"""The options that docs/storage.md describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    kind: str
    source: str
    point: str
    options: frozenset[str]

    @property
    def network(self) -> bool:
        return _NETWORK.fullmatch(self.kind) is not None

    def again(self, options: str) -> tuple[str, str]:
        """Return the commands that remount the file system with other options."""
        kind, source, point = self.kind, shlex.quote(self.source), shlex.quote(self.point)
        return f"umount {point}", f"mount -t {kind} -o {options} {source} {point}"


def mount_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """Return the mount of `path`; None if it is unknown."""
    inside, best = os.path.realpath(path), None
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            fields, kinds = before.split(), after.split()
            if len(fields) < 6 or len(kinds) < 2:
                continue
            point = _plain(fields[4])
            below = inside == point or inside.startswith(f"{point.rstrip('/')}/")
            if below and (
                best is None or len(point) >= len(best.point)
            ):  # of two mounts at one point, the later one hides the earlier one
                options = frozenset(",".join((fields[5], *kinds[2:])).split(","))
                best = Mount(kind=kinds[0], source=_plain(kinds[1]), point=point, options=options)
    return best


def mount_findings(root: Path, mount: Mount | None) -> Iterator[Finding]:
    """Judge a root's mount; no finding for a local disk."""
    if mount is None:
        return
    if mount.kind in {"tmpfs", "ramfs"}:
        says = f"{root}: {mount.kind} is memory: checkpoints are lost when the host restarts"
        yield warn(WHAT, says, "name a folder of a disk", f"findmnt -T {shlex.quote(str(root))}")
    elif mount.kind == "overlay":
        says = f"{root}: a layer of a container: checkpoints are lost with the container"
        volume = f"docker run -v /data/checkpoints:{shlex.quote(str(root))} IMAGE"
        yield warn(WHAT, says, "mount a volume there", volume)
    elif mount.network:
        yield from _network(root, mount)


def _network(root: Path, mount: Mount) -> Iterator[Finding]:
    found = [
        *_found(mount, _SOFT, "{}: a write that times out is an error, or lost", "hard"),
        *_found(
            mount,
            _LOCAL_LOCKS,
            "{}: locks hold on this host alone, so a process without coordinators elsewhere is not seen",
            "flock" if mount.kind == "lustre" else "hard,local_lock=none",
        ),
    ]
    for says, options in found:
        yield warn(
            WHAT,
            f"{root}: mounted with {says}",
            f"mount it again, and change /etc/fstab: {PAGE}",
            *mount.again(options),
        )
    if not found:
        shown = ",".join(sorted(each for each in mount.options if _SHOWN.fullmatch(each)))
        yield ok(WHAT, f"{root}: {mount.source} on {mount.point}{f', {shown}' if shown else ''}")


def _found(mount: Mount, options: frozenset[str], says: str, better: str) -> Iterator[tuple[str, str]]:
    """Yield, for the first of `options` that is set, its meaning and the options to use instead."""
    if present := sorted(options & mount.options):
        yield says.format(present[0]), better


def _plain(field: str) -> str:
    """Return a field of mountinfo with its escapes decoded."""
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), field)

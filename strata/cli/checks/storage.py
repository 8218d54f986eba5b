"""What `strata doctor` looks at of a storage root: what it can do, what room it has, and whose it is.

It writes small files or objects below the root, and removes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from strata.checkpoint import root as roots
from strata.checkpoint.local_file import open_direct, sync_folder
from strata.checkpoint.opening import open_storage
from strata.checkpoint.place import Place, S3Place, parse_place
from strata.checkpoint.sink import Storage, write_whole
from strata.cli.checks.finding import Finding, fail, ok, warn
from strata.core.lineage import lineage
from strata.errors import StrataError
from strata.observe.words import size

ROOM_WANTED: Final = 1 << 30
INODES_WANTED: Final = 10_000
SYNC_S: Final = 0.05
SYNCS: Final = 9
PARTS_BYTES: Final = (8 << 20) + 1
"""The smallest object that is uploaded in parts."""
JOBS_LOOKED_AT: Final = 20
FULL_DISK: Final = "docs/operate/full-checkpoint-disk.md"
_CANNOT: Final = frozenset(
    {
        errno.EPERM,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.EINVAL,
        errno.ENOLCK,
        errno.EMLINK,
        errno.EXDEV,
        errno.EBADF,
    }
)
"""How a file system says that it does not have what it is asked for."""
_NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|afs|ceph|lustre|gpfs|beegfs|wekafs|panfs|pvfs2|orangefs|ocfs2|gfs2|virtiofs|fuse\..+"
)


def storage(where: str) -> Iterator[Finding]:
    """Look at the root at a path or URI."""
    try:
        place = parse_place(where)
    except StrataError as error:
        yield fail("storage", error.message, error.hint or "")
        return
    if isinstance(place, S3Place):
        yield from _bucket(place)
    else:
        yield from _folder(place)


# -- a folder


def _folder(root: Path) -> Iterator[Finding]:
    try:
        with tempfile.TemporaryDirectory(prefix=".strata-doctor-", dir=root) as name:
            folder = Path(name)
            lacking = [said for said, works in _ABILITIES.items() if not _does(works, folder)]
            sync_s = statistics.median(_sync_times(folder, SYNCS))
            direct = _has_direct(folder)
        room, kind = os.statvfs(root), file_system(root)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        hint = f"make room: {FULL_DISK}" if full else "make it, and let this user write there"
        yield fail("storage", f"{root}: {error.strerror}", hint)
        return
    network = " over the network" if _NETWORK.fullmatch(kind) else ""
    on = f"{kind or 'an unknown file system'}{network}"
    if lacking:
        hint = (
            "a checkpoint could not be written safely there: use another file system, or mount it otherwise"
        )
        yield fail("storage", f"{root}: {on} cannot {' and cannot '.join(lacking)}", hint)
    else:
        yield room_finding(
            f"{root}: writable",
            free_bytes=room.f_bavail * room.f_frsize,
            inodes=room.f_files,
            free_inodes=room.f_favail,
        )
    yield ok(
        "storage kind", f"{root}: {on}; direct I/O: {'yes' if direct else 'no, so the page cache is used'}"
    )
    yield sync_finding(str(root), sync_s)
    yield from _whose(root)


def room_finding(what: str, *, free_bytes: int, inodes: int, free_inodes: int) -> Finding:
    """Judge the room; a file system that counts no inodes says 0 of 0."""
    if free_bytes < ROOM_WANTED:
        return warn(
            "storage", f"{what}, {size(free_bytes)} free", f"that is little for checkpoints: {FULL_DISK}"
        )
    if inodes and free_inodes < INODES_WANTED:
        hint = f"a checkpoint takes some files for each rank; remove files that nobody needs: {FULL_DISK}"
        return warn("storage", f"{what}, {free_inodes} of {inodes} inodes free", hint)
    return ok("storage", f"{what}, {size(free_bytes)} free")


def sync_finding(what: str, median_s: float) -> Finding:
    """Judge how long a small file takes to be durable."""
    says = f"{what}: a small file is durable after {1000 * median_s:.1f} ms (median of {SYNCS})"
    if median_s > SYNC_S:
        hint = "each save waits for some such syncs, and etcd must not share this disk: it elects anew when it is slow"
        return warn("storage sync", says, hint)
    return ok("storage sync", says)


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that `path` is on; "" if it cannot be found out."""
    inside, best, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            fields = before.split()
            if len(fields) < 5 or not after:
                continue
            point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), fields[4])
            below = inside == point or inside.startswith(f"{point.rstrip('/')}/")
            if below and len(point) >= len(best):  # the last of two at one point hides the other
                best, kind = point, after.split()[0]
    return kind


def _does(works: Callable[[Path], None], folder: Path) -> bool:
    """Tell whether the file system can; `OSError` for whatever else goes wrong, as a full disk."""
    try:
        works(folder)
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    return True


def _link(folder: Path) -> None:
    (folder / "linked").hardlink_to(_written(folder, "to-link"))


def _rename(folder: Path) -> None:
    _written(folder, "to-rename").rename(folder / "renamed")


def _sync(folder: Path) -> None:
    _written(folder, "synced")
    sync_folder(folder)


def _lock(folder: Path) -> None:
    path = _written(folder, "locked")
    with path.open("r+b") as one, path.open("r+b") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise OSError(errno.ENOLCK, "two hold one lock")


_ABILITIES: Final = {
    "sync files and folders (fsync)": _sync,
    "link files (link)": _link,
    "rename files (rename)": _rename,
    "lock files (flock)": _lock,
}


def _written(folder: Path, name: str) -> Path:
    path = folder / name
    with path.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
    return path


def _sync_times(folder: Path, count: int) -> list[float]:
    taken = []
    for number in range(count):
        began = time.monotonic()
        _written(folder, f"timed-{number}")
        taken.append(time.monotonic() - began)
    return taken


def _has_direct(folder: Path) -> bool:
    fd = open_direct(folder / "direct", os.O_WRONLY | os.O_CREAT)
    if fd >= 0:
        os.close(fd)
    return fd >= 0


# -- a bucket


def _bucket(place: S3Place) -> Iterator[Finding]:
    name = f".probe.{uuid.uuid4().hex}.tmp"  # as files are called that no listing shows
    try:
        bucket = open_storage(place, nonce=_nonce, patient=False)
        try:
            first, second = bucket.create_once(name, b"x"), bucket.create_once(name, b"y")
            bucket.list()
            bucket.delete(name)
            write_whole(bucket.sink(name), bytes(PARTS_BYTES))
        finally:
            with contextlib.suppress(StrataError):
                bucket.delete(name)
    except StrataError as error:
        yield fail("storage", f"{place.uri}: {error.message}", error.hint or "")
        return
    yield ok("storage", f"{place.uri}: writable, uploads in parts work")
    if first and not second and getattr(bucket, "honours_conditions", None) is not False:
        yield ok("storage writers", f"{place.uri}: of two writers of one object the second is refused")
    else:
        yield warn(
            "storage writers",
            f"{place.uri}: the server does not honour If-None-Match",
            "use the root with coordinators only: two processes without them may not notice each other",
        )
    yield from _whose(place)


# -- whose it is


def _whose(place: Place) -> Iterator[Finding]:
    uri = str(place) if isinstance(place, Path) else place.uri
    try:
        found = open_storage(place, nonce=_nonce, patient=False)
        owner = roots.owner_of(found)
        if owner is None:
            yield ok("storage root", f"{uri}: no {roots.NAME} yet; the first save makes it")
            return
        clusters = _clusters(found) if owner == roots.COORDINATED else ""
        yield ok("storage root", f"{uri}: {_mode(owner)}{clusters}, {_identity(roots.id_of(found))}")
    except StrataError as error:
        yield fail("storage root", f"{uri}: {error.message}", error.hint or "")


def _mode(owner: str) -> str:
    found = roots.parse_owner(owner)
    return owner if found is None else f"the folder of job {found[1]} of cluster {found[0]}"


def _identity(number: str) -> str:
    if not number:
        return "without an id: whether another host sees the same one cannot be told from here"
    return f"id {number}; a host that shares it reads the same id with this command"


def _clusters(storage: Storage) -> str:
    """Say which clusters' jobs the first folders are of."""
    owners = (roots.owner_of(storage, folder=name) for name in _folders(storage))
    found = [parsed for owner in owners if owner and (parsed := roots.parse_owner(owner))]
    if not found:
        return ", no job yet"
    return f", jobs of cluster {', '.join(sorted({lineage(uid) for uid, _job in found}))}"


def _folders(storage: Storage) -> list[str]:
    return [name for name in storage.list() if name != roots.NAME][:JOBS_LOOKED_AT]


def _nonce() -> str:
    return uuid.uuid4().hex

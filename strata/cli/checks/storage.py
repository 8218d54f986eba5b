"""Checks of a storage root for `strata doctor`: required operations, free space, sync latency, owner.

The checks write small files or objects below the root, and remove them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shlex
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from strata.checkpoint.storage import root as roots
from strata.checkpoint.storage.local_file import open_direct, sync_folder
from strata.checkpoint.storage.opening import open_storage
from strata.checkpoint.storage.place import Place, S3Place, parse_place
from strata.checkpoint.storage.sink import Storage, write_whole
from strata.cli.checks.finding import Finding, fail, ok, warn
from strata.cli.checks.mounts import PAGE, Mount, mount_findings, mount_of
from strata.cli.checks.shared_root import shared_findings
from strata.core.restore.lineage import lineage
from strata.errors import StrataError
from strata.observe.words import size

MIN_FREE_BYTES: Final = 1 << 30
MIN_FREE_INODES: Final = 10_000
SYNC_S: Final = 0.05
SYNCS: Final = 9
PARTS_BYTES: Final = (8 << 20) + 1
"""The size of the smallest object that is uploaded in parts."""
JOBS_READ: Final = 20
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
"""Error codes of a file system that does not support an operation."""


def storage(where: str, *, marking: bool = False) -> Iterator[Finding]:
    """Check the root at a path or URI; `marking`: in a folder, leave a mark for other hosts and read their marks."""
    try:
        place = parse_place(where)
    except StrataError as error:
        yield fail("storage", error.message, error.hint or "")
        return
    if isinstance(place, S3Place):
        yield from _bucket(place)
    else:
        yield from _folder(place, marking=marking)


# -- a folder


def _folder(root: Path, *, marking: bool) -> Iterator[Finding]:
    mount = mount_of(root)
    try:
        with tempfile.TemporaryDirectory(prefix=".strata-doctor-", dir=root) as name:
            folder = Path(name)
            lacking = [ability for ability, works in _ABILITIES.items() if not _does(works, folder)]
            sync_s = statistics.median(_sync_times(folder, SYNCS))
            direct = _has_direct(folder)
        space = os.statvfs(root)
    except OSError as error:
        yield _unusable(root, mount, error)
        return
    kind = mount.kind if mount is not None else "an unknown file system"
    on = f"{kind} over the network" if mount is not None and mount.network else kind
    if lacking:
        yield _lacking(f"{root}: {on} cannot {' and cannot '.join(lacking)}", root, mount)
    else:
        yield free_space_finding(
            root,
            free_bytes=space.f_bavail * space.f_frsize,
            inodes=space.f_files,
            free_inodes=space.f_favail,
        )
    yield ok(
        "storage kind", f"{root}: {on}; direct I/O: {'yes' if direct else 'no, so the page cache is used'}"
    )
    yield from mount_findings(root, mount)
    yield sync_finding(root, sync_s)
    yield from shared_findings(root, mount, marking=marking)
    yield from _whose(root)


def _unusable(root: Path, mount: Mount | None, error: OSError) -> Finding:
    """Return the finding for a root that cannot be written: the cause, and the operator's first step."""
    path, says = shlex.quote(str(root)), f"{root}: {error.strerror}"
    match error.errno:
        case errno.ENOENT:
            return fail("storage", says, "make it", f"mkdir -p {path}")
        case errno.ENOSPC | errno.EDQUOT:
            return fail("storage", says, f"free some space: {FULL_DISK}", f"du -xsh {path}/*")
        case errno.EACCES | errno.EPERM:
            hint = "let this user write there: as root, or as its owner"
            return fail("storage", says, hint, f"chown {os.geteuid()}:{os.getegid()} {path}")
        case errno.EROFS if mount is not None:
            point = shlex.quote(mount.point)
            return fail("storage", says, "mount it for writing", f"mount -o remount,rw {point}")
        case errno.ESTALE if mount is not None:
            point = shlex.quote(mount.point)
            return fail("storage", says, "mount it again", f"umount -l {point}", f"mount {point}")
        case _:
            return fail("storage", says, "check what the path is", f"findmnt -T {path}", f"ls -ld {path}")


def _lacking(says: str, root: Path, mount: Mount | None) -> Finding:
    if mount is not None and mount.kind == "lustre" and not mount.options & {"flock", "localflock"}:
        return fail("storage", says, f"mount it with flock: {PAGE}", *mount.again("flock"))
    hint = (
        "a checkpoint could not be written safely there: use another file system, or mount it otherwise:"
        f" {PAGE}"
    )
    return fail("storage", says, hint, f"findmnt -T {shlex.quote(str(root))}")


def free_space_finding(root: Path, *, free_bytes: int, inodes: int, free_inodes: int) -> Finding:
    """Judge free space and free inodes; a file system that does not count inodes reports 0 of 0."""
    says, path = f"{root}: writable", shlex.quote(str(root))
    if free_bytes < MIN_FREE_BYTES:
        hint = f"that is little for checkpoints: {FULL_DISK}"
        return warn("storage", f"{says}, {size(free_bytes)} free", hint, f"du -xsh {path}/*")
    if inodes and free_inodes < MIN_FREE_INODES:
        hint = f"a checkpoint takes some files for each rank; remove unneeded files: {FULL_DISK}"
        text = f"{says}, {free_inodes} of {inodes} inodes free"
        return warn("storage", text, hint, f"du -xs --inodes {path}/*")
    return ok("storage", f"{says}, {size(free_bytes)} free")


def sync_finding(root: Path, median_s: float) -> Finding:
    """Judge how long it takes until a small file is durable."""
    says = f"{root}: a small file is durable after {1000 * median_s:.1f} ms (median of {SYNCS})"
    if median_s > SYNC_S:
        hint = "each save waits for some such syncs, and etcd must not share this disk: on a slow disk it elects a new leader"
        probe = shlex.quote(f"{root}/.strata-probe.tmp")
        return warn(
            "storage sync", says, hint, f"dd if=/dev/zero of={probe} bs=4k count=50 oflag=dsync; rm {probe}"
        )
    return ok("storage sync", says)


def _does(works: Callable[[Path], None], folder: Path) -> bool:
    """Return whether the file system supports an operation; raise `OSError` for other failures, such as a full disk."""
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
    """Rename one file over another, as an export replaces an existing file."""
    there = _written(folder, "renamed")
    _written(folder, "to-rename", b"y").replace(there)
    if there.stat().st_size != 1 or (folder / "to-rename").exists():
        raise OSError(errno.EOPNOTSUPP, "a rename does not replace")


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
    "replace files by renaming (rename)": _rename,
    "lock files (flock)": _lock,
}


def _written(folder: Path, name: str, data: bytes = b"x" * 4096) -> Path:
    path = folder / name
    with path.open("wb") as file:
        file.write(data)
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
    """Return whether a write can bypass the page cache: some file systems accept O_DIRECT but fail the write."""
    fd = open_direct(folder / "direct", os.O_WRONLY | os.O_CREAT)
    if fd < 0:
        return False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:  # direct I/O needs aligned memory
            return os.write(fd, page) == len(page)
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    finally:
        os.close(fd)


# -- a bucket


def _bucket(place: S3Place) -> Iterator[Finding]:
    name = f".probe.{uuid.uuid4().hex}.tmp"  # a suffix that no listing shows
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
        yield fail("storage", f"{place.uri}: {error.message}", error.hint or "", _listing(place))
        return
    yield ok("storage", f"{place.uri}: writable, uploads in parts work")
    if first and not second and getattr(bucket, "honours_conditions", None) is not False:
        yield ok("storage writers", f"{place.uri}: of two writers of one object the second is refused")
    else:
        yield warn(
            "storage writers",
            f"{place.uri}: the server does not honour If-None-Match",
            f"use the root with coordinators only: two processes without them may not notice each other: {PAGE}",
            f"aws s3api put-object --bucket {place.bucket} --key {shlex.quote(place.key('probe'))}"
            " --if-none-match '*'  # twice: the second must fail with 412",
        )
    yield from _whose(place)


def _listing(place: S3Place) -> str:
    """Return a command that lists the bucket with the same credentials."""
    return f"aws s3 ls {shlex.quote(place.uri + '/')}"


# -- the owner


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
        look = _listing(place) if isinstance(place, S3Place) else f"ls -la {shlex.quote(uri)}"
        yield fail("storage root", f"{uri}: {error.message}", error.hint or "", look)


def _mode(owner: str) -> str:
    found = roots.parse_owner(owner)
    return owner if found is None else f"the folder of job {found[1]} of cluster {found[0]}"


def _identity(number: str) -> str:
    if not number:
        return "without an id: this host cannot prove that another host sees the same one"
    return f"id {number}; a host that shares it reads the same id with this command"


def _clusters(storage: Storage) -> str:
    """Return, as text, the clusters that own the jobs of the first `JOBS_READ` folders."""
    owners = (roots.owner_of(storage, folder=name) for name in _folders(storage))
    found = [parsed for owner in owners if owner and (parsed := roots.parse_owner(owner))]
    if not found:
        return ", no job yet"
    return f", jobs of cluster {', '.join(sorted({lineage(uid) for uid, _job in found}))}"


def _folders(storage: Storage) -> list[str]:
    return [name for name in storage.list() if name != roots.NAME][:JOBS_READ]


def _nonce() -> str:
    return uuid.uuid4().hex

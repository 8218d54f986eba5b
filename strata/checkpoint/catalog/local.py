"""A catalog without coordinators: one process at a time, and storage is the source of truth.

A checkpoint is committed by its COMMIT marker and by nothing else. Each process that saves takes a generation of its
own, a number that is created only once in the root. A later generation counts as newer: if a process goes back to an
earlier step, its saves are newer than all saves of earlier processes. And two processes that save into one root by
mistake never share a slot (a step in a generation). While a process lives, it holds (locks) its generation's claim
file, so that no other process treats its running save as a leftover.

An Incremental refers to images of earlier attempts. It first records these attempts in its folder (`uses.json`). Then
it checks once more that its base is the newest checkpoint. A process never deletes the newest checkpoint, and before it
deletes another one, it reads all these records. So the images exist as long as the Incremental, even if two processes
use one root.

The proof of a committed checkpoint is cached: a save reads only names and new folders, so the cost of a save does not
depend on the number of retained checkpoints. Each save lists the folders again, since another process may add or
delete some. A checkpoint is proven again when a process restores it, builds on it, or lists it for its user. Each
deletion proves the newest checkpoint again, because older ones are dispensable only if the newest is good.

With a second storage, one thread of a process saves while another deletes. A save takes its slot before it writes to
its folder, and the search for leftovers lists the folders before it reads the slots. A deletion records its folder
before it looks for references to the folder; a begin records its references before it reads the recorded deletions.
So a search that finds a folder also finds its slot, and of a deletion and a begin at least one sees the other. No
storage request is made under the lock.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Collection, Sequence
from threading import Event, Lock
from typing import Final, TypeVar

from strata.checkpoint.catalog import marks
from strata.checkpoint.catalog.evidence import Folder, examine, folders
from strata.checkpoint.catalog.protocol import CheckpointAck, CheckpointMetadata, CheckpointSeal, SaveRequest
from strata.checkpoint.copies.tiers import TieredStorage
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import read_marker
from strata.checkpoint.format.uses import forget_uses, read_uses, write_uses
from strata.checkpoint.storage.sink import Storage
from strata.core.checkpoints.lifecycle import RESTORABLE_TYPES, folder_name
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import CheckpointCorrupt, Refused

_GENERATIONS = "generations"
_CLAIM: Final = re.compile(r"[0-9]{6,18}\Z")

_Found = TypeVar("_Found")
Look = Callable[[Storage, Folder], CheckpointMetadata | None]
"""Returns the result for an attempt: a good checkpoint, a corrupt one, or None if it has no marker."""

log: Final = logging.getLogger("strata.checkpoint")


class LocalCatalog:
    """The checkpoints in the root of `storage`, for the only rank of a world of one.

    With a larger `world_size` this is rank 0's catalog: rank 0 seals once every other rank has reported to rank 0
    that its part is durable. `new_id` returns a new random attempt id, `now_unix_ms` the time.
    """

    rank = 0
    by_marker = True

    def __init__(
        self,
        storage: Storage,
        *,
        new_id: Callable[[], str],
        now_unix_ms: Callable[[], int],
        world_size: int = 1,
    ) -> None:
        self.world_size = world_size
        self._storage = storage
        self._new_id = new_id
        self._now_unix_ms = now_unix_ms
        self._generation = 0
        self._lock = Lock()
        """Guards the two attributes declared next."""
        self._slots: dict[tuple[int, int], CheckpointMetadata] = {}
        self._deleting: set[str] = set()
        self._uses: dict[str, frozenset[str]] = {}
        self._proven: dict[str, CheckpointMetadata | None] = {}
        """The checkpoints that this process found committed in storage, by folder; None if it found damage."""

    # -- saving

    def folder(self, checkpoint: CheckpointMetadata) -> str:
        return folder_name(checkpoint.step, checkpoint.generation, checkpoint.id)

    def begin(self, request: SaveRequest) -> CheckpointMetadata:
        if not self._generation:
            self._generation = self._claim_generation()
        slot = request.step, self._generation
        attempt = self._new_id()
        folder = folder_name(*slot, attempt)
        record = CheckpointMetadata(
            id=attempt,
            step=request.step,
            generation=self._generation,
            path=f"{self._storage.uri}/{folder}",
            state=CheckpointState.OPEN,
            checkpoint_type=request.type,
            epoch=request.epoch,
            metadata=dict(request.metadata),
            created_unix_ms=self._now_unix_ms(),
            base_step=request.base_step,
            base_attempt=request.base_attempt,
            ranks=self.world_size,
        )
        with self._lock:
            held = self._slots.get(slot)
            if held is not None and held.state is not CheckpointState.ABORTED:
                return held
            self._slots[slot] = record
        if request.type is CheckpointType.INCREMENTAL:
            try:
                self._refer(folder, request)
            except BaseException:
                self.abort(record, "a checkpoint it refers to cannot be used")
                raise
        return record

    def ack(self, checkpoint: CheckpointMetadata, ack: CheckpointAck) -> CheckpointMetadata:
        return self._change(checkpoint, acked=frozenset(range(self.world_size)))

    def seal(self, checkpoint: CheckpointMetadata, seal: CheckpointSeal) -> CheckpointMetadata:
        return self._change(
            checkpoint,
            state=CheckpointState.COMMITTED,
            acked=frozenset(range(self.world_size)),
            sealed=True,
            manifest_digest=seal.manifest_digest,
            size_bytes=seal.size_bytes,
            model_hash=seal.model_hash,
        )

    def abort(self, checkpoint: CheckpointMetadata, reason: str) -> CheckpointMetadata:
        held = self._held(checkpoint)
        unmarked = held.state is CheckpointState.COMMITTED and self.is_deleted(held)
        if held.state is not CheckpointState.OPEN and not unmarked:
            return held
        return self._change(checkpoint, state=CheckpointState.ABORTED, reason=reason)

    def wait(
        self,
        checkpoint: CheckpointMetadata,
        until: Callable[[CheckpointMetadata], bool],
        *,
        timeout_s: float,
        cancelled: Event,
    ) -> CheckpointMetadata:
        held = self._held(checkpoint)
        assert until(held), "nobody else acts on a catalog of one rank"
        return held

    def go_back(self) -> None:
        """Release the generation, and take a new one with the next save.

        Callers use it after restoring an older step, and after the last save.
        """
        if self._generation:
            self._storage.release(_claim(self._generation))
        self._generation = 0

    # -- reading

    def all(self) -> list[CheckpointMetadata]:
        """Return all checkpoints as storage proves them: COMMITTED, or CORRUPT with the reason.

        An attempt without a marker is no checkpoint and is left out.
        """
        return self._each(self._prove)

    def kept(self) -> list[CheckpointMetadata]:
        """Return all checkpoints for retention: the folders are listed now, but cached proofs are used."""
        return self._each(self._recall)

    def latest(self) -> CheckpointMetadata | None:
        """Return the newest checkpoint. A checkpoint of this process counts as newer than any in the far storage.

        A checkpoint that this process has proven before is not proven again.
        """
        return self._latest(self._recall)

    def _latest(self, look: Look) -> CheckpointMetadata | None:
        own = any(_is_whole(c) and c.generation == self._generation for c in self._known())
        if own and isinstance(self._storage, TieredStorage):
            # only the near storage is read, since another process may save there; no save waits for the far one
            near = self._newest(self._storage.near, look)
            if near is not None:
                return near
        return self._newest(self._storage, look)

    def _newest(
        self, storage: Storage, look: Look, corrupt: list[CheckpointMetadata] | None = None
    ) -> CheckpointMetadata | None:
        """Return the newest checkpoint from which a training may begin; add skipped corrupt ones to `corrupt`."""

        def newest(there: Sequence[Folder]) -> CheckpointMetadata | None:
            if corrupt is not None:
                corrupt.clear()
            for folder in sorted(there, key=lambda f: f.order, reverse=True):
                found = look(storage, folder)
                if found is not None and _is_whole(found):
                    return dataclasses.replace(_with_marks(storage, [found])[0], latest=True)
                if corrupt is not None and found is not None and found.state is CheckpointState.CORRUPT:
                    corrupt.append(found)
            return None

        return _in_listing(storage, newest)

    def _each(self, look: Look) -> list[CheckpointMetadata]:
        def proven(there: Sequence[Folder]) -> list[CheckpointMetadata]:
            self._forget({folder.name for folder in there})
            return [checkpoint for f in there if (checkpoint := look(self._storage, f)) is not None]

        found = _in_listing(self._storage, proven)
        return _marked_latest(sorted(_with_marks(self._storage, found), key=lambda c: c.order))

    # -- evidence

    def _prove(self, storage: Storage, folder: Folder) -> CheckpointMetadata | None:
        """Examine an attempt in a storage now and return the result; cache it if the attempt is committed."""
        found = examine(storage, folder)
        if found is None:
            self._proven.pop(folder.name, None)
        else:
            self._proven[folder.name] = found if found.state is CheckpointState.COMMITTED else None
        return found

    def _recall(self, storage: Storage, folder: Folder) -> CheckpointMetadata | None:
        """Return the cached result of examining an attempt, else examine it now."""
        try:
            known = self._proven[folder.name]
        except KeyError:
            known = self._own(storage, folder)
        return known or self._prove(storage, folder)

    def _own(self, storage: Storage, folder: Folder) -> CheckpointMetadata | None:
        """Return an attempt that this process committed, if its marker is in place; else None."""
        with self._lock:
            held = self._slots.get((folder.step, folder.generation))
        if held is None or held.id != folder.attempt or held.state is not CheckpointState.COMMITTED:
            return None
        try:
            marker = read_marker(storage, folder.name)
        except CheckpointCorrupt:
            return None
        if marker is None or marker.manifest_digest != held.manifest_digest:
            return None
        self._proven[folder.name] = held
        return held

    def _forget(self, there: Collection[str]) -> None:
        """Drop removed folders from the cache: no later attempt has the same name."""
        for name in list(self._proven):  # a copy of the keys, since another thread may add some meanwhile
            if name not in there:
                self._proven.pop(name, None)

    def restore_point(self) -> CheckpointMetadata | None:
        """Return the newest good checkpoint, and log newer corrupt ones; None if there never was a checkpoint.

        `CheckpointCorrupt` if there are checkpoints but no good one: a run must not begin from scratch then.
        """
        corrupt: list[CheckpointMetadata] = []
        found = self._newest(self._storage, self._prove, corrupt)
        for checkpoint in corrupt:
            log.error("step %d is corrupt, trying the one before: %s", checkpoint.step, checkpoint.reason)
        if found is None and corrupt:
            raise CheckpointCorrupt(
                f"none of the checkpoints is good; of the newest: {corrupt[0].reason}",
                hint="put the damaged file back from a copy; if there is none, use another storage path: training then starts from nothing",
            )
        return found

    def before(self, checkpoint: CheckpointMetadata) -> CheckpointMetadata | None:
        older = [c for c in self.all() if c.order < checkpoint.order and _is_whole(c)]
        return older[-1] if older else None

    def is_deleted(self, checkpoint: CheckpointMetadata) -> bool:
        return not self._storage.exists(f"{self.folder(checkpoint)}/{MARKER}")

    # -- deleting

    def delete(self, checkpoint: CheckpointMetadata) -> None:
        folder = self.folder(checkpoint)
        with self._lock:
            self._deleting.add(folder)
        try:
            self._check_unneeded(checkpoint, folder)
        except BaseException:
            with self._lock:
                self._deleting.discard(folder)
            raise

    def _check_unneeded(self, checkpoint: CheckpointMetadata, folder: str) -> None:
        newest = self._newest(self._storage, self._prove)
        known = {c.id: c for c in self.kept()}
        held = known.get(checkpoint.id, checkpoint)
        if newest is None or newest.id == held.id:
            raise Refused(f"step {held.step} is the newest checkpoint there is")
        if held.pinned:
            raise Refused(f"step {held.step} is pinned", hint="unpin it first")
        if held.tags:
            raise Refused(f"step {held.step} has the tag {held.tags[0]}", hint="remove the tag first")
        if broken := marks.tags(self._storage).broken:
            name = min(broken)
            raise Refused(
                f"the tag {name}, which may name step {held.step}, cannot be read: {broken[name]}",
                hint=f"set it again, or remove it: strata checkpoints untag {name}",
            )
        if (user := self._user_of(folder)) is not None:
            raise Refused(f"step {held.step} is used by {user}")

    def deleted(self, checkpoint: CheckpointMetadata) -> None:
        slot = checkpoint.step, checkpoint.generation
        with self._lock:
            self._deleting.discard(self.folder(checkpoint))
            if slot in self._slots and self._slots[slot].id == checkpoint.id:
                del self._slots[slot]

    def leftovers(self) -> list[str]:
        """Return the folders of attempts that ended without a marker, including this process's.

        A folder is not a leftover if a checkpoint refers to its images: a copy of a checkpoint brings the images that
        it refers to. A folder of a later generation, or of a generation that a process holds, is no leftover either:
        its process may be saving now. A process holds its generation before it makes a folder, so holds are checked
        after folders are listed.
        """
        newest = self._generation or self._newest_generation()
        there = folders(self._storage.list())
        open_ids = {c.id for c in self._known() if c.state is not CheckpointState.ABORTED}
        left = [
            folder.name
            for folder in there
            if folder.generation <= newest
            and not self._proven.get(folder.name)
            and folder.attempt not in open_ids
            and (
                folder.generation == self._generation or not self._storage.is_held(_claim(folder.generation))
            )
            and not self._storage.exists(f"{folder.name}/{MARKER}")
        ]
        # a copied checkpoint may refer to a folder that holds nothing but images: such a folder is in use
        return [name for name in left if self._is_unused(name)]

    # -- inside

    def _known(self) -> list[CheckpointMetadata]:
        """Return the saves of this process, finished or not."""
        with self._lock:
            return list(self._slots.values())

    def _refer(self, folder: str, request: SaveRequest) -> None:
        """Record the references of the attempt in `folder`; `Refused` unless its base is the newest checkpoint.

        If another process later commits a newer checkpoint and then deletes the base, that process sees this record.
        """
        write_uses(self._storage, folder, request.uses)
        newest = self._latest(self._prove)
        with self._lock:
            deleting = self._deleting & request.uses
        if newest is None or newest.id != request.base_attempt or deleting:
            forget_uses(self._storage, folder)
            raise Refused(
                f"an attempt it would use is being deleted: {min(deleting)}"
                if deleting
                else f"attempt {request.base_attempt} is not the newest checkpoint any more"
            )

    def _user_of(self, folder: str) -> str | None:
        """Return an attempt that refers to images in `folder`, or None; `Refused` if an attempt's record is damaged."""
        for name in [other.name for other in folders(self._storage.list()) if other.name != folder]:
            if name not in self._uses:
                try:
                    uses = read_uses(self._storage, name)
                except CheckpointCorrupt as error:
                    raise Refused(f"the attempts that {name} uses are not known: {error.message}") from error
                if not uses and not self._storage.exists(f"{name}/{MARKER}"):
                    continue  # not cached: the attempt may still record its references
                self._uses[name] = uses
            if folder in self._uses[name]:
                return name
        return None

    def _is_unused(self, folder: str) -> bool:
        try:
            return self._user_of(folder) is None
        except Refused:
            return False

    def _claim_generation(self) -> int:
        generation = self._newest_generation() + 1
        body = json.dumps({"created_unix_ms": self._now_unix_ms()}).encode()
        while not self._storage.create_once(_claim(generation), body):
            generation += 1
        self._storage.hold(_claim(generation))
        return generation

    def _newest_generation(self) -> int:
        taken = [int(name) for name in self._storage.list(_GENERATIONS) if _CLAIM.match(name)]
        seen = [folder.generation for folder in folders(self._storage.list())]
        return max([0, *taken, *seen])

    def _held(self, checkpoint: CheckpointMetadata) -> CheckpointMetadata:
        with self._lock:
            return self._slots[checkpoint.step, checkpoint.generation]

    def _change(self, checkpoint: CheckpointMetadata, **changes: object) -> CheckpointMetadata:
        with self._lock:
            slot = checkpoint.step, checkpoint.generation
            self._slots[slot] = dataclasses.replace(self._slots[slot], **changes)  # type: ignore[arg-type]  # named fields
            return self._slots[slot]


def _in_listing(storage: Storage, find: Callable[[Sequence[Folder]], _Found]) -> _Found:
    """Return the result of `find` on the folders of a storage.

    If the result is empty and the folders have changed meanwhile, `find` is repeated: another process may have
    committed a newer checkpoint, and removed the listed older one.
    """
    there = folders(storage.list())
    while not (found := find(there)):
        before, there = there, folders(storage.list())
        if {folder.name for folder in there} == {folder.name for folder in before}:
            break
    return found


def _with_marks(storage: Storage, found: list[CheckpointMetadata]) -> list[CheckpointMetadata]:
    if not found:
        return []
    pinned, tags = marks.pins(storage), marks.tags(storage)
    for why in tags.broken.values():
        log.error("a tag cannot be read, so no checkpoint is deleted until it is set again: %s", why)
    return [
        dataclasses.replace(c, pinned=c.id in pinned, tags=tags.of.get(c.id, ()))
        if c.id in pinned or c.id in tags.of
        else c
        for c in found
    ]


def _is_whole(checkpoint: CheckpointMetadata) -> bool:
    """Return whether a training may begin from this checkpoint."""
    return checkpoint.state is CheckpointState.COMMITTED and checkpoint.checkpoint_type in RESTORABLE_TYPES


def _claim(generation: int) -> str:
    return f"{_GENERATIONS}/{generation:06d}"


def _marked_latest(ordered: list[CheckpointMetadata]) -> list[CheckpointMetadata]:
    for index in reversed(range(len(ordered))):
        if _is_whole(ordered[index]):
            ordered[index] = dataclasses.replace(ordered[index], latest=True)
            break
    return ordered

"""Evidence from storage roots about a cluster's checkpoints, independent of any catalog: the input of a restore.

A root is *searched* if `roots` names it. The folder of a checkpoint in a searched root is in one of four states:
complete with manifests and images (`checkpoints`), damaged (`damaged`), not readable (`unread`), or absent. Absence
is proven only if the job's folder was listed (`listed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from strata.core.checkpoints.paths import attempt_path
from strata.core.ids import AttemptId
from strata.core.kv.records import CheckpointRecord, CheckpointType

MAX_GENERATION = 10**9
"""Folders of later generations are ignored: a key could hold such a number, but not the next generations'."""

NO_FOLDER = "the root has no folder of this job with a strata.json of this cluster"
"""The default reason why a job's folder in a searched root was not listed."""

Slot = tuple[int, int, AttemptId]
"""Step, generation and attempt, from which the keys of a checkpoint are built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint whose manifests and images, including those of its bases, are in the searched root `root`.

    `marked`: its COMMIT marker exists, so storage alone proves the commit. Without a marker the checkpoint counts
    only if a record says that it was committed with this `manifest_digest`. `uses`: the attempts whose images it
    uses.
    """

    job: str
    root: str
    step: int
    generation: int
    attempt: AttemptId
    type: CheckpointType
    ranks: int
    manifest_digest: str
    epoch: int = 0
    size_bytes: int = 0
    model_hash: str = ""
    created_unix_ms: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    predecessor: tuple[int, int, str] | None = None
    uses: tuple[Slot, ...] = ()
    marked: bool = True

    @property
    def path(self) -> str:
        """The URI of the checkpoint's folder, as in its record."""
        return attempt_path(self.root, self.job, self.step, self.generation, self.attempt)

    @property
    def where(self) -> Slot:
        return self.step, self.generation, self.attempt

    @property
    def order(self) -> tuple[int, int]:
        return self.generation, self.step


class Seen(Enum):
    """The result of a search for one folder."""

    PROVEN = "proven"
    DAMAGED = "damaged"
    UNREAD = "unread"
    ABSENT = "absent"
    NOT_SEARCHED = "not searched"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The complete result of a search of storage roots.

    `roots`: the URIs of the searched roots. `listed`: the URIs of the jobs' folders in these roots that were
    listed. `damaged` and `unread`: the reason, by the URI of a checkpoint's or a job's folder. `generations`: by
    job, the greatest generation that any folder names.
    """

    roots: tuple[str, ...] = ()
    listed: frozenset[str] = frozenset()
    checkpoints: tuple[FoundCheckpoint, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    generations: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def by_path(self) -> Mapping[str, FoundCheckpoint]:
        return {checkpoint.path: checkpoint for checkpoint in self.checkpoints}

    @cached_property
    def jobs(self) -> Mapping[str, tuple[FoundCheckpoint, ...]]:
        """The checkpoints that storage alone proves committed, by job."""
        found: dict[str, list[FoundCheckpoint]] = {job: [] for job in self.generations}
        for checkpoint in self.checkpoints:
            if checkpoint.marked:
                found.setdefault(checkpoint.job, []).append(checkpoint)
        return {job: tuple(checkpoints) for job, checkpoints in found.items()}

    def root_of(self, path: str) -> str | None:
        """Return the searched root that contains `path`, or None."""
        return next((root for root in self.roots if path.startswith(f"{root.rstrip('/')}/")), None)

    def seen(self, path: str, record: CheckpointRecord) -> tuple[Seen, str]:
        """Return the state of `record`'s copy in the folder `path`, and why it is damaged or unread."""
        if self.root_of(path) is None:
            return Seen.NOT_SEARCHED, ""
        proof = self.by_path.get(path)
        if proof is not None and record.manifest_digest in {"", proof.manifest_digest}:
            return Seen.PROVEN, ""
        if proof is not None:
            return Seen.DAMAGED, "its manifest is not the one that was committed"
        if path in self.damaged:
            return Seen.DAMAGED, self.damaged[path]
        if path in self.unread:
            return Seen.UNREAD, self.unread[path]
        if (folder := path.rpartition("/")[0]) not in self.listed:
            return Seen.UNREAD, self.unread.get(folder, NO_FOLDER)
        return Seen.ABSENT, ""

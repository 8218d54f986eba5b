"""Records about checkpoints: references, readers, copies, corruption reports, tags, retention, held saves.

The records of the checkpoints themselves, of `latest` and of pins are in `core.kv.records`. The same functions
encode and decode the records of both modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.core.ids import AttemptId, WorkerId
from strata.core.kv.records import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A user of the attempt that this key names: the slot of an Incremental, or of another job's fork."""

    step: int
    generation: int
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The process that reads a checkpoint; the key is attached to its lease."""

    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A rank's part, or the manifest and the marker, in the folder `path` of a further tier.

    `digest`: the digest of the rank's manifest, or of the global manifest.
    """

    digest: str
    path: str
    shared: bool = True
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionReport:
    """A host's finding from a read of one tier, past every cache: damage (`corrupt`), or bytes it could not read.

    `object`: the object that differs from the saved data, as "folder/file"; "": unknown which object.
    `found_generation`, `found_step`: the checkpoint that was read; newer ones may not need these bytes.
    `generation`: the generation that could not begin because of the damage; 0: none waited for these bytes.
    `refuted_by`: the host that read this object and found it as it was saved. `incarnation`: the newest
    worker of the reporting host at that time.
    """

    corrupt: bool
    reason: str
    object: str = ""
    found_generation: int = 0
    found_step: int = 0
    generation: int = 0
    refuted_by: str = ""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """The checkpoint that a tag names."""

    step: int
    generation: int
    attempt: AttemptId
    who: str = ""

    @property
    def where(self) -> tuple[int, int, AttemptId]:
        return self.step, self.generation, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Retention rules: a checkpoint stays if any rule selects it.

    A value of 0: no such rule. Without rules all stay. `latest`: select this many of the newest. `every_steps`:
    select the first checkpoint at or after each multiple. `best`: select this many with the lowest number under
    `metric` in their metadata, or with the highest if `highest` is set. `age_ms`: select checkpoints younger than
    this.
    """

    latest: int = 0
    every_steps: int = 0
    best: int = 0
    metric: str = ""
    highest: bool = False
    age_ms: int = 0

    @property
    def everything(self) -> bool:
        return not (self.latest or self.every_steps or self.best or self.age_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A job's retention policy, which the leader applies; `tiers`: exceptions, by the tier's name."""

    keep: Keep
    tiers: Mapping[str, Keep] = field(default_factory=dict)
    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """The next generation begins from this checkpoint; until then nothing is saved."""

    step: int
    attempt: AttemptId
    record_generation: int
    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """An attempt whose slot another attempt took: its bytes are still in storage, and must be removed."""

    step: int
    generation: int
    tiers: Mapping[str, Tier] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesHeld:
    """A rank had trained to `step` and could not save this step, for a reason that may pass."""

    step: int
    rank: int
    worker: WorkerId
    host: str
    reason: str

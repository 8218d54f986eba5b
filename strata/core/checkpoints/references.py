"""What lies around the records of the catalog: references, readers, copies, tags, suspicions, policy.

The records of the checkpoints themselves, with `latest` and the pins, are in `core.kv.records`; encoded
and decoded are both kinds by the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.core.ids import AttemptId, WorkerId
from strata.core.kv.records import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Who uses the attempt that this lies under: the slot of an Incremental, or of another job's fork."""

    step: int
    generation: int
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who is reading a checkpoint; the key hangs on a lease."""

    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A rank's part, or the manifest and the marker, lie in the folder `path` of a further tier.

    `digest` is that of the rank's manifest, or of the global one.
    """

    digest: str
    path: str
    shared: bool = True
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionReport:
    """What a host found on one tier, past every cache: damage (`corrupt`), or that it could not read.

    `object`: the one that it read and that differs, as "folder/file"; "": it is not known which.
    `found_generation`, `found_step`: the checkpoint that was read; newer ones need not have these bytes.
    `generation`: the one that could not begin because of it, 0 when nothing waited for these bytes.
    `refuted_by`: the host that read this object and found it as it was saved. `incarnation`: the newest of
    the reporting host's own workers then.
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
    """The checkpoint that a name stands for."""

    step: int
    generation: int
    attempt: AttemptId
    who: str = ""

    @property
    def where(self) -> tuple[int, int, AttemptId]:
        return self.step, self.generation, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What stays: a checkpoint that any one of these rules wants. 0: no such rule; none: all stay.

    `latest`: so many of the newest. `every_steps`: the first one at or after each multiple. `best`:
    so many of those with the lowest (`highest`: highest) number under `metric` in their metadata.
    `age_ms`: those that are younger.
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
    """What the leader leaves of a job's checkpoints; `tiers` are the exceptions, by name."""

    keep: Keep
    tiers: Mapping[str, Keep] = field(default_factory=dict)
    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """The next generation begins from this one; until then nothing is saved."""

    step: int
    attempt: AttemptId
    record_generation: int
    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """An attempt whose slot another one took: nothing but its bytes is left, and they shall go."""

    step: int
    generation: int
    tiers: Mapping[str, Tier] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesHeld:
    """A rank had trained to `step` and could not save it, for a reason that time may heal."""

    step: int
    rank: int
    worker: WorkerId
    host: str
    reason: str

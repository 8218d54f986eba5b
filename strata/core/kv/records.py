"""What the values hold: one frozen dataclass a key, written as JSON with the schema field `v`.

`encode` and `decode` (`core.kv.codec`) are the only way in and out. Others: `core.checkpoints.references`, `core.*_record`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from strata.core.ids import AttemptId, BootId, InstanceId, ReplicaId, WorkerId
from strata.core.kv.codec import MAX_VALUE_BYTES, SCHEMA, PoisonRecord, b64, decode, encode, unb64

__all__ = ["MAX_VALUE_BYTES", "SCHEMA", "PoisonRecord", "b64", "decode", "encode", "unb64"]
"""What is at home in `core.kv.codec` and belongs to every record; the records are public by their names."""


class Phase(Enum):
    """Where a job stands."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"


class StopAction(Enum):
    """Who leaves when ranks stop: nobody, some members, or all. PAUSE is asked for only: a notice has SCALE and `pause`."""

    SCALE = "scale"
    DRAIN = "drain"
    PREEMPT = "preempt"
    PAUSE = "pause"


class CheckpointType(Enum):
    """Which part of the state a checkpoint holds, and against what. `Full` is another name of `FULL`, and so on."""

    FULL = Full = "full"
    INCREMENTAL = Incremental = "incremental"
    OPTIMIZER_ONLY = OptimizerOnly = "optimizer_only"
    MODEL_ONLY = ModelOnly = "model_only"


class CheckpointState(Enum):
    """OPEN ends as COMMITTED or ABORTED; COMMITTED may turn CORRUPT or DELETING."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    DELETING = "deleting"
    CORRUPT = "corrupt"
    PREPARED = "prepared"


class TierState(Enum):
    """PRESENT may be read. It ends as CORRUPT or DELETING; DELETING ends as REMOVED, for ever."""

    PRESENT = "present"
    CORRUPT = "corrupt"
    DELETING = "deleting"
    REMOVED = "removed"


class BarrierResult(Enum):
    """How a round of a barrier ended."""

    RELEASED = "released"
    TIMED_OUT = "timed_out"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUid:
    uid: str
    replaced: tuple[str, ...] = ()
    """The uids of other clusters whose place a restore took: their replicas and members belong to this one now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    instance: InstanceId
    replica: ReplicaId
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One running coordinator. `address` is its gRPC address for clients and peers."""

    instance: InstanceId
    address: str
    http_address: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The limits of a job. Workers are members: agents, of nodes or of standalone processes.

    `max_generations`: with so many generations ended by a failure the job fails; 0: no limit.
    """

    min_workers: int = 1
    max_workers: int = 1
    settle_s: float = 2.0
    max_no_progress_generations: int = 3
    max_generations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standbys:
    """Registered members that the world has no place for."""

    workers: tuple[WorkerId, ...] = ()
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the ranks of a job run. Equal if program and digest are; `arguments` is for people.

    `program`: the script's absolute path, or a program's or module's name. `digest`: of all arguments.
    """

    program: str
    arguments: str = ""
    digest: str = ""

    @property
    def text(self) -> str:
        return f"{self.program} {self.arguments}".rstrip()

    def same_as(self, other: Command) -> bool:
        """Tell whether both run the same program with the same arguments."""
        return (self.program, self.digest) == (other.program, other.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """The run that a job belongs to, and what it runs. "" and None: nobody said it."""

    run_id: str = ""
    command: Command | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPhase:
    """`attempt`: the newest attempt at the job that anybody registered for, where a launcher counts them.

    `ended_unix_ms`: when a job that is done or has failed ended, for people; 0: unknown. `early`: it failed
    before a first step and a first checkpoint, or by a rank that ended with 78; the next run of its name starts it again.
    """

    phase: Phase
    reason: str
    epoch: int = 0
    attempt: int = 0
    ended_unix_ms: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A member. Its incarnation is the create_revision of its key.

    `cannot_restart`: when a generation that it trained in has ended it ends, and nobody starts it again.
    """

    boot: BootId
    served_by: InstanceId
    host: str = ""
    slots: int = 1
    devices: tuple[str, ...] = ()
    pid: int = 0
    cannot_restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker's place in one generation: ranks first_rank .. first_rank + slots - 1."""

    worker: WorkerId
    incarnation: int
    group_rank: int
    slots: int
    first_rank: int

    @property
    def ranks(self) -> range:
        """The global ranks that it runs."""
        return range(self.first_rank, self.first_rank + self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChunk:
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """The committed checkpoint that a generation begins from."""

    step: int
    attempt: AttemptId
    record_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNotice:
    """Asks the ranks of one generation to agree on a step, to save it and to stop there.

    `workers`: who leaves by a DRAIN. `grace_ms`: how long the save may take from now on, 0: stop without one; of a SCALE
    without `pause`: how long the agreement may. `since`: members that came later are not meant; 0: than this was written.
    """

    action: StopAction
    reason: str
    workers: tuple[WorkerId, ...] = ()
    grace_ms: int = 0
    since: int = 0
    pause: bool = False

    @property
    def has_deadline(self) -> bool:
        """Whether the save has to be done within the grace: to scale, it has all the time that a commit takes."""
        return self.pause or self.action is not StopAction.SCALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Anew:
    """The job was begun anew: what its generations up to this one have saved is given up."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Members that were asked to leave, and are given no place: those that the notice names, or all.

    Whoever registered after `revision` is not meant. `written`: the revision at which the notice got
    its last form, and its time began.
    """

    notice: StopNotice
    revision: int
    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A member that cannot restart, of an earlier generation that had begun: it gets no place any more."""

    worker: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A member on trial: its failure ended `crashes` generations in a row, the last as seen at `revision`."""

    worker: WorkerId
    crashes: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldHead:
    """The current generation. `size` counts ranks; `members` 0 is a forming world.

    `epoch` names the chunks that belong to it. `fruitless` counts the generations in a row,
    this one excluded, that a failure ended before they committed a checkpoint; `failures` those
    that a failure ended at all. `began`: a generation before this one may have made a step, as it did not
    end by a failure in its first seconds. `asked` has those of earlier generations who have not left yet;
    `spent` those that cannot restart, `newcomers` who is on trial.
    """

    generation: int
    epoch: int
    members: int
    size: int
    reason: str
    chunks: int = 0
    restore: RestorePoint | None = None
    no_progress: int = 0
    failures: int = 0
    began: bool = False
    asked: tuple[Asked, ...] = ()
    spent: tuple[Spent, ...] = ()
    newcomers: tuple[Newcomer, ...] = ()

    @property
    def forming(self) -> bool:
        return self.members == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """Why a generation began, and what came of it; for people, and to learn how often one fails.

    `failure`: a failure ended the one before. `committed_step` is its newest checkpoint, written
    when it has ended.
    """

    epoch: int
    members: int
    size: int
    reason: str
    began_unix_ms: int
    failure: bool = False
    restore: RestorePoint | None = None
    committed_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """Why a rank ended before its time: exit code, or minus the signal.

    `early`: its process failed by itself within its first seconds, before a step.
    """

    reason: str
    worker: WorkerId
    code: int | None = None
    early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDone:
    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStopped:
    """A rank that ended as a notice asked it to."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierOutcome:
    """How the round ended. `payloads` maps a rank to base64; chunked beside it when large."""

    generation: int
    round: int
    result: BarrierResult
    digest: str
    reason: str
    missing: tuple[int, ...] = ()
    payloads: Mapping[str, str] = field(default_factory=dict)
    payload_chunks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadChunk:
    payloads: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierFloor:
    """The lowest round that may still be open is the one after `round`."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierArrived:
    """A hint for people: who is still missing. No decision reads it."""

    arrived: int
    expected: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """A dataset is `shards` numbered files; `uri` names one when formatted with `shard=i`."""

    shards: int
    uri: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Whose shards are whose, as of one assignment epoch.

    The owners follow from `workers`, `shards` and the published ring (`core.datasets.ring`), so the record
    stays small, and any client in any language can compute them. Exceptions are written down:
    `seats` has the workers that sit on the ring under another name than their own, `moved` the
    shards that are not where the ring has them, by owner.
    """

    assign_epoch: int
    epoch: int
    generation: int
    shards: int
    workers: tuple[WorkerId, ...]
    ring: str = "ring-v1"
    seats: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One copy of a checkpoint: the URI of its folder. `shared`: it survives the loss of a host."""

    path: str
    state: TierState = TierState.PRESENT
    shared: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The checkpoint of another job that a forked record stands for; its bytes are that one's."""

    job: str
    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One slot of the catalog: (step, generation). `path` is the URI of its folder.

    `ranks` is the number of acks that complete it, besides the seal. `tiers` has its copies by the
    name of the tier, that at `path` among them.
    """

    attempt: AttemptId
    step: int
    generation: int
    type: CheckpointType
    state: CheckpointState
    ranks: int
    path: str
    epoch: int = 0
    size_bytes: int = 0
    model_hash: str = ""
    manifest_digest: str = ""
    created_unix_ms: int = 0
    base_step: int | None = None
    base_attempt: AttemptId | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    origin: Origin | None = None

    @property
    def where(self) -> tuple[int, int, AttemptId]:
        """What the keys of its attempt are built of."""
        return self.step, self.generation, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """A rank's part is durable: the digest of its manifest, the bytes it wrote, and on which host."""

    digest: str
    size_bytes: int
    worker: WorkerId
    incarnation: int
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The global manifest is durable: its digest and the sum of all bytes."""

    digest: str
    size_bytes: int
    worker: WorkerId
    incarnation: int
    model_hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest checkpoint by (generation, step), as the protocols order them.

    `generation` is the one it counts under: that of its record, or of the later world that
    restored from it.
    """

    generation: int
    step: int
    attempt: AttemptId
    record_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    who: str
    why: str

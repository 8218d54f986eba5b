"""The records stored as values: a frozen dataclass per key. `core.kv.codec` encodes them as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from strata.core.ids import AttemptId, BootId, InstanceId, ReplicaId, WorkerId
from strata.core.kv.codec import MAX_VALUE_BYTES, SCHEMA, PoisonRecord, b64, decode, encode, unb64

__all__ = ["MAX_VALUE_BYTES", "SCHEMA", "PoisonRecord", "b64", "decode", "encode", "unb64"]
"""Re-exports of `core.kv.codec`, which every user of records needs; the records are public by their names."""


class Phase(Enum):
    """The phase of a job."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"


class StopAction(Enum):
    """Which members leave at a stop: none, some or all. Only requests have PAUSE; its notice is a SCALE with `pause`."""

    SCALE = "scale"
    DRAIN = "drain"
    PREEMPT = "preempt"
    PAUSE = "pause"


class CheckpointType(Enum):
    """The part of the state that a checkpoint holds, and whether it needs a base. `Full` is an alias of `FULL`."""

    FULL = Full = "full"
    INCREMENTAL = Incremental = "incremental"
    OPTIMIZER_ONLY = OptimizerOnly = "optimizer_only"
    MODEL_ONLY = ModelOnly = "model_only"


class CheckpointState(Enum):
    """OPEN becomes COMMITTED or ABORTED, COMMITTED may become CORRUPT, all but OPEN may become DELETING."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    DELETING = "deleting"
    CORRUPT = "corrupt"
    PREPARED = "prepared"


class TierState(Enum):
    """PRESENT may be read. It becomes CORRUPT or DELETING; DELETING becomes REMOVED, which is final."""

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
    """The uids of clusters that a restore replaced: their replicas and members now belong to this cluster."""


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

    `max_generations`: the job fails once a failure has ended this many generations; 0: no limit.
    """

    min_workers: int = 1
    max_workers: int = 1
    settle_s: float = 2.0
    max_no_progress_generations: int = 3
    max_generations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standbys:
    """Registered members that have no place in the world."""

    workers: tuple[WorkerId, ...] = ()
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command of a job's ranks.

    `program`: the script's absolute path, or the name of a program or module. `digest`: a checksum of all
    arguments. `arguments` is for display: two commands are the same if `program` and `digest` are equal.
    """

    program: str
    arguments: str = ""
    digest: str = ""

    @property
    def text(self) -> str:
        return f"{self.program} {self.arguments}".rstrip()

    def same_as(self, other: Command) -> bool:
        """Return whether both run the same program with the same arguments."""
        return (self.program, self.digest) == (other.program, other.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """The run that a job belongs to, and its command. "" and None mean unknown."""

    run_id: str = ""
    command: Command | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPhase:
    """A job's phase and its reason.

    `attempt`: the newest attempt at the job that a member registered for, if a launcher counts attempts.
    `ended_unix_ms`: when the job became DONE or FAILED, for people; 0: unknown. `early`: the job failed before its
    first step and first checkpoint, or by exit code 78; the next run under the job's name starts the job again.
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

    `cannot_restart`: the member's process exits after the generation that it trained in, and nothing starts it again.
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
        """The global ranks that the member runs."""
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
    """A request to the ranks of one generation to agree on a step, save it and stop after it.

    `workers`: the members that a DRAIN asks to leave. `grace_ms`: the time for the save, from the write of the
    notice; 0: stop without a save. In a SCALE without `pause`, `grace_ms` is the time for the agreement. `since`:
    the notice does not apply to members that registered after this revision; 0: the revision of the notice itself.
    """

    action: StopAction
    reason: str
    workers: tuple[WorkerId, ...] = ()
    grace_ms: int = 0
    since: int = 0
    pause: bool = False

    @property
    def has_deadline(self) -> bool:
        """Whether the save must finish within the grace; a save before a SCALE may take as long as a commit takes."""
        return self.pause or self.action is not StopAction.SCALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Anew:
    """The job began again from nothing: checkpoints up to this generation are superseded."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """A request to leave: the members that the notice names, or all members, get no place any more.

    Members that registered after `revision` are excluded. `written`: the revision at which the notice got its final
    form; the grace counts from that write.
    """

    notice: StopNotice
    revision: int
    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A member that cannot restart and has trained in an earlier generation; it gets no place any more."""

    worker: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A member on trial: its failures ended `crashes` generations in a row, the last failure was seen at `revision`."""

    worker: WorkerId
    crashes: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldHead:
    """The current generation. `size` counts ranks. With `members` 0 the world is *forming*: it waits for members.

    `epoch` and `generation` name the folder of its members' chunks. `no_progress`: the number of consecutive
    generations, up to the previous one, that a failure ended without a committed checkpoint. `failures`: the number
    of generations that a failure ended. `began`: an earlier generation may have made a step, because no failure
    ended it in its first seconds. `leave_requests`: requests to leave, sent to members of earlier generations that
    are still registered. `spent`: members that cannot restart. `newcomers`: members on trial.
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
    leave_requests: tuple[LeaveRequest, ...] = ()
    spent: tuple[Spent, ...] = ()
    newcomers: tuple[Newcomer, ...] = ()

    @property
    def forming(self) -> bool:
        return self.members == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """Why a generation began, and its result; for people, and for estimating how often generations fail.

    `failure`: a failure ended the previous generation. `committed_step`: the newest checkpoint that this generation
    committed, written after the generation has ended.
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
    """Why a rank ended early. `code`: its exit code, or minus the number of the signal that ended it.

    `early`: the rank's process failed by itself within its first seconds, before it reported a step.
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
    """A rank that ended because a notice asked it to stop."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierOutcome:
    """How the round ended. `payloads` maps a rank to base64; large payloads are in chunks beside this record."""

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
    """The lowest round that may still be open is `round` + 1."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierArrived:
    """The ranks that are still missing, for display. No decision reads this record."""

    arrived: int
    expected: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """A dataset is `shards` numbered files; `uri`, formatted with `shard=i`, names file i."""

    shards: int
    uri: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The owners of a dataset's shards, as of one assignment epoch.

    The owners follow from `workers`, `shards` and the published ring (`core.datasets.ring`), so the record
    stays small, and a client in any language can compute them. Only exceptions are stored: `seats` maps a worker to
    the name under which the ring places it, if that name is not the worker's own; `moved` lists, by owner, the
    shards that the ring places elsewhere.
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
    """One copy of a checkpoint: the URI of its folder. `shared`: the copy survives the loss of a host."""

    path: str
    state: TierState = TierState.PRESENT
    shared: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The checkpoint of another job from which a record was forked; the bytes belong to that checkpoint."""

    job: str
    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One slot of the catalog: (step, generation). `path` is the URI of its folder.

    `ranks` is the number of acks that complete the checkpoint, besides the seal. `tiers` maps a tier's name to the
    copy there, including the copy at `path`.
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
        """The step, generation and attempt, from which the attempt's keys are built."""
        return self.step, self.generation, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """A rank's report that its part is durable: its manifest's digest, the bytes written, and the writing host."""

    digest: str
    size_bytes: int
    worker: WorkerId
    incarnation: int
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The report that the global manifest is durable: its digest, and the sum of all bytes."""

    digest: str
    size_bytes: int
    worker: WorkerId
    incarnation: int
    model_hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest checkpoint by (generation, step), the order of the protocols.

    `generation`: the generation under which the checkpoint counts. This is its record's generation, or that of a
    later world that restored from it.
    """

    generation: int
    step: int
    attempt: AttemptId
    record_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    who: str
    why: str

"""Every key of the keyspace is built here, and only here.

The tree is that of `docs/keyspace.md`. Numbers are zero-padded, so that keys sort in numeric order.
`ids.checked_id` validates every name on entry, so no name can add a `/` to a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from strata.core.ids import checked_id
from strata.errors import InvalidArgument

_WIDTH = 12


def number(value: int) -> str:
    """Return `value` as a key component whose order is the numeric order."""
    if not 0 <= value < 10**_WIDTH:
        raise InvalidArgument(f"{value} is not in 0 .. 10^{_WIDTH}: no such step, generation or rank")
    return f"{value:0{_WIDTH}d}"


class _Fixed:
    """A descriptor for a key at a fixed path below the root; a folder's key ends with a slash."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, keys: ClusterKeys | JobKeys, _cls: type) -> str:
        return keys.root + self._place


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The keys of one cluster: `P` in the protocols."""

    cluster: str

    def __post_init__(self) -> None:
        checked_id("cluster", self.cluster)

    @property
    def root(self) -> str:
        """The common prefix of all keys, with its closing slash."""
        return f"/strata/v1/{self.cluster}/"

    uid = _Fixed("uid")
    restoring = _Fixed("restoring")
    """The restore of the control plane in progress; usually absent."""
    dry_run = _Fixed("dry-run")
    """A key that dry runs name in their transactions; it is never written."""
    backup = _Fixed("backup")
    """The newest backup of the control plane."""
    leader = _Fixed("leader")
    replicas = _Fixed("replicas/")

    def replica(self, replica: str) -> str:
        return self.replicas + checked_id("replica", replica)

    coordinators = _Fixed("coordinators/")

    def coordinator(self, replica: str) -> str:
        """Return the key of `replica` on the list of coordinators; unlike its registration, it has no lease."""
        return self.coordinators + checked_id("replica", replica)

    jobs = _Fixed("jobs/")

    def job(self, job: str) -> JobKeys:
        """Return the keys of one job; `InvalidArgument` if the name is not valid."""
        return _job_keys(self.jobs, job)

    def job_of(self, key: str) -> str | None:
        """Return the job that `key` belongs to, or None."""
        if not key.startswith(self.jobs):
            return None
        return key[len(self.jobs) :].partition("/")[0]

    def parts(self, key: str) -> tuple[str, ...]:
        """Return the components of `key` below the root, for `match`; empty for a key of another cluster.

        Numbers keep their zero padding; `int` parses them.
        """
        if not key.startswith(self.root):
            return ()
        return tuple(key[len(self.root) :].split("/"))


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one job: `J` in the protocols. `root` ends with a slash."""

    root: str

    @property
    def name(self) -> str:
        return self.root.rstrip("/").rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The folder of all jobs of the cluster, with its closing slash."""
        return self.root.rstrip("/").rpartition("/")[0] + "/"

    spec = _Fixed("spec")
    standbys = _Fixed("standbys")
    phase = _Fixed("phase")
    run = _Fixed("run")
    """The run that the job belongs to, and its command."""

    # -- members and worlds

    workers = _Fixed("workers/")

    def worker(self, worker: str) -> str:
        return self.workers + checked_id("worker", worker)

    head = _Fixed("world")
    """The world's head, written once per generation."""
    worlds = _Fixed("worlds/")

    def generation(self, generation: int) -> str:
        return f"{self.worlds}{number(generation)}/"

    def members(self, generation: int, epoch: int) -> str:
        return f"{self.generation(generation)}{number(epoch)}/members/"

    def members_chunk(self, generation: int, epoch: int, index: int) -> str:
        return self.members(generation, epoch) + number(index)

    def failed(self, generation: int) -> str:
        return f"{self.generation(generation)}failed/"

    def failed_rank(self, generation: int, rank: int) -> str:
        return self.failed(generation) + number(rank)

    def done(self, generation: int) -> str:
        return f"{self.generation(generation)}done/"

    def done_rank(self, generation: int, rank: int) -> str:
        return self.done(generation) + number(rank)

    def stopped(self, generation: int) -> str:
        return f"{self.generation(generation)}stopped/"

    def stopped_rank(self, generation: int, rank: int) -> str:
        return self.stopped(generation) + number(rank)

    def held(self, generation: int) -> str:
        """Return the key that records that ranks of a generation have trained and could not save."""
        return f"{self.generation(generation)}held"

    def notice(self, generation: int) -> str:
        """Return the key of the notice that asks the ranks of a generation to stop."""
        return f"{self.generation(generation)}notice"

    history = _Fixed("history/")

    def history_of(self, generation: int) -> str:
        return self.history + number(generation)

    def restored(self, generation: int) -> str:
        return f"{self.generation(generation)}restored"

    # -- barriers

    barriers = _Fixed("barriers/")

    def barrier_name(self, name: str) -> str:
        return f"{self.barriers}{checked_id('barrier', name)}/"

    def barrier_generation(self, name: str, generation: int) -> str:
        return f"{self.barrier_name(name)}{number(generation)}/"

    def barrier_floor(self, name: str, generation: int) -> str:
        return f"{self.barrier_generation(name, generation)}floor"

    def barrier_round(self, name: str, generation: int, round_: int) -> str:
        return f"{self.barrier_generation(name, generation)}{number(round_)}/"

    def outcome(self, name: str, generation: int, round_: int) -> str:
        return f"{self.barrier_round(name, generation, round_)}outcome"

    def payload_chunk(self, name: str, generation: int, round_: int, index: int) -> str:
        return f"{self.barrier_round(name, generation, round_)}payloads/{number(index)}"

    def arrived(self, name: str, generation: int, round_: int) -> str:
        return f"{self.barrier_round(name, generation, round_)}arrived"

    # -- datasets

    datasets = _Fixed("datasets/")

    def dataset(self, name: str) -> str:
        return f"{self.datasets}{checked_id('dataset', name)}/"

    def dataset_spec(self, name: str) -> str:
        return f"{self.dataset(name)}spec"

    def assignment(self, name: str) -> str:
        return f"{self.dataset(name)}assignment"

    # -- checkpoints

    checkpoints = _Fixed("checkpoints/")

    def checkpoint_step(self, step: int) -> str:
        return f"{self.checkpoints}{number(step)}/"

    def checkpoint(self, step: int, generation: int) -> str:
        """The record of the slot (step, generation)."""
        return f"{self.checkpoint_step(step)}{number(generation)}"

    def attempt(self, step: int, generation: int, attempt: str) -> str:
        return f"{self.checkpoint(step, generation)}/{checked_id('attempt', attempt)}/"

    def acks(self, step: int, generation: int, attempt: str) -> str:
        return f"{self.attempt(step, generation, attempt)}acks/"

    def ack(self, step: int, generation: int, attempt: str, rank: int) -> str:
        return self.acks(step, generation, attempt) + number(rank)

    def seal(self, step: int, generation: int, attempt: str) -> str:
        return f"{self.acks(step, generation, attempt)}seal"

    def refs(self, step: int, generation: int, attempt: str) -> str:
        return f"{self.attempt(step, generation, attempt)}refs/"

    def readers(self, step: int, generation: int, attempt: str) -> str:
        return f"{self.attempt(step, generation, attempt)}readers/"

    def reader(self, step: int, generation: int, attempt: str, reader: str) -> str:
        return self.readers(step, generation, attempt) + checked_id("reader", reader)

    def copies(self, step: int, generation: int, attempt: str, tier: str) -> str:
        """Return the folder of an attempt's copy on a further tier: one key per rank, and the seal."""
        return f"{self.attempt(step, generation, attempt)}copies/{checked_id('tier', tier)}/"

    def copy(self, step: int, generation: int, attempt: str, tier: str, rank: int) -> str:
        return self.copies(step, generation, attempt, tier) + number(rank)

    def copied_seal(self, step: int, generation: int, attempt: str, tier: str) -> str:
        """Return the key that reports the copied manifest and marker."""
        return f"{self.copies(step, generation, attempt, tier)}seal"

    def suspects(self, step: int, generation: int, attempt: str, tier: str) -> str:
        return f"{self.attempt(step, generation, attempt)}suspects/{checked_id('tier', tier)}/"

    def suspect(self, step: int, generation: int, attempt: str, tier: str, host: str) -> str:
        """Return the key of a host's corruption report about its reads from a tier."""
        return self.suspects(step, generation, attempt, tier) + checked_id("host", host)

    def removed(self, step: int, generation: int, attempt: str, tier: str) -> str:
        """Return the folder with the hosts that have removed their part of a tier that is not shared."""
        return f"{self.attempt(step, generation, attempt)}removed/{checked_id('tier', tier)}/"

    def tags_of(self, step: int, generation: int, attempt: str) -> str:
        return f"{self.attempt(step, generation, attempt)}tags/"

    tags = _Fixed("tags/")

    def tag(self, tag: str) -> str:
        """Return the key that maps a tag to its checkpoint."""
        return self.tags + checked_id("tag", tag)

    retention = _Fixed("retention")
    rewind = _Fixed("rewind")
    """The checkpoint that the next generation must begin from, though it is not the newest."""
    discarded = _Fixed("discarded/")

    def discard(self, attempt: str) -> str:
        """Return the key that notes that bytes of an attempt without a record are still in storage."""
        return self.discarded + checked_id("attempt", attempt)

    latest = _Fixed("latest")
    anew = _Fixed("anew")
    """The generation up to which all saved checkpoints are superseded: no world begins from them."""
    pins = _Fixed("pins/")

    def pin(self, step: int, attempt: str) -> str:
        return f"{self.pins}{number(step)}/{checked_id('attempt', attempt)}"


@lru_cache(maxsize=1024)
def _job_keys(jobs: str, name: str) -> JobKeys:
    """Return the keys of a job; cached, so that its name is validated once although every message names a job."""
    return JobKeys(jobs + checked_id("job", name) + "/")

"""The table of bad input: each mistake, the interfaces that can make it, and the error it must cause.

Each case is one mistake, made through every interface that allows it: the library, a bare gRPC request, the command
line. All of them must report the same error: its class, words that name the mistake, and a hint. gRPC reports it as a
status with the packed error, the command line as an exit code.
"""

from __future__ import annotations

from typing import Final

import strata
from strata import CheckpointManager, CoordinatorClient, DatasetRegistry
from strata.cli.console.exits import Exit
from strata.errors import (
    CheckpointNotFound,
    ConfigError,
    Conflict,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    Refused,
    StaleGeneration,
    StaleIncarnation,
    StorageError,
    Unavailable,
)
from strata.v1 import checkpoints_pb2, common_pb2, datasets_pb2, members_pb2, recovery_pb2, worlds_pb2
from tests.integration.bad_input.case import (
    ID_HINT,
    INF,
    NAN,
    NOWHERE,
    Case,
    Code,
    a_file,
    arrival,
    begin,
    etcd_of,
    given,
    listening,
    look,
    other_participants,
    registration,
    registry,
    run,
    save,
)
from tests.integration.bad_input.numbers import NUMBERS

CASES: Final[list[Case]] = [
    Case(
        name="unknown job",
        error=NotFound,
        says="nobody",
        hint="a job begins with its first member",
        library=lambda p: p.client("nobody").job_status(),
        request=lambda p: worlds_pb2.GetJobRequest(job="nobody"),
        status=Code.NOT_FOUND,
        command=lambda p: look(p, "members", "nobody"),
        exit=Exit.REFUSED,
    ),
    Case(
        name="unknown job of a dataset",
        error=NotFound,
        says="nobody",
        hint="a job begins with its first member",
        library=lambda p: DatasetRegistry(p.endpoints, job="nobody").datasets(),
        request=lambda p: datasets_pb2.GetAssignmentRequest(job="nobody"),
        status=Code.NOT_FOUND,
    ),
    Case(
        name="unknown dataset",
        error=NotFound,
        says="no dataset",
        hint="register it",
        library=lambda p: registry(p).assignment("nothing"),
        request=lambda p: datasets_pb2.GetAssignmentRequest(job="witness", dataset="nothing"),
        status=Code.NOT_FOUND,
    ),
    Case(
        name="malformed job",
        error=InvalidArgument,
        says="cannot name a job",
        hint=ID_HINT,
        library=lambda p: p.client("a/b").job_status(),
        request=lambda p: worlds_pb2.GetJobRequest(job="../x"),
        status=Code.INVALID_ARGUMENT,
        command=lambda p: look(p, "checkpoints list", "x" * 200),
        exit=Exit.USAGE,
    ),
    Case(
        name="malformed worker",
        error=InvalidArgument,
        says="cannot name a worker",
        hint=ID_HINT,
        library=lambda p: strata.connect(p.endpoints, job="spare", worker_id="é"),
        request=lambda p: registration(p, worker_id="a b"),
        status=Code.INVALID_ARGUMENT,
        command=lambda p: run(p, "--worker-id", "a b"),
        exit=Exit.USAGE,
    ),
    *(
        Case(
            name=f"a name that is {what}",
            error=InvalidArgument,
            says="",
            hint=" ",
            library=given(name, lambda p, name: p.client(name).job_status()),
        )
        for what, name in (("no Unicode", "\udcff"), ("a number", 5), ("empty", ""))
    ),
    *(
        Case(
            name=f"endpoints that are {what}",
            error=ConfigError,
            says="",
            hint="host:port",
            library=given(value, lambda p, value: CoordinatorClient.connect(value)),
        )
        for what, value in (("nothing", None), ("a number", 5), ("a list of numbers", [5]), ("empty", ""))
    ),
    Case(
        name="an id alive elsewhere",
        error=Conflict,
        says="w0",
        hint="",
        library=lambda p: p.client().register(worker_id="w0"),
        request=lambda p: registration(p, job="witness", worker_id="w0"),
        status=Code.ALREADY_EXISTS,
        command=lambda p: run(p, "--worker-id", "w0", job="witness"),
        exit=Exit.REFUSED,
    ),
    Case(
        name="stale incarnation, heartbeat",
        error=StaleIncarnation,
        says="m0",
        hint="another process runs under this name",
        request=lambda p: members_pb2.HeartbeatRequest(
            job="moved", worker_id="m0", boot="gone", incarnation=p.old_incarnation
        ),
        status=Code.ABORTED,
    ),
    Case(
        name="heartbeat of a stranger",
        error=NotFound,
        says="not registered",
        hint="register again",
        request=lambda p: members_pb2.HeartbeatRequest(job="moved", worker_id="x", boot="b", incarnation=1),
        status=Code.NOT_FOUND,
    ),
    Case(
        name="stale incarnation, barrier",
        error=StaleIncarnation,
        says="m0 is incarnation",
        hint="another process runs under this name",
        request=lambda p: arrival(
            p, job="moved", generation=p.new_generation, worker_id="m0", incarnation=p.old_incarnation
        ),
        status=Code.ABORTED,
    ),
    Case(
        name="stale incarnation, rank's end",
        error=StaleIncarnation,
        says="m0 is incarnation",
        hint="another process runs under this name",
        request=lambda p: members_pb2.ReportRankExitRequest(
            job="moved", worker_id="m0", incarnation=p.old_incarnation, generation=p.new_generation
        ),
        status=Code.ABORTED,
    ),
    Case(
        name="stale generation, barrier",
        error=StaleGeneration,
        says="moved",
        hint="a newer world exists",
        request=lambda p: arrival(
            p, job="moved", generation=p.old_generation, worker_id="m0", incarnation=p.moved.incarnation
        ),
        status=Code.ABORTED,
    ),
    Case(
        name="stale generation, checkpoint",
        error=StaleGeneration,
        says="generation",
        hint="a newer world exists",
        request=lambda p: checkpoints_pb2.BeginCheckpointRequest(
            job="moved",
            author=common_pb2.Author(
                worker_id="m0", incarnation=p.moved.incarnation, generation=p.old_generation
            ),
            type=checkpoints_pb2.CHECKPOINT_TYPE_FULL,
            attempt="a",
            root="file:///x",
        ),
        status=Code.ABORTED,
    ),
    Case(
        name="a generation that is not there yet",
        error=Refused,
        says="no such generation yet",
        hint="read the world first",
        request=lambda p: arrival(p, generation=10**9),
        status=Code.FAILED_PRECONDITION,
    ),
    Case(
        name="barrier of a non-member",
        error=NotFound,
        says="not registered",
        hint="register again",
        request=lambda p: arrival(p, worker_id="stranger"),
        status=Code.NOT_FOUND,
    ),
    Case(
        name="barrier for another's rank",
        error=Refused,
        says="does not run",
        hint="its own ranks only",
        request=lambda p: arrival(p, ranks=[2]),
        status=Code.FAILED_PRECONDITION,
    ),
    Case(
        name="barrier of another digest",
        error=InvalidArgument,
        says="other participants",
        hint="must state the same ranks",
        request=other_participants,
        status=Code.INVALID_ARGUMENT,
    ),
    *(
        Case(
            name=f"an arrival with {what}",
            error=InvalidArgument,
            says="",
            hint="",
            request=given(facts, lambda p, facts: arrival(p, **({"name": "odd"} | facts))),
            status=Code.INVALID_ARGUMENT,
        )
        for what, facts in {
            "round 0": {"round": 0},
            "a negative age": {"age_ms": -1},
            "a negative timeout": {"timeout_ms": -1},
            "no rank": {"ranks": []},
            "a rank twice": {"ranks": [0, 0]},
            "more payloads than ranks": {"payloads": [b"a", b"b"]},
            "participants that do not exist": {"participants": [0, 7]},
            "a malformed name": {"name": "a/b"},
        }.items()
    ),
    Case(
        name="oversized payload",
        error=QuotaExceeded,
        says="payload",
        hint="pass",
        library=lambda p: p.witness.barrier("large", b"x" * 5000),
        request=lambda p: arrival(p, name="large", payloads=[b"x" * 5000]),
        status=Code.RESOURCE_EXHAUSTED,
    ),
    Case(
        name="oversized metadata of a checkpoint",
        error=QuotaExceeded,
        says="65536",
        hint="shorten",
        library=lambda p: save(p, step=70, metadata={"note": "x" * 70_000}),
        request=lambda p: begin(p, metadata={"note": "x" * 70_000}),
        status=Code.RESOURCE_EXHAUSTED,
    ),
    Case(
        name="oversized metadata of a dataset",
        error=QuotaExceeded,
        says="65536",
        hint="shorten",
        library=lambda p: registry(p).register("large", shards=1, metadata={"note": "x" * 70_000}),
        request=lambda p: datasets_pb2.RegisterDatasetRequest(
            job="witness",
            dataset=datasets_pb2.Dataset(name="large", shards=1, metadata={"note": "x" * 70_000}),
        ),
        status=Code.RESOURCE_EXHAUSTED,
    ),
    Case(
        name="oversized devices",
        error=QuotaExceeded,
        says="65536",
        hint="shorten",
        library=lambda p: p.client("spare").register(worker_id="s1", devices=["x" * 70_000]),
        request=lambda p: registration(p, devices=["x" * 70_000]),
        status=Code.RESOURCE_EXHAUSTED,
    ),
    Case(
        name="a message above 4 MiB",
        error=QuotaExceeded,
        says="",
        hint="4 MiB",
        library=lambda p: p.client("spare").register(worker_id="s1", devices=["x" * (5 << 20)]),
        request=lambda p: registration(p, devices=["x" * (5 << 20)]),
        status=Code.RESOURCE_EXHAUSTED,
    ),
    *(
        Case(
            name=f"a registration with {what}",
            error=InvalidArgument,
            says="",
            hint="",
            request=given(facts, lambda p, facts: registration(p, **facts)),
            status=Code.INVALID_ARGUMENT,
        )
        for what, facts in {
            "no boot": {"boot": ""},
            "negative slots": {"slots": -1},
            "too many slots": {"slots": 5000},
            "min above max": {"spec": worlds_pb2.JobSpec(min_workers=3, max_workers=2)},
            "settle_s nan": {"spec": worlds_pb2.JobSpec(settle_s=NAN)},
            "settle_s inf": {"spec": worlds_pb2.JobSpec(settle_s=INF)},
            "settle_s negative": {"spec": worlds_pb2.JobSpec(settle_s=-1)},
            "negative fruitless": {"spec": worlds_pb2.JobSpec(max_no_progress_generations=-1)},
        }.items()
    ),
    *(
        Case(
            name=f"a begin with {what}",
            error=InvalidArgument,
            says="",
            hint="",
            request=given(facts, lambda p, facts: begin(p, **facts)),
            status=Code.INVALID_ARGUMENT,
        )
        for what, facts in {
            "a negative step": {"step": -1},
            "no attempt": {"attempt": ""},
            "an unknown type": {"type": 99},
        }.items()
    ),
    Case(
        name="a checkpoint for another's rank",
        error=Refused,
        says="rank 9",
        hint="",
        request=lambda p: begin(p, rank=9),
        status=Code.FAILED_PRECONDITION,
    ),
    Case(
        name="a checkpoint that is not there",
        error=CheckpointNotFound,
        says="99",
        hint="",
        library=lambda p: p.checkpoints.restore({}, step=99),
        request=lambda p: checkpoints_pb2.GetCheckpointRequest(job="witness", step=99),
        status=Code.NOT_FOUND,
    ),
    Case(
        name="an end of a rank that is not there",
        error=InvalidArgument,
        says="rank -1",
        hint="",
        request=lambda p: members_pb2.ReportRankExitRequest(job="pair", worker_id="p0", rank=-1),
        status=Code.INVALID_ARGUMENT,
    ),
    Case(
        name="recovery of no worker",
        error=InvalidArgument,
        says="cannot name a worker",
        hint=ID_HINT,
        library=lambda p: p.client().recovery(worker_id=""),
        request=lambda p: recovery_pb2.RecoveryRequest(job="witness"),
        status=Code.INVALID_ARGUMENT,
    ),
    Case(
        name="shards of no number",
        error=InvalidArgument,
        says="0 shards",
        hint="",
        library=lambda p: registry(p).register("d", shards=0),
        request=lambda p: datasets_pb2.RegisterDatasetRequest(
            job="witness", dataset=datasets_pb2.Dataset(name="d")
        ),
        status=Code.INVALID_ARGUMENT,
    ),
    *(
        Case(
            name=f"a uri of shards {uri[:24]}",
            error=ConfigError,
            says="is not the name of a shard's file",
            hint="{shard:05d}",
            library=given(uri, lambda p, uri: registry(p).register("d", shards=3, uri=uri)),
        )
        for uri in (
            "{shard:1000000000}",
            "{shard.__class__}",
            "{x}",
            "{",
            "{shard!r}",
            "{0}",
            "{shard:{shard}}",
        )
    ),
    Case(
        name="wrong endpoint",
        error=Unavailable,
        says="127.0.0.1:1",
        hint="check the endpoints",
        library=lambda p: CoordinatorClient.connect(NOWHERE, timeout_s=1).status(),
        command=lambda p: ("status", "--endpoints", NOWHERE, "--timeout-s", "1"),
        exit=Exit.UNAVAILABLE,
    ),
    Case(
        name="etcd's port instead of a coordinator's",
        error=ConfigError,
        says="",
        hint="is this address a Strata coordinator",
        library=lambda p: CoordinatorClient.connect(etcd_of(p), timeout_s=2).status(),
        command=lambda p: ("status", "--endpoints", etcd_of(p), "--timeout-s", "2"),
        exit=Exit.USAGE,
    ),
    Case(
        name="an endpoint that is none",
        error=ConfigError,
        says="port",
        hint="host:port",
        library=lambda p: CoordinatorClient.connect("host:99999"),
        command=lambda p: ("members", "--endpoints", "host:99999"),
        exit=Exit.USAGE,
    ),
    Case(
        name="a port that is taken",
        error=ConfigError,
        says="cannot serve at",
        hint="--listen",
        # without HTTP: another test may hold its default port
        command=lambda p: (
            *("coordinator", "--etcd", etcd_of(p), "--replica", "x"),
            *("--listen", listening(p), "--http", ""),
        ),
        exit=Exit.USAGE,
    ),
    *(
        Case(
            name=f"detect_s={value}",
            error=ConfigError,
            says="detect",
            hint="",
            command=given(value, lambda p, value: ("coordinator", "--etcd", etcd_of(p), "--detect-s", value)),
            exit=Exit.USAGE,
        )
        for value in ("nan", "-1")
    ),
    Case(
        name="a timeout of nan on the command line",
        error=ConfigError,
        says="timeout",
        hint="",
        command=lambda p: ("status", "--endpoints", p.endpoints, "--timeout-s", "nan"),
        exit=Exit.USAGE,
    ),
    Case(
        name="checkpoints in a file's place",
        error=StorageError,
        says="Not a directory",
        hint="is a file",
        library=lambda p: CheckpointManager(a_file(p)).save(b"x", step=1).wait(5),
    ),
    Case(
        name="checkpoints of the other mode",
        error=ConfigError,
        says="coordinated",
        hint="another storage path",
        library=lambda p: CheckpointManager(p.folder / "saves"),
    ),
    Case(
        name="a relative file URI",
        error=ConfigError,
        says="a path alone",
        hint="file://",
        library=lambda p: CheckpointManager("file:x"),
    ),
    *NUMBERS,
]

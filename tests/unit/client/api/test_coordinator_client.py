from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata import errors
from strata.client.api.coordinator import CoordinatorClient
from strata.client.api.datasets import DatasetRegistry, Shard
from strata.devcluster.ports import free_ports
from strata.session import endpoints
from strata.v1.admin_pb2 import GetStatusRequest, GetStatusResponse
from strata.v1.checkpoints_pb2 import PinCheckpointRequest, PinCheckpointResponse
from strata.v1.datasets_pb2 import (
    Dataset,
    GetAssignmentRequest,
    GetAssignmentResponse,
    ListDatasetsRequest,
    ListDatasetsResponse,
    RegisterDatasetRequest,
    RegisterDatasetResponse,
    Shards,
)
from strata.v1.members_pb2 import (
    HeartbeatRequest,
    HeartbeatResponse,
    LeaveRequest,
    LeaveResponse,
    RegisterRequest,
    RegisterResponse,
)
from strata.v1.worlds_pb2 import GetJobRequest, GetWorldRequest, GetWorldResponse, World
from tests.cluster_fixtures import ROOT
from tests.unit.client.unary_server import UnaryServer, unary_server


@pytest.fixture
def server() -> Iterator[UnaryServer]:
    with unary_server() as one:
        one.answers[GetStatusRequest] = lambda _: GetStatusResponse(cluster="c", answered_by="one")
        one.answers[RegisterRequest] = lambda _: RegisterResponse(incarnation=11, detect_s=5)
        one.answers[HeartbeatRequest] = lambda _: HeartbeatResponse(world=World(generation=3))
        one.answers[LeaveRequest] = lambda _: LeaveResponse()
        yield one


def refuse(error: errors.StrataError) -> object:
    def answer(_: object) -> object:
        raise error

    return answer


def test_the_example_of_the_design_document_works(server: UnaryServer) -> None:
    world = CoordinatorClient.connect(f"http://{server.address}").heartbeat(worker_id="node-01")
    assert world == World()
    (request,) = server.requested_paths(RegisterRequest)
    registration = request.registration
    assert (registration.worker_id, registration.slots, registration.job) == ("node-01", 1, "default")
    assert registration.boot
    assert registration.pid


def test_later_heartbeats_name_boot_and_incarnation(server: UnaryServer) -> None:
    with CoordinatorClient.connect(server.address, job="j") as client:
        client.heartbeat(worker_id="n")
        assert client.heartbeat(worker_id="n").generation == 3
        (beat,) = server.requested_paths(HeartbeatRequest)
        assert (beat.job, beat.boot, beat.incarnation) == ("j", client.boot, 11)


def test_a_worker_removed_for_silence_registers_again_under_its_old_name(server: UnaryServer) -> None:
    with CoordinatorClient.connect(server.address) as client:
        client.register(worker_id="n", slots=4)
        server.answers[HeartbeatRequest] = refuse(errors.NotFound("gone"))  # type: ignore[assignment]
        client.heartbeat(worker_id="n")
        first, second = (r.registration for r in server.requested_paths(RegisterRequest))
        assert (first.incarnation, second.incarnation) == (0, 11)
        assert (first.boot, first.slots) == (second.boot, second.slots)


def test_a_client_can_leave_only_for_workers_that_it_registered(server: UnaryServer) -> None:
    with CoordinatorClient.connect(server.address) as client:
        with pytest.raises(errors.InvalidArgument):
            client.leave(worker_id="n")
        client.register(worker_id="n")
        client.leave(worker_id="n")
        assert server.requested_paths(LeaveRequest)[0].incarnation == 11
        with pytest.raises(errors.InvalidArgument):
            client.leave(worker_id="n")


def test_a_renewed_credential_is_shown_before_a_call_fails(server: UnaryServer) -> None:
    """After the credential expires, the client dials the only endpoint again within the same call."""
    client = CoordinatorClient.connect(server.address)
    assert client.status().answered_by == "one"
    answer, refusals = server.answers[GetStatusRequest], [errors.Unauthenticated("it expired")]

    def refuses_once(request: object) -> object:
        if refusals:
            raise refusals.pop()
        return answer(request)

    server.answers[GetStatusRequest] = refuses_once  # type: ignore[assignment]
    assert client.status().answered_by == "one"
    server.answers[GetStatusRequest] = refuse(errors.Unauthenticated("it expired"))  # type: ignore[assignment]
    requests = len(server.requested_paths(GetStatusRequest))
    with pytest.raises(errors.Unauthenticated, match="it expired"):
        client.status()
    assert len(server.requested_paths(GetStatusRequest)) == requests + 2, (
        "by the old connection, and by a new one"
    )


def test_an_endpoint_that_refuses_ends_no_call_while_the_others_restart(
    server: UnaryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "CAP_S", 0.01)
    with unary_server() as refusing, unary_server() as other:
        refusing.answers[GetStatusRequest] = refuse(errors.Unauthenticated("an older list of tokens"))  # type: ignore[assignment]
        answer = server.answers[GetStatusRequest]

        def restarting(request: object) -> object:
            if len(refusing.requests) < 6:  # more refusals than there are endpoints
                raise errors.Unavailable("it starts")
            return answer(request)

        for one in (server, other):
            one.answers[GetStatusRequest] = restarting  # type: ignore[assignment]
        with CoordinatorClient.connect([refusing.address, server.address, other.address]) as client:
            assert client.status().answered_by == "one"


@pytest.mark.parametrize("how", ["nobody listens", "it hangs", "it has no etcd"])
def test_a_replica_that_does_not_answer_is_left_for_one_that_does(server: UnaryServer, how: str) -> None:
    with unary_server() as other:
        other.answers[GetStatusRequest] = refuse(errors.Unavailable("no etcd"))  # type: ignore[assignment]
        if how == "it hangs":
            other.hanging.clear()
        (dead,) = free_ports(1)
        where = f"127.0.0.1:{dead}" if how == "nobody listens" else other.address
        for _ in range(5):  # the first endpoint is drawn at random
            with CoordinatorClient.connect([where, server.address]) as client:
                began = time.monotonic()
                assert client.call(GetStatusRequest(), timeout_s=5, attempt_s=0.2).answered_by == "one"
                assert time.monotonic() - began < 1


def test_when_no_coordinator_answers_the_error_names_each_endpoint() -> None:
    ports = free_ports(2)
    client = CoordinatorClient.connect([f"127.0.0.1:{port}" for port in ports], timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(errors.Unavailable) as add:
        client.status()
    assert 0.9 < time.monotonic() - began < 2.5
    assert all(str(port) in add.value.message for port in ports)
    assert add.value.retryable


def test_a_call_shorter_than_the_pause_after_failures_tries_all_the_same(server: UnaryServer) -> None:
    """One client exists throughout its coordinator's outage, and each of its calls has a short timeout."""
    with CoordinatorClient.connect(server.address, timeout_s=0.5) as client:
        server.answers[GetStatusRequest] = refuse(errors.Unavailable("no etcd"))  # type: ignore[assignment]
        for _ in range(6):  # the pauses grow to 2 s
            with pytest.raises(errors.Unavailable):
                client.status()
        server.requests.clear()

        with pytest.raises(errors.Unavailable, match="no etcd"):
            client.status()

        assert server.requested_paths(GetStatusRequest)


def test_refusals_are_typed_and_not_repeated(server: UnaryServer) -> None:
    server.answers[GetJobRequest] = refuse(errors.NotFound("no job x", hint="see strata jobs"))  # type: ignore[assignment]
    with CoordinatorClient.connect(server.address, job="x") as client:
        with pytest.raises(errors.NotFound, match="no job x") as refusal:
            client.job_status()
        assert refusal.value.hint == "see strata jobs"
        assert len(server.requested_paths(GetJobRequest)) == 1


CALLS_LEFT = """
import contextlib, gc, sys
from strata import errors
from strata.client.api.coordinator import CoordinatorClient
from tests.polling import until

def left():
    return [each for each in gc.get_objects() if type(each).__name__ == "UnaryUnaryCall"]

gc.disable()
for _ in range(12):  # each second client tries the endpoint without a server first
    client = CoordinatorClient.connect(sys.argv[1])
    with client, contextlib.suppress(errors.NotFound):
        client.status()
until(lambda: not left(), lambda: str(left()))
"""


@pytest.mark.parametrize("refused", [False, True])
def test_a_failed_call_keeps_no_connection_open(server: UnaryServer, refused: bool) -> None:
    """gRPC keeps a closed channel, and tries to connect it, as long as an object of one of its calls exists."""
    if refused:
        server.answers[GetStatusRequest] = refuse(errors.NotFound("no such job"))  # type: ignore[assignment]
    (nobody,) = free_ports(1)
    argv = [sys.executable, "-c", CALLS_LEFT, f"127.0.0.1:{nobody},{server.address}"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr


def test_a_client_sends_the_newest_revision_that_it_has_seen(server: UnaryServer) -> None:
    server.answers[GetWorldRequest] = lambda _: GetWorldResponse()
    with CoordinatorClient.connect(server.address) as client:
        for revision in (100, 90, 120):
            server.revision = revision
            client.world()
        client.world()
        assert [r.token.revision for r in server.requested_paths(GetWorldRequest)] == [0, 100, 100, 120]
        server.uid = "uid-2"
        with pytest.raises(errors.ClusterReplaced):
            client.world()


def test_a_client_continues_after_the_control_plane_is_restored(server: UnaryServer) -> None:
    server.answers[GetWorldRequest] = lambda _: GetWorldResponse()
    with CoordinatorClient.connect(server.address) as client:
        server.revision = 100
        client.world()
        server.uid, server.revision = f"{server.uid}.1.77aa", 7
        client.world()  # revisions of the restored control plane count from now on
        refused = iter((True, False))

        def answer(_: object) -> object:
            if next(refused):
                raise errors.ClusterRestored("since then")
            return GetWorldResponse()

        server.answers[GetWorldRequest] = answer  # type: ignore[assignment]
        client.world()
        assert [r.token.revision for r in server.requested_paths(GetWorldRequest)] == [0, 100, 7, 0]


def test_giving_up_a_replica_does_not_cut_off_another_threads_call(server: UnaryServer) -> None:
    with unary_server() as other:
        other.answers[PinCheckpointRequest] = lambda _: PinCheckpointResponse()
        other.answers[GetStatusRequest] = refuse(errors.Unavailable("not now"))  # type: ignore[assignment]
        with CoordinatorClient.connect([other.address]) as client:
            other.hanging.clear()
            slow: list[object] = []

            def pin() -> None:
                slow.append(client.call(PinCheckpointRequest(job="default"), timeout_s=9, attempt_s=9))

            thread = threading.Thread(target=pin)
            thread.start()
            assert other.came.wait(9)
            with pytest.raises(errors.Unavailable):
                client.call(GetStatusRequest(), timeout_s=0.5, attempt_s=0.1)
            other.hanging.set()
            thread.join(9)
            assert len(slow) == 1


def test_a_closed_client_can_be_used_again(server: UnaryServer) -> None:
    client = CoordinatorClient.connect(server.address)
    client.status()
    client.close()
    client.close()
    assert client.status().cluster == "c"
    client.close()


def test_a_request_without_a_service_is_refused(server: UnaryServer) -> None:
    with CoordinatorClient.connect(server.address) as client, pytest.raises(errors.InvalidArgument):
        client.call(World())


# -- datasets


def test_assigned_shards_carry_their_uris(server: UnaryServer) -> None:
    server.answers[GetAssignmentRequest] = lambda request: GetAssignmentResponse(
        dataset=Dataset(name="train", shards=4, uri="s3://b/part-{shard:03d}"),
        assign_epoch=2,
        generation=5,
        ring="ring-v1",
        workers=["w0", "w1", "w2"],
        owners={w: Shards(index=i) for w, i in {"w0": [3, 0], "w1": [1, 2]}.items()},
    )
    registry = DatasetRegistry(coordinator_url=server.address, job="j")
    assert registry.get_assigned_shards(worker_id="w0") == [
        Shard(dataset="train", index=0, uri="s3://b/part-000"),
        Shard(dataset="train", index=3, uri="s3://b/part-003"),
    ]
    assert registry.get_assigned_shards(worker_id="w2", dataset="train") == []
    assignment = registry.assignment()
    assert assignment.owners == {"w0": (0, 3), "w1": (1, 2), "w2": ()}
    assert (assignment.shards, assignment.assign_epoch, assignment.ring) == (4, 2, "ring-v1")
    requests = server.requested_paths(GetAssignmentRequest)
    assert [(r.job, r.dataset, r.worker_id) for r in requests] == [
        ("j", "", "w0"),
        ("j", "train", "w2"),
        ("j", "", ""),
    ]
    registry.close()


def test_get_assigned_shards_waits_for_an_assignment_with_its_worker(server: UnaryServer) -> None:
    states = [
        GetAssignmentResponse(dataset=Dataset(name="d", shards=2)),
        GetAssignmentResponse(dataset=Dataset(name="d", shards=2), assign_epoch=1, workers=["w0"]),
        GetAssignmentResponse(
            dataset=Dataset(name="d", shards=2),
            assign_epoch=2,
            workers=["w0", "w1"],
            owners={"w1": Shards(index=[1])},
        ),
    ]
    server.answers[GetAssignmentRequest] = lambda _: states.pop(0) if len(states) > 1 else states[0]
    with DatasetRegistry(server.address, timeout_s=3) as registry:
        assert [shard.index for shard in registry.get_assigned_shards(worker_id="w1")] == [1]
    with DatasetRegistry(server.address, timeout_s=1.0) as registry:
        with pytest.raises(errors.NotFound, match="no part"):
            registry.get_assigned_shards(worker_id="w7")
        states[:] = [GetAssignmentResponse(dataset=Dataset(name="d", shards=2))]
        with pytest.raises(errors.NotFound, match="yet"):
            registry.assignment()


def test_registering_a_dataset(server: UnaryServer) -> None:
    server.answers[RegisterDatasetRequest] = lambda r: RegisterDatasetResponse(dataset=r.dataset)
    with DatasetRegistry(server.address) as registry:
        registry.register("train", shards=8, uri="/data/{shard}.bin", metadata={"k": "v"})
        (request,) = server.requested_paths(RegisterDatasetRequest)
        assert (request.dataset.name, request.dataset.shards, dict(request.dataset.metadata)) == (
            "train",
            8,
            {"k": "v"},
        )
        for uri in ("{", "{0}", "{nope}", "{shard.nope}", "{shard:q}"):
            with pytest.raises(errors.ConfigError):
                registry.register("train", shards=8, uri=uri)


# -- the source of its coordinators' addresses


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Run in a process without any setting that names coordinators."""
    monkeypatch.chdir(tmp_path)
    for name in ("STRATA_ENDPOINTS", "STRATA_JOB", "STRATA_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_endpoints_the_environment_names_coordinators_and_job(
    server: UnaryServer, bare: pytest.MonkeyPatch
) -> None:
    bare.setenv("STRATA_ENDPOINTS", server.address)
    with CoordinatorClient.connect() as client:
        assert client.status().answered_by == "one"
        assert client.job == "default"
    bare.setenv("STRATA_JOB", "gpt")
    with CoordinatorClient.connect() as client, DatasetRegistry() as registry:
        assert client.job == "gpt"
        server.answers[ListDatasetsRequest] = lambda _: ListDatasetsResponse()
        assert registry.datasets() == []
        assert server.requested_paths(ListDatasetsRequest)[0].job == "gpt"
    with CoordinatorClient.connect(job="bert") as client:
        assert client.job == "bert"


def test_the_config_file_gives_endpoints_and_job_if_the_environment_does_not(
    server: UnaryServer, bare: pytest.MonkeyPatch
) -> None:
    Path("strata.toml").write_text(f'endpoints = ["{server.address}"]\njob = "of-the-file"\n')
    with CoordinatorClient.connect() as client:
        assert (client.status().answered_by, client.job) == ("one", "of-the-file")
    bare.setenv("STRATA_JOB", "of-the-environment")
    with CoordinatorClient.connect() as client:
        assert client.job == "of-the-environment"


def test_explicit_endpoints_ignore_the_environment(server: UnaryServer, bare: pytest.MonkeyPatch) -> None:
    bare.setenv("STRATA_ENDPOINTS", "127.0.0.1:1")
    bare.setenv("STRATA_JOB", "gpt")
    with CoordinatorClient.connect(server.address) as client:
        assert (client.status().answered_by, client.job) == ("one", "default")


def test_a_missing_coordinator_address_is_an_error_that_names_the_settings(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.ConfigError, match="no coordinator is named") as raised:
        CoordinatorClient.connect()
    assert raised.value.hint == (
        "set STRATA_ENDPOINTS to host:port,host:port…, or `endpoints` in strata.toml, or pass them:"
        ' CoordinatorClient.connect("host:50051")'
    )
    with pytest.raises(errors.ConfigError, match="no coordinator endpoint is given"):
        CoordinatorClient.connect("")

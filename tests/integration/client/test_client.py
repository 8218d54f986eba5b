"""The blocking client against real coordinators that stay healthy."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import strata
from strata import errors
from strata.client.rank.rank_client import RankClient
from strata.core.stop.last_step import BEGIN_BARRIER
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.checkpoints_pb2 import CHECKPOINT_STATE_COMMITTED
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, GetWorldRequest
from tests.polling import until

LIMIT_S = 30.0


class Trainers:
    """Standalone clients of one job in this process, each with its own session."""

    def __init__(self, cluster: LocalCluster, job: str) -> None:
        self.cluster = cluster
        self.job = job
        self.pool = ThreadPoolExecutor(16)
        self.clients: list[RankClient] = []

    def join(self, count: int, *, spread: bool = False, **options: int) -> list[RankClient]:
        """Return `count` trainers in rank order; with `spread`, each knows one coordinator only."""
        places = [c.address for c in self.cluster.coordinators]
        joining = [
            self.pool.submit(
                strata.connect,
                places[i % len(places)] if spread else self.cluster.endpoints,
                job=self.job,
                worker_id=f"w{i}",
                timeout_s=LIMIT_S,
                **{"min_workers": count, **options},  # type: ignore[arg-type]  # all options are numbers
            )
            for i in range(count)
        ]
        found = sorted((future.result(LIMIT_S) for future in joining), key=lambda client: client.rank)
        self.clients += found
        return found

    def all(self, act: Callable[[RankClient], object], *clients: RankClient) -> list[object]:
        """Run `act` on all clients (or on the given clients) at the same time; return each result or error."""
        futures: list[Future[object]] = [
            self.pool.submit(act, client) for client in clients or tuple(self.clients)
        ]
        return [future.exception(LIMIT_S) or future.result() for future in futures]

    def close(self) -> None:
        self.all(lambda client: client.close())
        self.pool.shutdown()


@pytest.fixture
def trainers(cluster: LocalCluster, job: str) -> Iterator[Trainers]:
    these = Trainers(cluster, job)
    yield these
    these.close()


@pytest.mark.journey
def test_standalone_trainers_form_a_world_and_meet_through_different_coordinators(trainers: Trainers) -> None:
    three = trainers.join(3, spread=True)
    assert [(c.rank, c.world_size, c.generation) for c in three] == [(r, 3, 1) for r in range(3)]
    assert len({c.incarnation for c in three}) == 3
    everything = {rank: b"from %d" % rank for rank in range(3)}
    for _ in range(20):
        assert trainers.all(lambda c: c.barrier("b", b"from %d" % c.rank)) == [everything] * 3
    with strata.CoordinatorClient.connect(trainers.cluster.endpoints, job=trainers.job) as client:
        served_by = {member.served_by for member in client.members()}
        assert len(served_by) == 3


def test_a_barrier_of_some_ranks_leaves_the_others_alone(trainers: Trainers) -> None:
    a, b, c = trainers.join(3)
    assert trainers.all(lambda x: x.barrier("pair", b"p", ranks=[0, 2]), a, c) == [{0: b"p", 2: b"p"}] * 2
    with pytest.raises(errors.InvalidArgument):
        b.barrier("pair", ranks=[0, 2])
    odd = trainers.all(lambda x: x.barrier("odd", ranks=[0, 1] if x.rank else [0, 1, 2], timeout_s=1), a, b)
    assert all(isinstance(x, errors.InvalidArgument | errors.BarrierTimeout) for x in odd), "other digests"


def test_a_barrier_timeout_names_missing_ranks_and_the_next_round_succeeds(trainers: Trainers) -> None:
    a, b, c = trainers.join(3)
    c.progress(17, "evaluate")
    began = time.monotonic()
    timeouts = trainers.all(lambda x: x.barrier("b", timeout_s=2.5), a, b)
    assert 2.4 < time.monotonic() - began < 10
    for timeout in timeouts:
        assert isinstance(timeout, errors.BarrierTimeout)
        assert timeout.missing == ("rank 2",)
        assert "evaluate" in timeout.message, "with its last phase"
    late = trainers.all(lambda x: x.barrier("b"), c)
    assert isinstance(late[0], errors.BarrierTimeout), "the round is over for all alike"
    assert trainers.all(lambda x: x.barrier("b", b"x")) == [{0: b"x", 1: b"x", 2: b"x"}] * 3


def test_a_payload_above_the_limit_is_refused(trainers: Trainers) -> None:
    (alone,) = trainers.join(1)
    assert alone.barrier("b", b"x" * 4096) == {0: b"x" * 4096}
    with pytest.raises(errors.QuotaExceeded):
        alone.barrier("b", b"x" * 4097)
    assert alone.barrier("b") == {}


def test_requests_of_a_rank_travel_over_its_session(trainers: Trainers) -> None:
    a, b = trainers.join(2)
    worlds = trainers.all(lambda x: x.call(GetWorldRequest(job=trainers.job)).world.size, *[a, b] * 8)
    assert worlds == [2] * 16
    with pytest.raises(errors.Refused, match="belongs to job"):
        a.call(GetWorldRequest(job="another"))


def test_a_job_whose_trainers_all_finished_is_done(trainers: Trainers) -> None:
    trainers.join(2)
    assert trainers.all(lambda x: x.close()) == [None, None]
    with strata.CoordinatorClient.connect(trainers.cluster.endpoints, job=trainers.job) as client:
        until(lambda: not client.members(), "a replica still shows a member of the finished job")
        until(lambda: client.job_status().phase == JOB_PHASE_DONE, "a replica does not show the job as done")
    with pytest.raises(errors.Refused, match="done"):
        strata.connect(trainers.cluster.endpoints, job=trainers.job, timeout_s=LIMIT_S)


def test_a_failed_rank_ends_the_generation_and_a_survivor_may_rejoin(trainers: Trainers) -> None:
    a, b, c = trainers.join(3, min_workers=2, max_workers=3)
    waiting = trainers.pool.submit(a.barrier, "b")
    with pytest.raises(ZeroDivisionError), c:
        raise ZeroDivisionError
    assert isinstance(waiting.exception(LIMIT_S), errors.StaleGeneration | errors.BarrierBroken)
    assert trainers.all(lambda x: x.rejoin(timeout_s=LIMIT_S), a, b) == [None, None]
    assert {(x.world_size, x.rank) for x in (a, b)} == {(2, 0), (2, 1)}
    assert a.generation == b.generation == 2
    assert trainers.all(lambda x: x.barrier("b", b"y"), a, b) == [{0: b"y", 1: b"y"}] * 2


def test_a_remaining_member_that_rejoins_after_a_drain_is_not_stopped_again(
    trainers: Trainers, tmp_path: Path
) -> None:
    a, b = trainers.join(2, min_workers=1, max_workers=2)
    managers = {x.rank: strata.CheckpointManager(tmp_path, client=x) for x in (a, b)}

    def train(client: RankClient) -> int:
        for step in itertools.count(1):
            client.barrier("step")
            client.progress(step, "train")
            if managers[client.rank].reached_preemption(step):
                return step
        raise AssertionError

    training = [trainers.pool.submit(train, x) for x in (a, b)]
    # before the begin barrier is released, the leader ends ranks without a common step
    while not (a.has_met(BEGIN_BARRIER) and b.has_met(BEGIN_BARRIER)):
        time.sleep(0.01)
    with strata.CoordinatorClient.connect(trainers.cluster.endpoints, job=trainers.job) as client:
        client.stop("drain", worker_ids=[b.worker_id])
    last, other = (future.result(LIMIT_S) for future in training)
    assert last == other
    manager = managers[a.rank]
    b.close(code=75)
    a.rejoin(timeout_s=LIMIT_S)
    a.barrier("b")
    assert not any(manager.reached_preemption(step) for step in range(last, last + 3))
    for each in managers.values():
        each.close()


def test_a_name_that_is_alive_elsewhere_is_refused(trainers: Trainers) -> None:
    (alone,) = trainers.join(1)
    # with other endpoints the library opens another session
    elsewhere = trainers.cluster.coordinators[0].address
    with pytest.raises(errors.Conflict, match="alive elsewhere"):
        strata.connect(elsewhere, job=trainers.job, worker_id="w0", timeout_s=LIMIT_S)
    alone.check()
    with (
        strata.CoordinatorClient.connect(trainers.cluster.endpoints, job=trainers.job) as client,
        pytest.raises(errors.Conflict),
    ):
        client.heartbeat(worker_id="w0")
    alone.check()


def test_connecting_again_shares_the_session_and_the_last_to_close_ends_it(trainers: Trainers) -> None:
    (first,) = trainers.join(1)
    with strata.connect(trainers.cluster.endpoints, job=trainers.job, worker_id="w0") as second:
        assert (second.incarnation, second.rank) == (first.incarnation, first.rank)
        assert second.barrier("b", b"x") == {0: b"x"}
    assert first.barrier("b", b"y") == {0: b"y"}


def test_a_connect_timeout_reports_that_no_world_formed(cluster: LocalCluster, job: str) -> None:
    with pytest.raises(errors.Unavailable, match="no world with a place") as error:
        strata.connect(cluster.endpoints, job=job, worker_id="w0", min_workers=2, timeout_s=1.5)
    assert "more members" in error.value.hint
    with strata.CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        until(lambda: not client.members(), "a replica still shows the member that left")


def test_heartbeats_make_a_member_and_silence_unmakes_it(cluster: LocalCluster, job: str) -> None:
    with strata.CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        first = client.register(worker_id="node-01", slots=2)
        assert client.heartbeat(worker_id="node-01").generation >= first.world.generation
        (member,) = client.members()
        assert (member.worker_id, member.incarnation, member.slots) == ("node-01", first.incarnation, 2)
        deadline = time.monotonic() + first.detect_s + 5
        while client.members():
            assert time.monotonic() < deadline, "it was silent, and is still a member"
        client.heartbeat(worker_id="node-01")
        (again,) = client.members()
        assert again.incarnation > first.incarnation
        client.leave(worker_id="node-01")
        assert client.members() == []


@pytest.mark.journey
def test_datasets_are_divided_among_the_members(trainers: Trainers) -> None:
    trainers.join(2)
    with strata.DatasetRegistry(trainers.cluster.endpoints, job=trainers.job) as registry:
        registry.register("train", shards=64, uri="/data/{shard:03d}.bin")
        registry.register("train", shards=64, uri="/data/{shard:03d}.bin")
        with pytest.raises(errors.Conflict):
            registry.register("train", shards=65)
        assert registry.datasets() == ["train"]
        assignment = registry.assignment()
        assert set(assignment.owners) == {"w0", "w1"}
        assert sorted(i for shards in assignment.owners.values() for i in shards) == list(range(64))
        mine = registry.get_assigned_shards(worker_id="w0")
        assert tuple(shard.index for shard in mine) == assignment.owners["w0"]
        assert mine[0].uri == f"/data/{mine[0].index:03d}.bin"
        with pytest.raises(errors.NotFound):
            registry.assignment("nothing")


def test_reading_a_missing_job_raises_not_found(cluster: LocalCluster) -> None:
    with strata.CoordinatorClient.connect(cluster.endpoints, job="no-such-job") as client:
        for read in (client.job_status, client.world):
            with pytest.raises(errors.NotFound):
                read()


def test_a_shard_request_without_a_dataset_shows_the_calls_to_copy(cluster: LocalCluster, job: str) -> None:
    with strata.DatasetRegistry(cluster.endpoints, job=job, timeout_s=LIMIT_S) as registry:
        with pytest.raises(errors.NotFound) as caught:
            registry.get_assigned_shards(worker_id="worker-01")
        assert "no dataset is registered and worker 'worker-01' is no member" in str(caught.value)
        advice, example, _ = caught.value.hint.split("\n\n")
        assert advice == "these two calls have to come first:"
        exec(example, {})  # runs the example as a user's copy does
        owned = registry.get_assigned_shards(worker_id="worker-01")
        assert [shard.index for shard in owned] == list(range(64))
        with pytest.raises(errors.NotFound, match="has no dataset test") as caught:
            registry.assignment("test")
        assert caught.value.hint == "it has train"
        with (
            strata.DatasetRegistry(cluster.endpoints, job=job, timeout_s=0.2) as hasty,
            pytest.raises(errors.NotFound, match="worker 'w9' is no member") as caught,
        ):
            hasty.get_assigned_shards(worker_id="w9")
        assert caught.value.hint.startswith("register it first:")
        assert "register(" not in caught.value.hint


@pytest.mark.journey
def test_shards_are_assigned_reassigned_and_listened_to(cluster: LocalCluster, job: str) -> None:
    changes: queue.Queue[Any] = queue.Queue()
    with (
        strata.CoordinatorClient.connect(cluster.endpoints, job=job) as workers,
        strata.ShardManager(cluster.endpoints, job=job, timeout_s=LIMIT_S) as shards,
        heartbeats(workers, "w0") as first,
    ):
        shards.register_dataset("train", shards=10)
        assert set(shards.assign().owners) == {"w0"}
        stop = shards.listen(changes.put)
        assert changes.get(timeout=LIMIT_S) == shards.assign("train")
        with heartbeats(workers, "w1"):
            while set((now := shards.reassign()).owners) != {"w0", "w1"}:
                assert first.is_alive()
            assert changes.get(timeout=LIMIT_S) == now
            assert sorted(i for owned in now.owners.values() for i in owned) == list(range(10))
        workers.leave(worker_id="w1")
        after = changes.get(timeout=LIMIT_S)
        assert (set(after.owners), after.assign_epoch) == ({"w0"}, now.assign_epoch + 1)
        assert shards.reassign() == after
        stop()
        assert changes.empty()


@contextlib.contextmanager
def heartbeats(client: strata.CoordinatorClient, worker: str) -> Iterator[threading.Thread]:
    """Keep a worker alive by heartbeats."""
    enough = threading.Event()

    def beat() -> None:
        while not enough.wait(0.3):
            client.heartbeat(worker_id=worker)

    client.heartbeat(worker_id=worker)
    thread = threading.Thread(target=beat)
    thread.start()
    yield thread
    enough.set()
    thread.join()


@pytest.mark.journey
def test_all_ranks_reach_a_preemption_at_the_same_step(trainers: Trainers, tmp_path: Path) -> None:
    ranks = trainers.join(2)
    begun = threading.Event()

    def train(client: RankClient) -> int:
        with strata.CheckpointManager(tmp_path, client=client, save_interval_steps=1_000_000) as manager:
            for step in itertools.count(1):
                client.barrier("step", timeout_s=LIMIT_S)
                if manager.should_save(step) and step > 1:
                    assert manager.reached_preemption(step)
                    manager.save_state({"step": step}, step, sync=True)
                    return step
                if step == 1:
                    manager.save_state({"step": step}, step, sync=True)
                elif step == 3:
                    begun.set()
        raise AssertionError

    def preempt() -> None:
        assert begun.wait(LIMIT_S)
        with strata.CoordinatorClient.connect(trainers.cluster.endpoints, job=trainers.job) as client:
            assert client.stop("preempt", reason="maintenance", grace_s=LIMIT_S) is not None

    request = trainers.pool.submit(preempt)
    (stopped,) = set(trainers.pool.map(train, ranks, timeout=LIMIT_S))
    request.result(LIMIT_S)
    with strata.CoordinatorClient.connect(trainers.cluster.endpoints, job=trainers.job) as client:
        until(
            lambda: any(
                c.step == stopped and c.state == CHECKPOINT_STATE_COMMITTED for c in client.checkpoints()
            ),
            "a replica does not show the committed checkpoint",
        )

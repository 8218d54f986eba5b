"""The store of one generation, as torch's own agent uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import (  # type: ignore[attr-defined]  # torch's stubs do not export them
    DistNetworkError,
    DistStoreError,
    HashStore,
    PrefixStore,
)
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.utils import store as torchs

from strata.errors import ConfigError
from strata.integrations.torchrun import store
from strata.integrations.torchrun.meeting import Met
from strata.integrations.torchrun.store import EXIT_BARRIER, PARTED, AgentStore
from tests.unit.integrations.torchrun.places import place

MET = Met(address="10.0.0.1", port=4711, role_rank=1, role_size=3)


def made(
    behind: HashStore,
    *,
    finished: Callable[[], None] = lambda: None,
    ended_within: Callable[[float], bool] = lambda _limit_s: False,
    first_rank: int = 2,
) -> AgentStore:
    stands = place(3, first_rank=first_rank)
    return AgentStore(behind, place=stands, met=MET, finished=finished, ended_within=ended_within)


@pytest.mark.parametrize("group_rank", [0, 1])
def test_torch_numbers_its_workers_without_reading_the_shared_store(group_rank: int) -> None:
    """The shared store is empty in this test, because another agent may end before it writes to this store."""
    spec = WorkerSpec(role="trainer", local_world_size=2, rdzv_handler=None, entrypoint="true")  # type: ignore[arg-type]
    number = SimpleElasticAgent._assign_worker_ranks
    workers = number(None, made(HashStore()), group_rank, 2, spec)
    assert [(w.local_rank, w.global_rank, w.world_size) for w in workers] == [(0, 2, 4), (1, 3, 4)]
    assert [(w.role_rank, w.role_world_size) for w in workers] == [(1, 3), (2, 3)]


def test_an_agent_with_another_number_of_workers_is_refused() -> None:
    spec = WorkerSpec(role="trainer", local_world_size=3, rdzv_handler=None, entrypoint="true")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="runs 3 workers") as refused:
        SimpleElasticAgent._assign_worker_ranks(None, made(HashStore()), 1, 2, spec)
    assert "slots=3" in refused.value.hint


def test_other_keys_are_kept_in_the_underlying_store() -> None:
    behind = HashStore()
    one, other = made(behind), made(behind)
    one.set("key", "value")
    one.multi_set(["a", "b"], ["1", "2"])
    assert other.get("key") == b"value"
    assert other.multi_get(["a", "b"]) == [b"1", b"2"]
    assert one.add("count", 2) == 2
    assert other.add("count", 1) == 3
    other.wait(["key", "a"])


def test_an_agent_in_the_exit_barrier_is_finished_and_leaves_with_the_others() -> None:
    behind, finished = HashStore(), []
    one = made(behind, finished=lambda: finished.append("one"))
    other = made(behind, finished=lambda: finished.append("other"))
    last = torchs._barrier_nonblocking(store=one, world_size=2, key_prefix=EXIT_BARRIER)
    assert finished == ["one"]
    torchs.barrier(store=other, world_size=2, key_prefix=EXIT_BARRIER, barrier_timeout=30)
    assert finished == ["one", "other"]
    one.wait([last])


def test_the_store_host_leaves_last() -> None:
    """The store ends with its host. An agent that has not read the barrier's key yet would end with a traceback."""
    behind, left = HashStore(), []
    host, other = made(behind, first_rank=0), made(behind)
    last = torchs._barrier_nonblocking(store=other, world_size=2, key_prefix=EXIT_BARRIER)

    def leave() -> None:
        torchs.barrier(store=host, world_size=2, key_prefix=EXIT_BARRIER, barrier_timeout=30)
        left.append("host")

    leaving = threading.Thread(target=leave)
    leaving.start()
    leaving.join(0.3)
    assert not left, "the other one does not know yet"
    other.wait([last])
    leaving.join(5.0)
    assert left == ["host"]


def test_the_store_host_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PART_S", 0.1)
    behind = HashStore()
    host, other = made(behind, first_rank=0), made(behind)
    torchs._barrier_nonblocking(store=other, world_size=2, key_prefix=EXIT_BARRIER)
    torchs.barrier(store=host, world_size=2, key_prefix=EXIT_BARRIER, barrier_timeout=30)


def test_an_agent_leaves_the_exit_barrier_even_if_the_store_host_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind = HashStore()
    host, other = made(behind, first_rank=0), made(behind)
    torchs._barrier_nonblocking(store=host, world_size=2, key_prefix=EXIT_BARRIER)
    torch_add = PrefixStore.add

    def add(self: PrefixStore, key: str, amount: int) -> int:
        if key == PARTED:
            raise DistNetworkError("Failed to recv, got 0 bytes")
        return torch_add(self, key, amount)

    monkeypatch.setattr(PrefixStore, "add", add)
    torchs.barrier(store=other, world_size=2, key_prefix=EXIT_BARRIER, barrier_timeout=30)


def test_the_exit_barrier_fails_once_its_generation_has_ended() -> None:
    limits_s: list[float] = []

    def ended_within(limit_s: float) -> bool:
        limits_s.append(limit_s)
        return len(limits_s) == 3

    one = made(HashStore(), ended_within=ended_within)
    with pytest.raises(DistStoreError, match="generation 3 has ended"):
        torchs.barrier(store=one, world_size=2, key_prefix=EXIT_BARRIER, barrier_timeout=300)
    assert len(limits_s) == 3


def test_the_wait_has_the_time_that_was_set() -> None:
    waited: list[float] = []

    def ended_within(limit_s: float) -> bool:
        waited.append(limit_s)
        return False

    one = made(HashStore(), ended_within=ended_within)
    with pytest.raises(DistStoreError, match="did not arrive in time"):
        one.wait(["key"], timedelta(seconds=1))
    assert sum(waited) == pytest.approx(1.0)
    one.set_timeout(timedelta(seconds=2))
    waited.clear()
    with pytest.raises(DistStoreError):
        one.wait(["key"])
    assert sum(waited) == pytest.approx(2.0)

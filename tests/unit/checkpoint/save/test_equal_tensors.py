"""Tensors that are equal on all ranks: each rank decides this from all ranks' messages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from strata.checkpoint.save.equal_tensors import MAX_PAGES, Comparison, fingerprint
from strata.checkpoint.snapshot.tensors import TensorSpec

SPEC = TensorSpec(kind="torch", dtype="float32", shape=(4,))


def prints(*, rank: int, equal: Sequence[str], own: Sequence[str] = ()) -> dict[str, bytes]:
    return {name: fingerprint(name, SPEC, ["same"]) for name in equal} | {
        name: fingerprint(name, SPEC, [f"of rank {rank}"]) for name in own
    }


def compared(held: Sequence[dict[str, bytes]], *, limit_bytes: int = 4096) -> tuple[list[set[str]], int]:
    """Return the tensors each rank considers equal, and the number of stages; all ranks end at the same stage."""
    ranks = [Comparison(each, limit_bytes=limit_bytes) for each in held]
    stages = 0
    while True:
        sent = [rank.message() for rank in ranks]
        if None in sent:
            assert set(sent) == {None}, "all ranks end at the same stage"
            return [rank.equal for rank in ranks], stages
        messages = [message for message in sent if message is not None]
        assert all(len(message) <= limit_bytes for message in messages)
        for rank in ranks:
            rank.receive(messages)
        stages += 1


def test_equal_ranks_need_one_digest() -> None:
    names = [f"w{number}" for number in range(6000)]
    held = prints(rank=0, equal=names)
    equal, stages = compared([held, dict(reversed(held.items())), held], limit_bytes=64)
    assert (equal, stages) == ([set(names)] * 3, 1)
    assert len(Comparison(held, limit_bytes=64).message() or b"") == 20


def test_one_tensor_that_differs_is_found_among_thousands() -> None:
    names = [f"w{number}" for number in range(6000)]
    held = [prints(rank=rank, equal=names, own=["mine"]) for rank in range(64)]
    equal, stages = compared(held)
    assert (equal, stages) == ([set(names)] * 64, 3)


def test_many_different_tensors_take_several_pages() -> None:
    names, own = [f"w{number}" for number in range(2000)], [f"own{number}" for number in range(2000)]
    equal, stages = compared([prints(rank=rank, equal=names, own=own) for rank in range(2)])
    assert all(len(each) >= 1990 and each <= set(names) for each in equal)
    assert equal[0] == equal[1]
    assert 2 < stages <= 2 + 12


def test_tensors_beyond_the_page_limit_count_as_different() -> None:
    names, own = [f"w{number}" for number in range(3000)], [f"own{number}" for number in range(3000)]
    equal, stages = compared([prints(rank=rank, equal=names, own=own) for rank in range(3)], limit_bytes=128)
    assert equal[0] == equal[1] == equal[2] < set(names)
    assert stages == 2 + MAX_PAGES


@pytest.mark.parametrize("limit_bytes", [64, 300, 4096])
def test_ranks_with_different_tensors_still_share_the_common_ones(limit_bytes: int) -> None:
    common = [f"w{number}" for number in range(20)]
    held = [
        prints(rank=0, equal=[*common, "ema", "of 0 and 1"]),
        prints(rank=1, equal=[*common, "of 0 and 1"]),
        prints(rank=2, equal=common, own=["stage"]),
    ]
    equal, _ = compared(held, limit_bytes=limit_bytes)
    assert equal[0] == equal[1] == equal[2] <= set(common)
    assert len(equal[0]) >= 15


def test_no_tensor_is_equal_if_a_rank_has_none() -> None:
    equal, stages = compared([prints(rank=0, equal=["w"]), {}, prints(rank=2, equal=["w"])])
    assert (equal, stages) == ([set()] * 3, 1)
    assert compared([{}, {}]) == ([set()] * 2, 1)


def test_a_fingerprint_covers_name_spec_and_every_digest() -> None:
    other = TensorSpec(kind="torch", dtype="float32", shape=(2, 2))
    one = fingerprint("a", SPEC, ["x", "y"])
    others = [
        fingerprint("b", SPEC, ["x", "y"]),
        fingerprint("a", other, ["x", "y"]),
        fingerprint("a", SPEC, ["x", "z"]),
        fingerprint("a", SPEC, ["xy"]),
    ]
    assert one not in others
    assert len(set(others)) == 4


@pytest.mark.parametrize("seed", range(40))
def test_only_tensors_that_are_equal_on_all_ranks_count_as_equal(seed: int) -> None:
    choose = random.Random(seed)
    ranks, names = choose.randint(2, 5), [f"t{number}" for number in range(choose.randint(1, 400))]
    values = {name: [0] * ranks for name in names}
    for name in choose.sample(names, choose.randint(0, len(names))):
        values[name][choose.randrange(ranks)] = choose.choice([1, -1])  # another value, or absent
    held = [
        {name: fingerprint(name, SPEC, [str(v[rank])]) for name, v in values.items() if v[rank] >= 0}
        for rank in range(ranks)
    ]
    equal, _ = compared(held, limit_bytes=choose.choice([64, 500, 4078]))
    assert all(each == equal[0] for each in equal)
    assert equal[0] <= {name for name, v in values.items() if not any(v)}

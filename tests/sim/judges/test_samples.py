"""The rule for samples: it accepts resized worlds and repeated steps, and rejects each doctored history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.judges.samples import RankSamples, Samples


def trained(samples: Samples, generation: int, size: int, begin: str, *, until: int, attempt: str) -> None:
    """Train all ranks of a generation up to a step, and save it."""
    for rank in range(size):
        mine = RankSamples(samples, generation=generation, rank=rank, world_size=size, attempt=begin)
        mine.train(until + 2)  # the two last steps are lost with the generation
        mine.save(attempt, until)


def history() -> Samples:
    samples = Samples()
    for generation, (size, until) in enumerate(((8, 7), (5, 12), (7, 13), (3, 31)), 1):
        before = f"a{generation - 1}" if generation > 1 else ""
        trained(samples, generation, size, before, until=until, attempt=f"a{generation}")
    return samples


def test_resized_worlds_that_repeat_steps_are_accepted() -> None:
    samples = history()
    assert [samples.problem(f"a{number}") for number in range(1, 5)] == [None] * 4
    assert samples.problems == []


@pytest.mark.parametrize("doctored", ["a step of its own", "a lost rank", "a later position"])
def test_a_doctored_history_is_rejected(doctored: str) -> None:
    samples = history()
    if doctored == "a step of its own":
        samples.used[2, 9][0] = samples.used[2, 10][0]
    elif doctored == "a lost rank":
        del samples.used[3, 13][6]
    else:
        saved = samples.saved["a1"]
        samples.saved["a1"] = replace(saved, position=saved.position.next(24, batches=2))
        trained(samples, 9, 4, "a1", until=12, attempt="a9")
        assert "step 8 used the samples" in str(samples.problem("a9"))
        return
    assert samples.problem("a4") is not None


def test_ranks_that_disagree_are_rejected() -> None:
    samples = history()
    samples.save("a1", replace(samples.saved["a1"], step=6))
    samples.begin(2, "a3")
    assert len(samples.problems) == 2

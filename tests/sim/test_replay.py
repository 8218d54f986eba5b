"""A run can be repeated by its seed, in the same process and in another one."""

from __future__ import annotations

import json
import os
import sys

import pytest

from strata.processes.children import Child
from tests.conftest import ROOT
from tests.sim.run import run_seed

SEED = 7


def digest_in_another_process(seed: int, hash_seed: str) -> str:
    child = Child.start(
        [sys.executable, "-m", "tests.sim", "--seed", str(seed)],
        name="replay",
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=ROOT,
        log=ROOT / ".strata" / "tmp" / f"replay-{os.getpid()}-{hash_seed}.log",
    )
    child.join(240)
    assert child.log is not None
    result = json.loads(child.log.read_text())
    child.log.unlink()
    digest = result["digest"]
    assert isinstance(digest, str)
    return digest


@pytest.mark.timeout(300)
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    first = digest_in_another_process(SEED, "1")
    assert digest_in_another_process(SEED, "2") == first


@pytest.mark.timeout(300)
def test_a_seed_repeats_its_run_in_one_process_and_another_seed_differs() -> None:
    digests = [run_seed(seed).digest for seed in (SEED, SEED, SEED + 1)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]

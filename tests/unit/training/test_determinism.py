from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.errors import ConfigError, InvalidArgument

torch = pytest.importorskip("torch")

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put torch's settings, the random states and the environment back."""
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.use_deterministic_algorithms(False)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_seed_gives_the_same_random_numbers_of_python_numpy_and_torch() -> None:
    strata.deterministic(7)
    first = drawn()
    strata.deterministic(7)
    assert drawn() == first
    strata.deterministic(np.int64(8))  # type: ignore[arg-type]  # an integer of NumPy counts as one
    assert all(a != b for a, b in zip(drawn(), first, strict=True))


def test_torch_uses_deterministic_algorithms_and_keeps_its_precision() -> None:
    torch.backends.cudnn.benchmark = True
    precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    strata.deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == precision
    assert torch.utils.deterministic.fill_uninitialized_memory
    strata.deterministic(warn_only=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(
    ("before", "after"), [("", ":4096:8"), (":0:0", ":4096:8"), (":4096:8", ":4096:8"), (":16:8", ":16:8")]
)
def test_cublas_gets_deterministic_workspaces_unless_it_has_them(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before:
        monkeypatch.setenv(WORKSPACE, before)
    strata.deterministic()
    assert os.environ[WORKSPACE] == after


@pytest.mark.parametrize(("value", "named"), [("", "is not set"), (":0:0", "is :0:0")])
def test_after_the_first_use_of_cuda_other_workspaces_are_an_error_and_nothing_is_changed(
    value: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    if value:
        monkeypatch.setenv(WORKSPACE, value)
    before = random.getstate()
    with pytest.raises(ConfigError, match=rf"{WORKSPACE} {named}, and this process has used CUDA already"):
        strata.deterministic(7)
    assert random.getstate() == before
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get(WORKSPACE, "") == value
    monkeypatch.setenv(WORKSPACE, ":16:8")
    strata.deterministic(7)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True])
def test_a_seed_that_numpy_refuses_is_refused(seed: object) -> None:
    with pytest.raises(InvalidArgument, match="seed"):
        strata.deterministic(seed)  # type: ignore[arg-type]  # what is tested


def test_without_torch_only_python_and_numpy_are_seeded(tmp_path: Path) -> None:
    code = (
        "import random, sys, numpy, strata; strata.deterministic(3); first = random.random(), numpy.random.rand()\n"
        "strata.deterministic(3); assert (random.random(), numpy.random.rand()) == first\n"
        "import os; print('torch' in sys.modules, 'grpc' in sys.modules, 'CUBLAS_WORKSPACE_CONFIG' in os.environ)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["False", "False", "False"]

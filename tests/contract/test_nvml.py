"""The fake NVML has the interface of the real binding: same names, same arguments, same constants."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FAKE = Path(__file__).resolve().parent.parent / "fake_nvml" / "pynvml.py"


@pytest.fixture(scope="module")
def fake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_pynvml", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks up the module of a class there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def real() -> Any:
    return pytest.importorskip("pynvml", reason="the extra gpu is not installed")


def test_the_fake_has_the_functions_of_the_real_module(fake: ModuleType, real: Any) -> None:
    functions = [name for name in vars(fake) if name.startswith("nvml") and callable(getattr(fake, name))]
    assert len(functions) > 10
    for name in functions:
        ours, theirs = (inspect.signature(getattr(module, name)) for module in (fake, real))
        if any(p.kind is p.VAR_POSITIONAL for p in theirs.parameters.values()):
            continue  # wrapped by a decorator that hides its arguments
        assert list(ours.parameters) == list(theirs.parameters), name


def test_the_fake_has_the_constants_of_the_real_module(fake: ModuleType, real: Any) -> None:
    constants = {
        name: value for name, value in vars(fake).items() if isinstance(value, int) and name[0] != "_"
    }
    assert {name: getattr(real, name) for name in constants} == constants
    assert real.NVMLError(real.NVML_ERROR_GPU_IS_LOST).value == fake.NVMLError(15).value

"""The house rule that unit tests name nothing private of the product: what it refuses, and what it allows."""

from __future__ import annotations

import pytest

from scripts.check_tree import private_names


@pytest.mark.parametrize(
    "line",
    [
        "rig.writer._arenas",
        "Replicator._at_exit",
        "manager._tiers.wait()",
        "from strata.coordinator.main import _name",
        "from strata.coordinator._main import name",
        "import strata._main",
        "from strata.core.datasets.assignment import (\n    MAX_SHARDS,\n    _divided,\n)",
        'monkeypatch.setattr(local_file, "_libc", None)',
        'monkeypatch.setattr("strata.session.fork._user", None)',
        'getattr(manager, "_storage")',
    ],
)
def test_a_private_name_of_the_product_is_refused(line: str) -> None:
    assert len(list(private_names(f"x = 1\n{line}\n"))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "self._fault(cls._made)",
        "from strata.coordinator.main import replica_name",
        "from __future__ import annotations",
        "os._exit(target._version)",
        "value.__class__",
        'monkeypatch.setattr(cuda_copies, "torch_view", None)',
        'step("_a")',
        "_made = 1",
    ],
)
def test_other_names_are_allowed(line: str) -> None:
    assert list(private_names(line)) == []


def test_it_says_where() -> None:
    assert list(private_names("x = 1\nx._a.b._c\n")) == [(2, "_c"), (2, "_a")]

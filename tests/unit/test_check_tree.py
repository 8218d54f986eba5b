"""The rules of scripts/check_tree.py: private names in unit tests, retired words, crowded folders."""

from __future__ import annotations

import pytest

from scripts.check_tree import crowded, private_names, retired


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


def test_private_names_are_found_with_their_lines() -> None:
    assert list(private_names("x = 1\nx._a.b._c\n")) == [(2, "_c"), (2, "_a")]


@pytest.mark.parametrize(
    "line",
    [
        "class Keeper: ...",
        "def take_chore(self): ...",
        "def f(hurry): ...",
        "HURRY_S = 1.0",
        "self._untold = []",
        "import strata.x as supervisor",
        "for trouble in findings: ...",
    ],
)
def test_a_retired_word_is_refused_where_an_identifier_is_defined(line: str) -> None:
    assert len(list(retired(f"x = 1\n{line}\n"))) == 1


@pytest.mark.parametrize(
    "line", ["bookkeeper = 1", "indoors = 1", "x = 'a chore'", "# hurry", "torch.hurry()"]
)
def test_other_words_are_allowed(line: str) -> None:
    assert list(retired(line)) == []


def test_a_folder_of_too_many_files_is_named() -> None:
    names = [f"strata/x/{number}.py" for number in range(19)] + [
        f"tests/ranks/{number}.py" for number in range(40)
    ]
    assert list(crowded(names)) == ["strata/x: 19 files, at most 18"]

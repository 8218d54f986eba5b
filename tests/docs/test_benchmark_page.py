"""The page of benchmarks agrees with the measured results."""

from __future__ import annotations

from typing import Any

from benchmarks.__main__ import page


def result(benchmark: str, summary: str, machine: str = "2 cores (A), Python 3.11.7") -> dict[str, Any]:
    """Return a benchmark's result from its JSON file."""
    return {"benchmark": benchmark, "summary": summary, "goal": "a | b", "met": True, "machine": machine}


def test_a_row_stays_until_it_is_measured_again() -> None:
    both = page([result("barrier", "old"), result("held", "kept")])
    fresh = page([result("barrier", "new", "4 cores (B), Python 3.12.1")], before=both)
    assert "| `barrier` | new | a \\| b | yes |" in fresh
    assert "| `held` | kept | a \\| b | yes |" in fresh
    assert "old" not in fresh
    assert "\n2 cores (A), Python 3.11.7; 4 cores (B), Python 3.12.1.\n" in fresh


def test_writing_the_page_without_a_result_changes_nothing() -> None:
    written = page([result("barrier", "one"), result("held", "two")])
    assert page([], before=written) == written


def test_a_removed_benchmark_leaves_the_page() -> None:
    written = page([result("barrier", "one")]).replace("`barrier`", "`no_longer`")
    assert "no_longer" not in page([result("held", "two")], before=written)

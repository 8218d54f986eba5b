"""Counters and histograms without a library."""

from __future__ import annotations

import pytest

from strata.observe.metrics import Histogram, counters, histograms


def test_a_child_is_made_once_and_counts() -> None:
    family = counters("x_total", "Some.", "kind")
    child = family.child("a")
    child.add()
    family.child("a").add(2)
    assert family.child("a") is child
    assert child.value == 3
    assert family.child("b").value == 0


def test_a_metric_without_labels_starts_at_zero() -> None:
    assert counters("x_total", "Some.").children[()].value == 0
    assert histograms("x_seconds", "Some.").children[()].sum == 0


def test_label_values_must_fit() -> None:
    with pytest.raises(ValueError, match="labels"):
        counters("x_total", "Some.", "kind").child()


def test_a_bound_belongs_to_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert list(histogram.cumulated()) == [(1.0, 2), (2.0, 4), (float("inf"), 5)]
    assert histogram.sum == 14.0

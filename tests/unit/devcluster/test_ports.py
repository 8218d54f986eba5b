"""Ports for processes that are about to start."""

from __future__ import annotations

import random

from strata.devcluster.ports import free_ports


def test_programs_with_the_same_seed_get_different_ports_and_keep_their_sequence() -> None:
    """Trainers use the same seed for `random`, but two trainers on one host must not choose the same port."""
    before = random.getstate()
    try:
        random.seed(0)
        first = free_ports(5)
        drawn = random.random()
        random.seed(0)
        second = free_ports(5)
        assert first != second
        random.seed(0)
        assert random.random() == drawn
    finally:
        random.setstate(before)

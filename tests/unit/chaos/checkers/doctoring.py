"""Doctored histories by the rule that each violates, for `test_doctored`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.unit.chaos.story import Story

Doctor = Callable[[Story, Path], None]
DOCTORS: dict[str, list[Doctor]] = {}
RESTORED_DOCTORS: dict[str, list[Doctor]] = {}
"""Doctors for a run in which etcd was lost and restored."""


def breaks(rule: str, *, restored: bool = False) -> Callable[[Doctor], Doctor]:
    """Register a function that makes a good run, or a `restored` one, violate `rule`."""

    def note(doctor: Doctor) -> Doctor:
        (RESTORED_DOCTORS if restored else DOCTORS).setdefault(rule, []).append(doctor)
        return doctor

    return note

"""Doctored histories, by the rule that each breaks: what `test_doctored` goes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.unit.chaos.story import Story

Doctor = Callable[[Story, Path], None]
DOCTORS: dict[str, list[Doctor]] = {}
RESTORED_DOCTORS: dict[str, list[Doctor]] = {}
"""Of a run in which etcd was lost and restored."""


def breaks(rule: str, *, restored: bool = False) -> Callable[[Doctor], Doctor]:
    """Note that a function makes a good run break `rule`, one that was `restored` if so."""

    def note(doctor: Doctor) -> Doctor:
        (RESTORED_DOCTORS if restored else DOCTORS).setdefault(rule, []).append(doctor)
        return doctor

    return note

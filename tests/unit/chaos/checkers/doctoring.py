"""Doctored histories, by the rule that each breaks: what `test_doctored` goes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.unit.chaos.story import Story

Doctor = Callable[[Story, Path], None]
DOCTORS: dict[str, list[Doctor]] = {}


def breaks(rule: str) -> Callable[[Doctor], Doctor]:
    """Note that a function makes a good run break `rule`."""

    def note(doctor: Doctor) -> Doctor:
        DOCTORS.setdefault(rule, []).append(doctor)
        return doctor

    return note

"""The backends by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata_chaos.backends.base import Backend
from strata_chaos.backends.netns import NetnsBackend
from strata_chaos.backends.process import ProcessBackend

ALL: Final[Mapping[str, Backend]] = {backend.name: backend for backend in (ProcessBackend(), NetnsBackend())}

"""ring-v1."""

from __future__ import annotations

from typing import Final

RING: Final = "ring-v1"

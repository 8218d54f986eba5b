"""The names of the values that a program reports of its training (`run.report`)."""

from __future__ import annotations

import re
from typing import Final

MAX_NAMES: Final = 64
"""Of one job: each has a chart at every replica."""
MAX_NAME_CHARS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def is_name(text: str) -> bool:
    """Tell whether a value may be reported under this name."""
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None

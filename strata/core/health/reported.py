"""Names of the training values that a program reports by `run.report`."""

from __future__ import annotations

import re
from typing import Final

REPORTED_KEY: Final = "strata.reported"
"""The key of the newest reported numbers in a checkpoint's metadata: a JSON object."""
MAX_NAMES: Final = 64
"""The limit per job: each name has a chart at every replica."""
MAX_NAME_CHARS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def is_name(text: str) -> bool:
    """Return whether a value may be reported under this name."""
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None

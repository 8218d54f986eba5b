"""What is said while the process ends, when nobody can be told any other way."""

from __future__ import annotations

import sys


def tell_on_stderr(text: str) -> None:
    """Say it on stderr: a log may go nowhere, or be shut down by now."""
    if sys.stderr is not None:
        sys.stderr.write(f"strata: {text}\n")
        sys.stderr.flush()

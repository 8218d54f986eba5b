"""Reports a rank's events to its test: one JSON line an event, written at once."""

from __future__ import annotations

import json
import os
import sys


def say(event: str, **facts: object) -> None:
    """Print one event; a single write, so that lines of several ranks never mix."""
    place = {
        "rank": int(os.environ.get("RANK", "-1")),
        "generation": int(os.environ.get("STRATA_GENERATION", "0")),
    }
    sys.stdout.write(json.dumps({"event": event, **place, **facts}) + "\n")
    sys.stdout.flush()

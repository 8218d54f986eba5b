"""How a rank tells its test what happens: one JSON line an event, written at once."""

from __future__ import annotations

import json
import os
import sys


def say(event: str, **facts: object) -> None:
    """Print one event; a single write, so that lines of several ranks never mix."""
    place = {"rank": int(os.environ["RANK"]), "generation": int(os.environ["STRATA_GENERATION"])}
    sys.stdout.write(json.dumps({"event": event, **place, **facts}) + "\n")
    sys.stdout.flush()

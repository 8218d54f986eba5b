"""`strata top` on sample resources: `python -m tests.unit.cli.top_program [broken]`."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from strata.cli.top.command import console, live
from strata.cli.top.reading import look
from tests.unit.cli import looked


class Client:
    """A client that answers with the resources of `looked`; the training advances by one step a request."""

    def __init__(self) -> None:
        self.timeout_s = 1.0
        self.step = 1204
        self.broken = False

    def resource(self, path: str) -> Any:
        """Return the resource of a path."""
        return json.loads(msgspec.json.encode(self._made(path.partition("?")[0])))

    def _made(self, path: str) -> object:
        match path.strip("/").split("/"):
            case ["cluster"]:
                return looked.cluster()
            case ["jobs"]:
                rows = looked.jobs_seen().jobs
                return {"jobs": rows, "total": len(rows), "next_page_token": ""}
            case ["jobs", _, "ranks", number]:
                return looked.rank(int(number))
            case ["jobs", _, part]:
                return {} if self.broken else getattr(looked, part)()
            case _:
                self.step += 1
                return looked.job(summary=looked.summary(progress=looked.progress(self.step)))


if __name__ == "__main__":
    client = Client()
    first = look(client.resource, None)
    client.broken = "broken" in sys.argv
    sys.exit(live(console(), client, first))

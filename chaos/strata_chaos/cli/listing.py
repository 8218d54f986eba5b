"""`strata-chaos list`: the scenarios, faults and backends, and which of them this machine can run."""

from __future__ import annotations

import json
import sys

from strata.cli.console.output import Json, print_table


def list_(as_json: Json = False) -> None:
    """List the scenarios, the faults and the backends; for those not available here, say why.

    Example: strata-chaos list
    """
    from strata_chaos import backends, faults, scenario  # noqa: PLC0415  # as in check

    scenarios = [scenario.read(path) for path in scenario.shipped()]
    if as_json:
        body = {
            "scenarios": [
                {"name": s.name, "title": s.title, "duration_s": s.duration_s, "backends": list(s.backends)}
                for s in scenarios
            ],
            "faults": [
                {
                    "name": fault.name,
                    "summary": fault.summary,
                    "available": {name: fault.available(name) or True for name in backends.ALL},
                }
                for fault in faults.ALL.values()
            ],
            "backends": [
                {"name": backend.name, "summary": backend.summary, "available": backend.available() or True}
                for backend in backends.ALL.values()
            ],
        }
        sys.stdout.write(json.dumps(body, indent=2) + "\n")
        return
    print_table(
        "Scenarios",
        ("name", "backends", "seconds", "purpose"),
        [(s.name, ", ".join(s.backends), f"{s.duration_s:g}", s.title) for s in scenarios],
        empty="no scenario is installed",
    )
    sys.stdout.write("\n")
    print_table(
        "Faults",
        ("name", "backends", "effect"),
        [
            (f.name, ", ".join(name for name in backends.ALL if not f.available(name)), f.summary)
            for f in faults.ALL.values()
        ],
        empty="there is no fault",
    )
    sys.stdout.write("\n")
    print_table(
        "Backends",
        ("name", "available", "description"),
        [(b.name, b.available() or "yes", b.summary) for b in backends.ALL.values()],
        empty="there is no backend",
    )

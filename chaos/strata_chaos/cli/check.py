"""`strata-chaos check`: judge a saved run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from strata.cli.console.output import Json


def check(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, as `strata-chaos run` printed it.")],
    as_json: Json = False,
) -> None:
    """Judge a saved run again, and exit as the run would have: 0, 1, 2 or 3.

    Example: strata-chaos check .strata/chaos/smoke-1-process
    """
    from strata_chaos.judgement import report  # noqa: PLC0415  # each command pays for its own imports
    from strata_chaos.run import runner  # noqa: PLC0415  # each command pays for its own imports
    from strata_chaos.run.folder import RunFolder  # noqa: PLC0415

    result = runner.check(RunFolder.open(folder))
    sys.stdout.write(json.dumps(report.body(result), indent=2) + "\n" if as_json else report.text(result))
    raise typer.Exit(result.exit)

"""The folder of a run: its inputs, its histories and its reports.

run.json      the scenario, the seed, the plan, the versions: everything that a repeat of the run needs
*.jsonl       the histories of observer, nemesis, each workload and its clients
report.txt    the report for people; report.json holds the same for programs
logs/         the logs of the run's own programs: observer, workloads, clients
cluster/      etcd's data and the cluster's logs; removed after a run that passed, unless kept
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from strata.errors import ConfigError
from strata_chaos.faults.record import Injury
from strata_chaos.faults.schedule import PlannedFault
from strata_chaos.scenario import Scenario, parse

SCHEMA: Final = 1
_RUN, _REPORT, _TEXT = "run.json", "report.json", "report.txt"


class RunFolder:
    """One folder. `create` makes it, `open` opens the folder of an earlier run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, base: Path, name: str) -> RunFolder:
        """Return a new folder below `base`; raise `ConfigError` if it cannot be made."""
        for number in range(1, 1000):
            path = base / (name if number == 1 else f"{name}.{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"cannot make {path}: {error.strerror}", hint="use another folder (--out)"
                ) from None
            return cls(path)
        raise ConfigError(f"{base} is full of runs of that name", hint="remove old ones")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the folder of a run; raise `ConfigError` if `path` is not one."""
        if not (path / _RUN).is_file():
            raise ConfigError(
                f"{path} is not the folder of a run: it has no {_RUN}",
                hint="name the folder that `strata-chaos run` printed",
            )
        return cls(path)

    @property
    def cluster(self) -> Path:
        """Data and logs of etcd and the coordinators."""
        return self.path / "cluster"

    # -- run.json

    def write_run(
        self,
        scenario: Scenario,
        plan: Sequence[PlannedFault],
        *,
        seed: int,
        duration_s: float,
        backend: str,
        started: str,
    ) -> None:
        """Write run.json before the run begins."""
        body = {
            "schema": SCHEMA,
            "scenario": scenario.name,
            "path": scenario.path,
            "source": scenario.source,
            "seed": seed,
            "duration_s": duration_s,
            "backend": backend,
            "started": started,
            "versions": {
                "strata": metadata.version("strata-control"),
                "python": sys.version.split()[0],
                "kernel": platform.release(),
            },
            "plan": [
                {"number": p.number, "fault": p.fault, "at_s": p.at_s, "hold_s": p.hold_s, "choice": p.choice}
                for p in plan
            ],
        }
        self._write(_RUN, json.dumps(body, indent=1) + "\n")

    def run(self) -> Mapping[str, Any]:
        """Return the contents of run.json."""
        return self._read(_RUN)

    def scenario(self) -> Scenario:
        """Return the scenario as it was at the time of the run."""
        run = self.run()
        return parse(run["source"], name=run["scenario"], path=run.get("path", ""))

    # -- the reports

    def write_report(self, text: str, body: Mapping[str, Any]) -> None:
        """Write the report as text and as JSON."""
        self._write(_TEXT, text)
        self._write(_REPORT, json.dumps(body, indent=1) + "\n")

    def report(self) -> Mapping[str, Any]:
        """Return the contents of report.json; empty if the run ended before writing it."""
        return self._read(_REPORT) if (self.path / _REPORT).is_file() else {}

    def injuries(self) -> list[Injury]:
        """Return the injuries in report.json: the effect of each fault."""
        return [Injury.from_json(body) for body in self.report().get("injuries", [])]

    def drop_cluster(self) -> None:
        """Remove etcd's data and the cluster's logs."""
        shutil.rmtree(self.cluster, ignore_errors=True)

    def _read(self, name: str) -> Mapping[str, Any]:
        try:
            body = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {self.path / name}: {error}") from None
        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            raise ConfigError(f"{self.path / name} was written by another version of strata-chaos")
        return body

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

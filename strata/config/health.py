"""`HealthConfig`: how an agent reacts to stalled ranks and to failed accelerators."""

# `setting` returns a dataclass field, as `dataclasses.field` does
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strata.config.loading import setting
from strata.documents.parsing import MAX_NUMBER
from strata.errors import ConfigError

REPORT = "report"
EVICT = "evict"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """When an agent reports a rank, kills a rank or drains its own member; and which evidence the agent writes."""

    on_stall: str = setting(
        "run.on_stall",
        default=REPORT,
        doc="what to do with a rank that stands still: report it, or evict it (kill it, which begins a generation)",
    )
    stall_factor: float = setting(
        "run.stall_factor",
        default=10.0,
        doc="how many times its usual time a step or another phase may take",
    )
    stall_limits: tuple[str, ...] = setting(
        "run.stall_limits",
        default=(),
        doc="limits set for single phases, as phase=seconds by commas: step=60,eval=900",
    )

    devices: bool = setting(
        "run.devices", default=True, doc="watch this node's NVIDIA devices, where there are any"
    )
    drain_on_fault: bool = setting(
        "run.drain_on_fault", default=True, doc="drain this member when one of its devices fails for good"
    )
    ignored_xids: tuple[str, ...] = setting(
        "run.ignored_xids", default=(), doc="XIDs after which this member is not drained, by commas"
    )
    telemetry_s: float = setting(
        "run.telemetry_s", default=5.0, doc="how often this node's devices are read and reported"
    )
    traces: str = setting(
        "run.traces",
        default=".strata/traces",
        doc="where NCCL's flight recorder writes its record of a rank that stands still",
    )

    def __post_init__(self) -> None:
        if self.on_stall not in {REPORT, EVICT}:
            raise ConfigError(f"--on-stall must be {REPORT} or {EVICT}, not {self.on_stall!r}")
        if self.stall_factor < 1:
            raise ConfigError("--stall-factor must be at least 1")
        if not 0.5 <= self.telemetry_s <= 3600:
            raise ConfigError("run.telemetry_s must be 0.5 to 3600 seconds")
        self.phase_limits_s()
        self.ignored()

    def phase_limits_s(self) -> Mapping[str, float]:
        """Return the limits in seconds by phase; `ConfigError` for an invalid entry."""
        limits: dict[str, float] = {}
        for entry in self.stall_limits:
            phase, equals, seconds = entry.partition("=")
            try:
                limits[phase.strip().lower()] = float(seconds)
            except ValueError:
                equals = ""
            if not equals or not phase.strip() or not 0 < limits[phase.strip().lower()] <= MAX_NUMBER:
                raise ConfigError(
                    f"{entry!r} is no limit of a phase", hint="write phase=seconds, for example eval=900"
                )
        return limits

    def ignored(self) -> frozenset[int]:
        """Return the XIDs that do not drain this member; `ConfigError` for an entry that is not a number."""
        try:
            return frozenset(int(xid) for xid in self.ignored_xids)
        except ValueError:
            raise ConfigError(f"run.ignored_xids are numbers, not {','.join(self.ignored_xids)!r}") from None

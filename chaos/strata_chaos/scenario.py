"""Scenarios: TOML files that name the workloads, the faults with their times, and the expected properties.

`docs/chaos/README.md` has the table of a scenario's fields. An unknown field is refused with the list of known
fields, so that no line of the file is silently without effect.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from strata.errors import ConfigError

BACKENDS: Final = ("process", "netns")
_LEAST_GAP_S: Final = 0.5
_BESIDE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The etcd members and coordinators of the cluster, each on its own host if the backend has hosts."""

    etcd: int = 3
    coordinators: int = 3
    detect_s: float = 5.0
    tls: bool = False
    """Whether all connections use TLS with client certificates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One program of `strata_chaos.workloads`. Each workload has its own job.

    `members` is the number of members that the job must have while no fault is in force (0: not checked). `barriers`
    says whether the program passes barriers all the time. `options` become command line options of the program,
    unchanged.
    """

    name: str
    clients: int = 4
    members: int = 0
    barriers: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedFault:
    """A fault at a fixed time, repeated every `every_s` seconds if `every_s` is not 0. The fault must take effect."""

    name: str
    at_s: float
    hold_s: float
    every_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomFaults:
    """Faults drawn by weight. Each begins `gap_s` after the previous fault and lasts `hold_s`: ranges of seconds.

    At most `overlap` faults are in force at once.
    """

    weights: Mapping[str, float]
    gap_s: tuple[float, float] = (1.0, 5.0)
    hold_s: tuple[float, float] = (1.0, 6.0)
    overlap: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """Expected properties beyond safety, from the first fault to the end of the run."""

    no_member_dies: bool = False
    no_new_generation: bool = False
    no_barrier_fails: bool = False
    no_save_fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The content of one scenario file."""

    name: str
    title: str
    duration_s: float
    backends: tuple[str, ...] = BACKENDS
    topology: Topology = field(default_factory=Topology)
    workloads: tuple[Workload, ...] = ()
    script: tuple[ScriptedFault, ...] = ()
    random: RandomFaults | None = None
    recovery_s: float = 60.0
    expect: Expectations = field(default_factory=Expectations)
    source: str = ""
    """The text of the file. A saved run keeps it."""
    path: str = ""
    """Path of a user's own scenario file; empty for a shipped scenario."""

    @property
    def scenario_argument(self) -> str:
        """The value of `--scenario` that selects this scenario."""
        return self.path or self.name

    @property
    def fault_names(self) -> tuple[str, ...]:
        """Names of all faults that may happen, in the order of the file."""
        drawn = self.random.weights if self.random is not None else {}
        return tuple(dict.fromkeys([*(entry.name for entry in self.script), *drawn]))


def scenario_folder() -> Path:
    """Return the folder of the shipped scenarios: beside the package in a checkout, inside it in a wheel."""
    installed = _BESIDE / "scenarios"
    return installed if installed.is_dir() else _BESIDE.parent / "scenarios"


def shipped() -> list[Path]:
    """Return the files of the shipped scenarios, by name."""
    return sorted(scenario_folder().glob("*.toml"))


def find(name: str) -> Scenario:
    """Return the scenario with that name or in that file; a `ConfigError` lists the known names."""
    if name.endswith(".toml") or "/" in name:
        return read(Path(name))
    for path in shipped():
        if path.stem == name:
            return read(path)
    raise ConfigError(
        f"there is no scenario {name!r}",
        hint=f"one of {', '.join(path.stem for path in shipped())}, or the path of a .toml file",
    )


def read(path: Path) -> Scenario:
    """Return the scenario in a file; a `ConfigError` names the mistake in the file."""
    own = "" if path.parent == scenario_folder() else str(path.absolute())
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text") from None
    return parse(text, name=path.stem, path=own)


def parse(text: str, *, name: str, path: str = "") -> Scenario:
    """Return the scenario that `text` describes; a `ConfigError` names the scenario and the field."""
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"scenario {name}: not TOML: {error}") from None
    table = _Table(f"scenario {name}", body)
    title = table.text("title")
    duration_s = table.number("duration_s", least=1.0)
    backends = table.names("backends", BACKENDS, default=BACKENDS)
    recovery_s = table.number("recovery_s", default=60.0, least=1.0)
    scenario = Scenario(
        name=name,
        title=title,
        duration_s=duration_s,
        backends=backends,
        recovery_s=recovery_s,
        topology=_topology(table.table("topology")),
        workloads=tuple(_workload(item) for item in table.tables("workload")),
        script=tuple(_scripted(item) for item in table.tables("fault")),
        random=_random(table.table("random")) if "random" in body else None,
        expect=_expectations(table.table("expect")),
        source=text,
        path=path,
    )
    table.done()
    return scenario


def _topology(table: _Table) -> Topology:
    found = Topology(
        etcd=table.whole("etcd", default=3, least=1),
        coordinators=table.whole("coordinators", default=3, least=1),
        detect_s=table.number("detect_s", default=5.0, least=0.5),
        tls=table.flag("tls"),
    )
    if found.etcd not in {1, 3}:
        raise ConfigError(f"{table.where}: etcd has 1 or 3 members, not {found.etcd}")
    table.done()
    return found


def _workload(table: _Table) -> Workload:
    options = table.table("options")
    found = Workload(
        name=table.text("name"),
        clients=table.whole("clients", default=4, least=1),
        members=table.whole("members", default=0, least=0),
        barriers=table.flag("barriers"),
        options={key: _as_argument(value) for key, value in options.take_all().items()},
    )
    table.done()
    return found


def _scripted(table: _Table) -> ScriptedFault:
    found = ScriptedFault(
        name=table.text("name"),
        at_s=table.number("at_s", least=0.0),
        hold_s=table.number("hold_s", least=0.0),
        every_s=table.number("every_s", default=0.0, least=0.0),
    )
    if found.every_s and found.every_s < found.hold_s:
        raise ConfigError(f"{table.where}: every_s {found.every_s:g} is below hold_s {found.hold_s:g}")
    table.done()
    return found


def _random(table: _Table) -> RandomFaults:
    weights_table = table.table("weights")
    weights = {name: weights_table.number(name, least=0.0) for name in weights_table.left()}
    if not any(weights.values()):
        raise ConfigError(f"{table.where}: no fault has a weight", hint="write [random.weights]")
    found = RandomFaults(
        weights=weights,
        gap_s=table.span("gap_s", default=(1.0, 5.0)),
        hold_s=table.span("hold_s", default=(1.0, 6.0)),
        overlap=table.whole("overlap", default=1, least=1),
    )
    if found.gap_s[1] < _LEAST_GAP_S:
        raise ConfigError(f"{table.where}: gap_s must reach {_LEAST_GAP_S:g}, or faults have no end")
    table.done()
    return found


def _expectations(table: _Table) -> Expectations:
    found = Expectations(
        no_member_dies=table.flag("no_member_dies"),
        no_new_generation=table.flag("no_new_generation"),
        no_barrier_fails=table.flag("no_barrier_fails"),
        no_save_fails=table.flag("no_save_fails"),
    )
    table.done()
    return found


def _as_argument(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Table:
    """One table of the file. Each field is taken once, with its type; a field left over is an error."""

    def __init__(self, where: str, body: Mapping[str, Any]) -> None:
        self.where = where
        self._body = dict(body)
        self._known: list[str] = []

    def take(self, key: str) -> Any:
        """Return the field's value, or None if the table lacks it."""
        self._known.append(key)
        return self._body.pop(key, None)

    def take_all(self) -> dict[str, Any]:
        """Return and take all fields not taken yet."""
        body, self._body = self._body, {}
        return body

    def left(self) -> list[str]:
        """Return the names of the fields not taken yet."""
        return list(self._body)

    def done(self) -> None:
        """Raise `ConfigError` if a field was not taken."""
        if self._body:
            raise ConfigError(
                f"{self.where}: there is no field {min(self._body)!r}",
                hint=f"known: {', '.join(sorted(set(self._known)))}",
            )

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.where}: {key} must be a text, not {value!r}")
        return value

    def number(self, key: str, *, least: float, default: float | None = None) -> float:
        value = self.take(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e6:
            raise ConfigError(f"{self.where}: {key} must be a number of at least {least:g}, not {value!r}")
        return float(value)

    def whole(self, key: str, *, default: int, least: int) -> int:
        value = self.take(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{self.where}: {key} must be a whole number of at least {least}, not {value!r}"
            )
        return value

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{self.where}: {key} must be true or false, not {value!r}")
        return bool(value)

    def span(self, key: str, *, default: tuple[float, float]) -> tuple[float, float]:
        value = self.take(key)
        if value is None:
            return default
        numbers = isinstance(value, list) and all(isinstance(v, int | float) for v in value)
        if not numbers or len(value) != 2 or not 0 <= value[0] <= value[1]:
            raise ConfigError(f"{self.where}: {key} must be [least, most] in seconds, not {value!r}")
        return float(value[0]), float(value[1])

    def names(self, key: str, allowed: Sequence[str], *, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, list) or not value or not set(value) <= set(allowed):
            raise ConfigError(f"{self.where}: {key} must be some of {', '.join(allowed)}, not {value!r}")
        return tuple(value)

    def table(self, key: str) -> _Table:
        value = self.take(key)
        if not isinstance(value, dict | None):
            raise ConfigError(f"{self.where}: {key} must be a table", hint=f"write [{key}]")
        return _Table(f"{self.where}, {key}", value or {})

    def tables(self, key: str) -> list[_Table]:
        value = self.take(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ConfigError(f"{self.where}: {key} must be a list of tables", hint=f"write [[{key}]]")
        return [_Table(f"{self.where}, {key} {number}", item) for number, item in enumerate(value, 1)]

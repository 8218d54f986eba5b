"""Loads configurations: flag > environment > TOML file > default.

A configuration is a frozen dataclass. `setting` makes each of its fields, and gives the field's place in the file and
in the environment. `load` fills the configuration; its errors name the source of a wrong value. Fields are `str`,
`int`, `float`, `bool`, `Path | None`, `tuple[str, ...]`, or another such dataclass.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from strata.documents.parsing import MAX_INTEGER, MAX_NUMBER, SMALL_CONFIG, shown, toml_table
from strata.documents.reading import NotADocument, read_regular
from strata.errors import ConfigError

C = TypeVar("C")

FILES: Final = (Path("strata.toml"), Path("/etc/strata/strata.toml"))
"""The default files: only the first existing file is read."""

SHARED: Final = frozenset({"cluster", "job", "endpoints", "detect_s", "insecure"})
"""The keys allowed at the top level of the file: settings that more than one command reads."""

_HINT: Final = (
    "strata.toml has tables of settings, such as [run], each with lines like slots = 8: docs/run.md"
)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def setting(toml: str, *, default: Any, doc: str, env: str | None = None) -> Any:
    """Return a dataclass field that is read from the file's key `toml` (`table.key`) and from the variable `env`.

    Without `env`, the variable's name is `STRATA_` and the file's key in capitals.
    """
    name = env or "STRATA_" + toml.replace(".", "_").upper()
    return dataclasses.field(default=default, metadata={"toml": toml, "env": name, "doc": doc})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, as shown in the documentation and `--help`."""

    toml: str
    env: str
    doc: str
    default: Any


def settings(cls: type[Any]) -> Iterator[Setting]:
    """Yield every setting of `cls` in the order of its fields, nested ones included."""
    for field in dataclasses.fields(cls):
        nested = _nested(_hint(cls, field.name))
        if nested is not None:
            yield from settings(nested)
        else:
            yield Setting(
                toml=field.metadata["toml"],
                env=field.metadata["env"],
                doc=field.metadata["doc"],
                default=field.default,
            )


def read_file(path: Path | None) -> tuple[Mapping[str, Any], str]:
    """Return the content and the name of the file at `path`, or of the first of `FILES` that exists.

    If no default file exists, the content is empty. Raise `ConfigError` if `path` does not exist, or if a file cannot
    be read.
    """
    candidates = FILES if path is None else (path,)
    for candidate in candidates:
        try:
            data = read_regular(candidate, most_bytes=SMALL_CONFIG.size_bytes)
            return toml_table(data, SMALL_CONFIG), str(candidate)
        except FileNotFoundError:
            if path is not None:
                raise ConfigError(f"there is no file {path}", hint="check --config") from None
        except OSError as error:
            raise ConfigError(
                f"cannot read {candidate}: {error.strerror}", hint="check its path and its owner"
            ) from None
        except NotADocument as error:
            raise ConfigError(f"cannot read {candidate}: {error}", hint="name a regular file") from None
        except ValueError as error:
            raise ConfigError(f"{candidate} is not TOML: {error}", hint=_HINT) from None
    return {}, ""


def load(
    cls: type[C],
    *,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    file_name: str = "strata.toml",
    defaults: Mapping[str, Any] | None = None,
) -> C:
    """Return a `cls` filled from the given sources; a `ConfigError` names the wrong setting and its source.

    The keys of `flags` are field names (`etcd.endpoints` for a nested field); None means that the flag was not given.
    `defaults`, also by field name, replace the defaults of the class.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _refuse_unknown(cls, file or {}, file_name)
    config = _fill(cls, "", _Sources(given, env or {}, file or {}, file_name, defaults or {}))
    if given:
        raise ConfigError(f"there is no setting {min(given)!r}")
    return config


@dataclasses.dataclass(frozen=True, slots=True)
class _Sources:
    flags: dict[str, Any]
    """The flags that are not used yet: `_fill` removes each flag that it uses."""
    env: Mapping[str, str]
    file: Mapping[str, Any]
    file_name: str
    defaults: Mapping[str, Any]


def _fill(cls: type[C], prefix: str, sources: _Sources) -> C:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every C is a dataclass
        name, hint = prefix + field.name, _hint(cls, field.name)
        nested = _nested(hint)
        if nested is not None:
            values[field.name] = _fill(nested, f"{name}.", sources)
            continue
        toml, variable = field.metadata["toml"], field.metadata["env"]
        if name in sources.flags:
            values[field.name] = _convert(hint, sources.flags.pop(name), f"--{field.name.replace('_', '-')}")
        elif sources.env.get(variable):
            values[field.name] = _convert(hint, sources.env[variable], variable)
        elif (value := _lookup(sources, toml)) is not None:
            values[field.name] = _convert(hint, value, f"{toml} in {sources.file_name}")
        elif name in sources.defaults:
            values[field.name] = sources.defaults[name]
    return cls(**values)


def _lookup(sources: _Sources, place: str) -> Any:
    table, _, key = place.rpartition(".")
    if not table:
        return sources.file.get(key)
    body = sources.file.get(table, {})
    if not isinstance(body, Mapping):
        raise ConfigError(f"{table} in {sources.file_name} must be a table", hint=f"write [{table}]")
    return body.get(key)


def _refuse_unknown(cls: type[Any], file: Mapping[str, Any], file_name: str) -> None:
    """Raise `ConfigError` for an unknown name; ignore the tables of other commands."""
    known = {entry.toml for entry in settings(cls)}
    tables = {place.partition(".")[0] for place in known if "." in place}
    names = {key for key, value in file.items() if not isinstance(value, Mapping)} - SHARED
    for table in tables:
        body = file.get(table)
        names |= {f"{table}.{key}" for key in body} if isinstance(body, Mapping) else set()
    for name in sorted(names - known):
        near = ", ".join(sorted(k for k in known if k.partition(".")[0] == name.partition(".")[0]))
        raise ConfigError(
            f"there is no setting {name} ({file_name})", hint=f"known: {near}" if near else None
        )


def _convert(hint: Any, value: Any, source: str) -> Any:
    """Convert `value`, from text or TOML, to the type `hint`."""
    try:
        return _converted(hint, value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: ~name of an unknown user
        raise ConfigError(f"{source}: {error}") from None


def _converted(hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise TypeError(f"a list is needed, not {shown(value)}")
        return tuple(_converted(str, i).strip() for i in items if not isinstance(i, str) or i.strip())
    if hint is bool:
        return _boolean(value)
    if hint in (int, float):
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError(f"a number is needed, not {shown(value)}")
        return _number(hint, value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    if isinstance(value, str):
        return value
    raise TypeError(f"a text is needed, not {shown(value)}")


def _number(hint: Any, value: str | float) -> Any:
    """Return the number; raise `ValueError` if it is not finite, or is too large for any clock, file or array."""
    kind = "whole" if hint is int else "finite"
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a {kind} number is needed, not {value!r}")
    try:
        number = hint(value)
    except OverflowError:
        number = math.inf
    except ValueError:
        what = "whole number" if hint is int else "number"
        raise ValueError(f"a {what} is needed, not {shown(value)}") from None
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"a finite number is needed, not {shown(value)}")
    if hint is int and isinstance(value, float) and number != value:
        raise ValueError(f"a whole number is needed, not {shown(value)}")
    most = MAX_INTEGER if hint is int else MAX_NUMBER
    if abs(number) > most:
        raise ValueError(f"{shown(value)} is too large: the most is {most:g}")
    return number


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError(f"true or false is needed, not {shown(value)}")


def _hint(cls: type[Any], name: str) -> Any:
    return typing.get_type_hints(cls)[name]


def _nested(hint: Any) -> type[Any] | None:
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None

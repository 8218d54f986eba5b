"""The run's config: the hyperparameters that a program gives `strata.init`, kept with each checkpoint.

They are plain values below `strata.config` in every rank's part of a checkpoint. So `strata checkpoints show` prints them,
`strata checkpoints diff` compares them, and a fork carries them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from strata.errors import InvalidArgument

CONFIG_KEY: Final = "config"
"""The key of the run's config beside the position."""
MAX_CONFIG_BYTES: Final = 64 << 10


def checked_config(config: object) -> dict[str, Any]:
    """Return a copy of `config`, a mapping of names to numbers, texts, lists and further mappings; empty for None."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise InvalidArgument(f"config is a {type(config).__name__}, not a mapping", hint=_HINT)
    try:
        checked: dict[str, Any] = _plain(config, "config")
        text = json.dumps(checked)
    except RecursionError:
        raise InvalidArgument("config contains itself", hint=_HINT) from None
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidArgument(
            f"config has {len(text)} bytes as JSON, and at most {MAX_CONFIG_BYTES} are kept", hint=_HINT
        )
    return checked


def _plain(value: object, path: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgument(f"{path} has the key {key!r}, which is no text", hint=_HINT)
        return {str.__str__(key): _plain(one, f"{path}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{path}[{number}]") for number, one in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):  # an enum's member, or a NumPy number, becomes a plain one
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise InvalidArgument(f"{path} is a {type(value).__name__}", hint=_HINT)


_HINT: Final = "pass numbers, texts, lists and dicts of these: vars(args), or dataclasses.asdict(settings)"


def changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return what differs between two configs, one sentence's part for each value."""
    flat_now, flat_before = _flat(now), _flat(before)
    return [
        f"{path} is {flat_now.get(path, 'absent')}, and was {flat_before.get(path, 'absent')}"
        for path in sorted(flat_now.keys() | flat_before.keys())
        if flat_now.get(path) != flat_before.get(path)
    ]


def _flat(config: Mapping[str, Any], path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in config.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value:
            found |= _flat(value, at)
        else:
            found[at] = json.dumps(value)
    return found

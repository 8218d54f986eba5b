"""What a `CheckpointManager` can be told, and where its storage is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from strata.checkpoint.pipeline import DEFAULT_THREADS
from strata.checkpoint.replication import EVERYTHING
from strata.checkpoint.writer import WhenFull
from strata.core.records import CheckpointType
from strata.core.spans import seconds
from strata.errors import CheckpointError, ConfigError, InvalidArgument

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://|(file|s3|gs|az|https?):", re.IGNORECASE)
"""A URI: also one with too few slashes, which would otherwise name a folder below this one."""
MAX_THREADS: Final = 64
MODEL_KEYS: Final = ("model*",)
OPTIMIZER_KEYS: Final = ("optim*", "*scheduler*", "*scaler*")
_HINT: Final = 'give the path of a folder, or its URI: "file:///data/checkpoints"'


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManagerConfig:
    """The settings of a `CheckpointManager`.

    `keep_count` is how many committed checkpoints stay (None: all). `save_wait_s` is how long a
    due save waits while no coordinator answers, `commit_timeout_s` how long for other ranks.
    `when_full` is what a save does that finds two in flight: "block", "drop" the one that has not
    begun, or "fail". `low_memory`: no copy of the state is made, and a save returns when it is
    written. `io_threads` hash and write, or read and prove, together. A key of a state
    belongs to the model, or to the optimizer, if one of these patterns matches it. `replicated` are
    the paths of a state whose tensors all ranks hold alike (True: all), so that each writes only its
    share of them; of a module in DistributedDataParallel that is known. `mesh` is this rank's place,
    (index, size), in each dimension of the partitioning ({"pp": (0, 2)}), kept in its manifest; named
    dimensions of DTensors' meshes are added.
    """

    storage_path: str | Path | None = None
    keep_count: int | None = None
    capture_rng: bool = True
    save_wait_s: float = 60.0
    commit_timeout_s: float = 600.0
    when_full: str = "block"
    low_memory: bool = False
    io_threads: int = DEFAULT_THREADS
    storage_type: str = "local"
    bucket: str | None = None
    model_keys: Collection[str] = MODEL_KEYS
    optimizer_keys: Collection[str] = OPTIMIZER_KEYS
    replicated: Collection[str] | bool = ()
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.keep_count
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"keep_count must be at least 1, not {count!r}")
        for name in ("save_wait_s", "commit_timeout_s"):
            value = getattr(self, name)
            try:
                seconds(value, what=name)
            except InvalidArgument as error:
                raise ConfigError(error.message, hint=error.hint) from None
        if self.when_full not in set(WhenFull):
            words = ", ".join(repr(word.value) for word in WhenFull)
            raise ConfigError(f"when_full is one of {words}, not {self.when_full!r}")
        threads = self.io_threads
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"io_threads is a number from 1 to {MAX_THREADS}, not {threads!r}")
        for name in ("model_keys", "optimizer_keys"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ConfigError(f"{name} must be a list of patterns, not {patterns!r}", hint='["model*"]')
        paths_of(self.replicated)
        _check_mesh(self.mesh)
        if self.storage_path is not None and not isinstance(self.storage_path, str | Path):
            raise ConfigError(
                f"storage_path is a {type(self.storage_path).__name__}, not text or a Path", hint=_HINT
            )

    def selected(self, state: Mapping[str, Any], kind: CheckpointType) -> dict[str, Any]:
        """Return what a checkpoint of this type holds of `state`; `CheckpointError` if that is nothing."""
        if kind in {CheckpointType.FULL, CheckpointType.INCREMENTAL}:
            return dict(state)
        name = "model_keys" if kind is CheckpointType.MODEL_ONLY else "optimizer_keys"
        patterns = tuple(getattr(self, name))
        chosen = {
            key: value
            for key, value in state.items()
            if any(fnmatchcase(str(key), pattern) for pattern in patterns)
        }
        if not chosen:
            raise CheckpointError(
                f"a checkpoint of type {kind.name} would hold nothing of a state with {sorted(map(str, state))}",
                hint=f"{name} is {list(patterns)}: give the manager other patterns, or the state other keys",
            )
        return chosen

    def folder(self) -> Path:
        """Return the storage root; `ConfigError` unless it is a local or shared path."""
        text = str(self.storage_path) if self.storage_path is not None else ""
        scheme = (found[1] or found[2]).lower() if (found := _SCHEME.match(text)) is not None else ""
        if self.bucket is not None or self.storage_type != "local" or scheme not in {"", "file"}:
            raise ConfigError(
                f"this release stores checkpoints on local or shared paths only,"
                f" not on {self.bucket or text or self.storage_type!r}",
                hint="give storage_path a folder; object stores come in a later release",
            )
        if not text:
            raise ConfigError("no storage path is given", hint="CheckpointManager(storage_path=…)")
        path = _path_of_uri(text) if scheme else text
        if "\0" in path:
            raise ConfigError(f"the storage path {text!r} has a NUL character in it", hint=_HINT)
        try:
            path.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"the storage path {text!r} is no Unicode text", hint="rename the folder, or link to it"
            ) from None
        try:
            return Path(path).expanduser().absolute()
        except RuntimeError as error:  # ~name, and nobody has that name
            raise ConfigError(f"the storage path {text!r}: {error}", hint=_HINT) from None


def type_named(value: CheckpointType | str) -> CheckpointType:
    """Return the type of this name; `InvalidArgument` when there is none."""
    try:
        return CheckpointType(value)
    except ValueError:
        names = ", ".join(kind.value for kind in CheckpointType)
        raise InvalidArgument(f"{value!r} is no type of a checkpoint", hint=f"one of {names}") from None


def paths_of(replicated: Collection[str] | bool) -> frozenset[str]:
    """Return the paths that are declared replicated; `ConfigError` for anything else."""
    if isinstance(replicated, bool):
        return frozenset({EVERYTHING}) if replicated else frozenset()
    if isinstance(replicated, str) or not all(isinstance(path, str) for path in replicated):
        raise ConfigError(
            f"replicated must be a list of paths, or True, not {replicated!r}", hint='["model", "optim"]'
        )
    return frozenset(replicated)


def _check_mesh(mesh: Mapping[str, tuple[int, int]]) -> None:
    for name, place in mesh.items():
        if len(place) != 2 or not all(type(n) is int for n in place) or not 0 <= place[0] < place[1]:
            raise ConfigError(f"mesh has {name}: {place!r}, not (index, size)", hint='{"pp": (0, 2)}')


def _path_of_uri(uri: str) -> str:
    """Return the path of a file: URI; `ConfigError` for parts that would be dropped silently."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"the storage path {uri!r} is no URI: {error}", hint=_HINT) from None
    if parts.netloc.lower() not in {"", "localhost"}:
        raise ConfigError(
            f"the storage path {uri!r} names the host {parts.netloc!r}",
            hint=f"mount that host's folder here and give its path, or write file:///{parts.netloc}{parts.path}"
            f" for the local folder /{parts.netloc}{parts.path}",
        )
    if not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ConfigError(
            f"the storage path {uri!r} is not file:// and a path alone",
            hint="write ? as %3F and # as %23, or give the folder without file://",
        )
    return unquote(parts.path)

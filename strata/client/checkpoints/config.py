"""The settings of a `CheckpointManager`, and the place of its storage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from strata.checkpoint.save.replicated_tensors import EVERYTHING
from strata.checkpoint.save.retry import GRACE_S
from strata.checkpoint.save.writer import WhenFull
from strata.checkpoint.storage.pipeline import DEFAULT_THREADS
from strata.checkpoint.storage.place import Place, S3Place, parse_place, scheme_of
from strata.core.checkpoints.references import Keep
from strata.core.checkpoints.retention_rules import check_keep
from strata.core.kv.records import CheckpointType
from strata.core.spans import seconds
from strata.errors import CheckpointError, ConfigError, InvalidArgument

MAX_THREADS: Final = 64
MODEL_KEYS: Final = ("model*",)
OPTIMIZER_KEYS: Final = ("optim*", "*scheduler*", "*scaler*")
_TYPES: Final = ("local", "s3")
_HINT: Final = 'give the path of a folder, or its URI: "file:///data/checkpoints"'


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManagerConfig:
    """The settings of a `CheckpointManager`.

    Retention: the newest `keep_count` committed checkpoints stay (0: all; None: the job's current rules apply, and
    a new job keeps all). Three settings keep further checkpoints. `keep_every_steps`: the first checkpoint at or
    after each multiple of this number. `keep_best`: this many of the best checkpoints, by the number under
    `best_metric` in their metadata (`best_mode` "min" or "max"). `keep_age_s`: checkpoints younger than this.

    Times: a due save waits `save_wait_s` while no coordinator answers, and `commit_timeout_s` for other ranks.
    If the storage refuses a save for a transient reason (a full disk, a server that answers 503), the save is
    retried for `save_grace_s`; 0: no retry. A restore that finds damage waits `corrupt_wait_s` for the findings
    of other hosts.

    Saving: `when_full` decides what a save does while two earlier saves are in flight: "block", "drop" the newest
    save whose writing has not begun, or "fail". With `low_memory`, no copy of the state is made, and a save returns
    once the state is written. A save or restore uses `io_threads` threads in all. `save_interval_steps` affects
    only `should_save`; `save` saves whenever it is called.

    State: a key belongs to the model or the optimizer if it matches one of `model_keys` or `optimizer_keys`.
    Tensors under the paths in `replicated` (True: all tensors) must be equal on all ranks; each rank then writes
    only its share of them. The parameters of a DistributedDataParallel module need not be listed. `mesh` is this
    rank's place, (index, size), in each dimension of the partitioning ({"pp": (0, 2)}). It is stored in the rank's
    manifest, together with the named dimensions of DTensors' meshes.

    Storage: `storage_path` is a folder or `s3://bucket/prefix`. With `storage_type="s3"`, `storage_path` is the
    prefix if `bucket` is set, else "bucket/prefix". `storage_backend` and `checkpoint_dir` are other names of
    `storage_type` and `storage_path`. `endpoint_url` and `region` are for S3. `replica_path` is a second storage,
    which receives each checkpoint after its commit.
    """

    storage_path: str | Path | None = None
    keep_count: int | None = None
    capture_rng: bool = True
    save_wait_s: float = 60.0
    commit_timeout_s: float = 600.0
    save_grace_s: float = GRACE_S
    when_full: str = "block"
    low_memory: bool = False
    io_threads: int = DEFAULT_THREADS
    storage_type: str | None = None
    bucket: str | None = None
    endpoint_url: str | None = None
    region: str | None = None
    replica_path: str | Path | None = None
    model_keys: Collection[str] = MODEL_KEYS
    optimizer_keys: Collection[str] = OPTIMIZER_KEYS
    replicated: Collection[str] | bool | None = None
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    keep_every_steps: int | None = None
    keep_best: int | None = None
    best_metric: str = ""
    best_mode: str = "min"
    keep_age_s: float | None = None
    corrupt_wait_s: float = 60.0
    save_interval_steps: int = 1
    storage_backend: InitVar[str | None] = None
    checkpoint_dir: InitVar[str | Path | None] = None

    def __post_init__(self, storage_backend: str | None, checkpoint_dir: str | Path | None) -> None:
        self._take("storage_type", "storage_backend", storage_backend)
        self._take("storage_path", "checkpoint_dir", checkpoint_dir)
        for name in ("save_wait_s", "commit_timeout_s", "save_grace_s", "corrupt_wait_s", "keep_age_s"):
            value = getattr(self, name)
            try:
                if value is not None or name != "keep_age_s":
                    seconds(value, what=name, zero=name == "save_grace_s")
            except InvalidArgument as error:
                raise ConfigError(error.message, hint=error.hint) from None
        if self.when_full not in set(WhenFull):
            words = ", ".join(repr(word.value) for word in WhenFull)
            raise ConfigError(f"when_full is one of {words}, not {self.when_full!r}")
        _check_count("io_threads", self.io_threads, least=1, most=MAX_THREADS)
        for name in ("model_keys", "optimizer_keys"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ConfigError(f"{name} must be a list of patterns, not {patterns!r}", hint='["model*"]')
        paths_of(self.replicated)
        _check_mesh(self.mesh)
        for name in ("storage_path", "replica_path", "storage_type", "bucket", "endpoint_url", "region"):
            value = getattr(self, name)
            kinds, hint = ((str, Path), _HINT) if name.endswith("_path") else ((str,), None)
            if value is not None and not isinstance(value, kinds):
                words = " or a ".join("text" if kind is str else kind.__name__ for kind in kinds)
                raise ConfigError(f"{name} is a {type(value).__name__}, not {words}", hint=hint)
        if self.storage_type is not None and self.storage_type not in _TYPES:
            raise ConfigError(
                f"storage_type is {self.storage_type!r}", hint=f"it may be {' or '.join(_TYPES)}, or left out"
            )
        _check_count("save_interval_steps", self.save_interval_steps, least=1)
        self._check_keep()

    def _take(self, name: str, other: str, value: str | Path | None) -> None:
        """Set the field `name` to `value`, the setting given under its other name."""
        held = getattr(self, name)
        if value is None or value == held:
            return
        if held is not None:
            raise ConfigError(
                f"{name} is {held!r}, and {other} is {value!r}", hint="they are one setting: give one of them"
            )
        object.__setattr__(self, name, value)

    def _check_keep(self) -> None:
        for name, least in (("keep_count", 0), ("keep_every_steps", 1), ("keep_best", 1)):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), least=least)
        if self.best_mode not in {"min", "max"}:
            raise ConfigError(f'best_mode is "min" or "max", not {self.best_mode!r}')
        try:
            check_keep(self.keep)
        except InvalidArgument as error:
            raise ConfigError(f"retention: {error.message}", hint=error.hint) from None

    @property
    def compares(self) -> bool:
        """Whether ranks compare their tensors at each save, and write equal tensors once.

        Not with `low_memory`: then the trainer's thread waits until its state is written, and with a comparison
        that thread would also wait until the other ranks reach their save.
        """
        return not self.low_memory and not isinstance(self.replicated, bool)

    @property
    def keep(self) -> Keep:
        """The retention rules; without settings, everything stays."""
        return Keep(
            latest=self.keep_count or 0,
            every_steps=self.keep_every_steps or 0,
            best=self.keep_best or 0,
            metric=self.best_metric,
            highest=self.best_mode == "max",
            age_ms=round(1000 * (self.keep_age_s or 0)),
        )

    def selected(self, state: Mapping[str, Any], kind: CheckpointType) -> dict[str, Any]:
        """Return the part of `state` that a checkpoint of this type has; `CheckpointError` if that part is empty."""
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

    def place(self) -> Place:
        """Return the storage root; `ConfigError` if the settings name no root or contradict each other."""
        text = _text(self.storage_path)
        scheme = scheme_of(text)
        bucket, prefix = self.bucket, text
        if self.storage_type == "local" and (bucket is not None or scheme == "s3"):
            raise ConfigError(f"storage_type is 'local', and {bucket or text!r} is in an object store")
        if bucket is not None and (scheme or text.startswith("/")):
            raise ConfigError(
                f"bucket is {bucket!r}, and the storage path {text!r} names a place of its own",
                hint=f"with bucket= the storage path is the prefix in it, or leave bucket out: s3://{bucket}/…",
            )
        if bucket is None and self.storage_type == "s3" and scheme != "s3":
            bucket, _, prefix = text.partition("/")
            if scheme or not bucket or not prefix:
                raise ConfigError(
                    "storage_type is 's3', and no bucket is named",
                    hint='bucket=…, or a storage path like "s3://bucket/prefix" or "bucket/prefix"',
                )
        if bucket is not None:
            return S3Place(
                bucket=bucket,
                prefix=prefix.removesuffix("/"),
                endpoint_url=self.endpoint_url,
                region=self.region,
            )
        if scheme != "s3":
            self._refuse_s3_settings(text)
        return parse_place(text, endpoint_url=self.endpoint_url, region=self.region)

    def replica(self) -> Place | None:
        """Return the place of the second storage, or None."""
        if self.replica_path is None:
            return None
        place = parse_place(_text(self.replica_path), endpoint_url=self.endpoint_url, region=self.region)
        if place == self.place():
            raise ConfigError("replica_path is the storage path itself", hint="choose another place")
        return place

    def _refuse_s3_settings(self, text: str) -> None:
        replica = scheme_of(_text(self.replica_path))
        for name in ("endpoint_url", "region"):
            if getattr(self, name) is not None and replica != "s3":
                raise ConfigError(
                    f"{name} is for S3, and {text or 'the storage path'!r} is not in S3",
                    hint="s3://bucket/prefix",
                )


def merged(
    storage_path: str | Path | None, config: CheckpointManagerConfig | None, settings: Mapping[str, Any]
) -> CheckpointManagerConfig:
    """Return `config` with `settings` and `storage_path` applied; `ConfigError` for an unknown setting."""
    changes = settings if storage_path is None else {**settings, "storage_path": storage_path}
    try:
        return replace(config or CheckpointManagerConfig(), **changes)
    except TypeError as error:
        raise ConfigError(str(error)) from None


def type_named(value: CheckpointType | str) -> CheckpointType:
    """Return the type of this name; `InvalidArgument` if there is none."""
    try:
        return CheckpointType(value)
    except ValueError:
        names = ", ".join(kind.value for kind in CheckpointType)
        raise InvalidArgument(f"{value!r} is no type of a checkpoint", hint=f"one of {names}") from None


def paths_of(replicated: Collection[str] | bool | None) -> frozenset[str]:
    """Return the paths that are declared replicated; `ConfigError` for any other value."""
    if replicated is None:
        return frozenset()
    if isinstance(replicated, bool):
        return frozenset({EVERYTHING}) if replicated else frozenset()
    if isinstance(replicated, str) or not all(isinstance(path, str) for path in replicated):
        raise ConfigError(
            f"replicated must be a list of paths, or True, not {replicated!r}", hint='["model", "optim"]'
        )
    return frozenset(replicated)


def _check_count(name: str, count: object, *, least: int, most: int | None = None) -> None:
    """Raise `ConfigError` unless `count` is a whole number within these bounds."""
    if type(count) is not int or count < least or (most is not None and count > most):
        raise ConfigError(
            f"{name} must be at least {least}{f', at most {most}' if most else ''}, not {count!r}"
        )


def _check_mesh(mesh: Mapping[str, tuple[int, int]]) -> None:
    for name, place in mesh.items():
        if len(place) != 2 or not all(type(n) is int for n in place) or not 0 <= place[0] < place[1]:
            raise ConfigError(f"mesh has {name}: {place!r}, not (index, size)", hint='{"pp": (0, 2)}')


def _text(path: str | Path | None) -> str:
    return str(path) if path is not None else ""

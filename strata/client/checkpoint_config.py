"""What a `CheckpointManager` can be told, and where its storage is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from strata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManagerConfig:
    """The settings of a `CheckpointManager`.

    `keep_count` is how many committed checkpoints stay (None: all). `save_wait_s` is how long a
    due save waits while no coordinator answers, `commit_timeout_s` how long for other ranks.
    """

    storage_path: str | Path | None = None
    keep_count: int | None = None
    capture_rng: bool = True
    save_wait_s: float = 60.0
    commit_timeout_s: float = 600.0
    storage_type: str = "local"
    bucket: str | None = None

    def __post_init__(self) -> None:
        if self.keep_count is not None and self.keep_count < 1:
            raise ConfigError(f"keep_count must be at least 1, not {self.keep_count}")
        for name in ("save_wait_s", "commit_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")

    def folder(self) -> Path:
        """Return the storage root; `ConfigError` unless it is a local or shared path."""
        text = str(self.storage_path) if self.storage_path is not None else ""
        scheme = text.partition("://")[0] if "://" in text else ""
        if self.bucket is not None or self.storage_type != "local" or scheme not in {"", "file"}:
            raise ConfigError(
                f"this release stores checkpoints on local or shared paths only,"
                f" not on {self.bucket or text or self.storage_type!r}",
                hint="give storage_path a folder; object stores come in a later release",
            )
        if not text:
            raise ConfigError("no storage path is given", hint="CheckpointManager(storage_path=…)")
        return Path(unquote(urlsplit(text).path) if scheme else text).expanduser().absolute()

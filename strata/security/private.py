"""Files that only their owner may read: written atomically, and refused if others can read them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from strata.documents.reading import MAX_PEM_BYTES, read_config
from strata.errors import ConfigError


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter; if the folder exists, change its mode."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None


def write_private(path: Path, body: bytes) -> None:
    """Write a file with mode 0600 atomically: no reader sees a partial file, and no other user can read it."""
    _write(path, body, 0o600)


def write_public(path: Path, body: bytes) -> None:
    """Write a file with mode 0644 atomically."""
    _write(path, body, 0o644)


def read_private(path: Path, what: str, *, most_bytes: int = MAX_PEM_BYTES) -> bytes:
    """Return a file's bytes; raise `ConfigError` if it cannot be read, or if users other than its owner can read it."""
    return read_config(path, what, most_bytes=most_bytes, private=True)


def _write(path: Path, body: bytes, mode: int) -> None:
    try:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None

"""Files that only their owner may read: written whole, and refused when others can read them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from strata.documents.reading import MAX_PEM_BYTES, read_config
from strata.errors import ConfigError


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter; one that exists is made so."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None


def write_private(path: Path, body: bytes) -> None:
    """Put a file with mode 0600 in place at once: nobody ever reads half of it, or more than he may."""
    _write(path, body, 0o600)


def write_public(path: Path, body: bytes) -> None:
    """Put a file with mode 0644 in place at once."""
    _write(path, body, 0o644)


def read_private(path: Path, what: str, *, most_bytes: int = MAX_PEM_BYTES) -> bytes:
    """Return a file's bytes; `ConfigError` when it cannot be read, or others than its owner can."""
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

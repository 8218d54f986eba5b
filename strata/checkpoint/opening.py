"""Opening a storage by the place where it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from strata.checkpoint.local_storage import LocalStorage
from strata.checkpoint.place import Place
from strata.checkpoint.sink import OnStep, Storage, unobserved
from strata.errors import ConfigError


def open_storage(place: Place, *, nonce: Callable[[], str], on_step: OnStep = unobserved) -> Storage:
    """Return the storage at `place`. Nothing is written; S3 is not asked anything yet.

    `ConfigError` when the libraries for S3 are not installed, or no credentials are found.
    """
    if isinstance(place, Path):
        return LocalStorage(place, nonce=nonce, on_step=on_step)
    try:
        from strata.checkpoint.s3_storage import S3Storage  # noqa: PLC0415  # an extra, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"checkpoints in S3 need {error.name or 'boto3 and obstore'}",
            hint="pip install 'strata-control[s3]'",
        ) from error
    return S3Storage(place, nonce=nonce, now=lambda: datetime.now(UTC), pause=time.sleep, on_step=on_step)

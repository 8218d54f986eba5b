"""Opening the storage at a place, and probing whether it accepts writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from strata.checkpoint.storage.local_file import as_storage_error, status_of
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.place import Place, parse_place
from strata.checkpoint.storage.sink import OnStep, Storage, unobserved
from strata.errors import ConfigError, StorageError

PROBE_BYTES: Final = 1 << 18
"""The size of the probe: smaller than any save, and too large to be stored within an inode."""


def open_storage(
    place: Place, *, nonce: Callable[[], str], on_step: OnStep = unobserved, patient: bool = True
) -> Storage:
    """Return the storage at `place`. This writes no object, and sends no request to S3 yet.

    If not `patient`, a request fails within half a minute, for callers that retry by themselves.
    `ConfigError` if the libraries for S3 are not installed, or no credentials are found.
    """
    if isinstance(place, Path):
        return LocalStorage(place, nonce=nonce, on_step=on_step)
    try:
        from strata.checkpoint.storage.s3_control import S3Options  # noqa: PLC0415  # as below
        from strata.checkpoint.storage.s3_storage import S3Storage  # noqa: PLC0415  # an extra, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"checkpoints in S3 need {error.name or 'boto3 and obstore'}",
            hint='pip install "strata-control[s3]"',
        ) from error
    return S3Storage(
        place,
        nonce=nonce,
        now=lambda: datetime.now(UTC),
        pause=time.sleep,
        options=S3Options() if patient else S3Options(attempts=2, answer_s=15.0),
        on_step=on_step,
    )


def refusal(uri: str, *, nonce: Callable[[], str]) -> str:
    """Return in a few words the transient reason why no object can be written below `uri`; "" if there is none.

    Return "" also if the folder does not exist, and for errors that are not transient: the next save reports them
    better. The call returns when the storage has answered; S3 may take half a minute.
    """
    name = f".probe.{nonce()}.tmp"  # the form of names that listings leave out
    try:
        place = parse_place(uri)
        if isinstance(place, Path):
            with as_storage_error("look at", place):
                if status_of(place) is None:
                    return ""
        storage = open_storage(place, nonce=nonce, patient=False)
        storage.create_once(name, bytes(PROBE_BYTES))
        storage.delete(name)
    except StorageError as error:
        return error.transient
    except ConfigError:
        return ""
    return ""

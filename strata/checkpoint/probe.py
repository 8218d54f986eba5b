"""Whether a storage takes what is written: a small object, made durable and removed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from strata.checkpoint.local_file import as_storage_error, status_of
from strata.checkpoint.opening import open_storage
from strata.checkpoint.place import parse_place
from strata.errors import ConfigError, StorageError

PROBE_BYTES: Final = 1 << 18
"""Below what any save writes, and beyond what a file system keeps in a file's own entry."""


def refusal(uri: str, *, nonce: Callable[[], str]) -> str:
    """Return, in a few words, why nothing can be written below `uri` that time may heal; else "".

    So it is "" for a folder that is not there, and where only somebody can mend what is wrong: who saves
    says that better. It may take as long as the storage takes to answer; of S3 that is half a minute.
    """
    name = f".probe.{nonce()}.tmp"  # as files are called that no listing shows
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

"""Who a storage root belongs to: `strata.json`, made once.

A root is used without coordinators (`standalone`), or below them (`coordinated`); there each job
has a folder, which belongs to `coordinated:<cluster uid>/<job>`. Two catalogs over one root would
each delete what they do not know of.
"""

from __future__ import annotations

import json
from typing import Final

from strata.checkpoint.manifest import read_document
from strata.checkpoint.sink import ObjectMissing, Storage
from strata.errors import ConfigError

NAME: Final = "strata.json"
STANDALONE: Final = "standalone"
COORDINATED: Final = "coordinated"


def claim(storage: Storage, owner: str, *, folder: str = "") -> None:
    """Take `folder` (the root) for `owner`; `ConfigError` when it is somebody else's."""
    name = f"{folder}/{NAME}" if folder else NAME
    body = {"format": "strata-root", "version": 1, "owner": owner}
    if owner_of(storage, folder=folder) is None:
        storage.create_once(name, json.dumps(body).encode())
    found = owner_of(storage, folder=folder)
    if found != owner:
        raise ConfigError(
            f"{storage.uri}/{name} says that this folder is {found}, and it was to be used as {owner}",
            hint="choose another storage path",
        )


def owner_of(storage: Storage, *, folder: str = "") -> str | None:
    """Return whose folder this is; None while it is nobody's."""
    name = f"{folder}/{NAME}" if folder else NAME
    try:
        data = storage.read(name)
    except ObjectMissing:
        return None
    return str(read_document("strata-root", data, what=name)["owner"])

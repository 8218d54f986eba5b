"""`strata.json`, written once: the owner of a storage root, and the root's id.

A root is used without coordinators (`standalone`) or with them (`coordinated`). With coordinators each job has a
folder, whose owner is `coordinated:<lineage of the cluster>/<job>`. The owner is checked because two catalogs over one
root would each delete the checkpoints that they do not know. A cluster keeps its lineage through
restores of etcd. So a cluster restored from a backup owns the previous cluster's folders.

The document also has a random `id`. If two hosts read different ids at the same path, they do not share the
storage. Documents that another client wrote may have no id.
"""

from __future__ import annotations

import json
import uuid
from typing import Final

from strata.checkpoint.format.manifest import VERSION, as_corrupt, read_document, read_object
from strata.checkpoint.storage.sink import ObjectMissing, Storage
from strata.core.restore.lineage import lineage
from strata.documents.parsing import text
from strata.errors import ConfigError

NAME: Final = "strata.json"
STANDALONE: Final = "standalone"
COORDINATED: Final = "coordinated"


def job_owner(uid: str, job: str) -> str:
    """Return the owner of the folder of `job` in the cluster `uid`."""
    return f"{COORDINATED}:{lineage(uid)}/{job}"


def parse_owner(owner: str) -> tuple[str, str] | None:
    """Return the lineage and the job of an owner made by `job_owner`; None for any other owner."""
    mode, _, rest = owner.partition(":")
    uid, _, job = rest.partition("/")
    return (lineage(uid), job) if mode == COORDINATED and uid and job else None


def claim(storage: Storage, owner: str, *, folder: str = "") -> str:
    """Claim `folder` (by default the root) for `owner`; return the folder's id, or "" if it has no id.

    `ConfigError` if the folder has another owner.
    """
    name = _name(folder)
    document = _document(storage, name)
    if document is None:
        body = {"format": "strata-root", "version": VERSION, "owner": owner, "id": uuid.uuid4().hex}
        storage.create_once(name, json.dumps(body).encode())
        document = _document(storage, name)
    found = None if document is None else document["owner"]
    if document is None or found != owner:
        raise ConfigError(
            f"{storage.uri}/{name} names {found} as the owner of this folder, not {owner}",
            hint="choose another storage path",
        )
    return document["id"]


def owner_of(storage: Storage, *, folder: str = "") -> str | None:
    """Return the owner of a folder, or None if it has none."""
    document = _document(storage, _name(folder))
    return None if document is None else document["owner"]


def id_of(storage: Storage, *, folder: str = "") -> str:
    """Return the random id of a folder; "" if it has no id or no owner."""
    document = _document(storage, _name(folder))
    return "" if document is None else document["id"]


def _document(storage: Storage, name: str) -> dict[str, str] | None:
    try:
        data = read_object(storage, name)
    except ObjectMissing:
        return None
    document = read_document("strata-root", data, what=name)
    with as_corrupt(name):
        return {"owner": text(document["owner"]), "id": text(document.get("id", ""))}


def _name(folder: str) -> str:
    return f"{folder}/{NAME}" if folder else NAME

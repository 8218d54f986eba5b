"""Metadata of a backup: the document that makes the backup count. It names the snapshot's origin and checksum."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, Final

from strata.documents.parsing import NOTE, json_object, shown, text, whole
from strata.errors import StrataError

FORMAT: Final = "strata-controlplane-backup"
VERSION: Final = 1
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class BackupCorrupt(StrataError):
    """The files in the place are not the backup that was made."""

    code: ClassVar[str] = "BACKUP_CORRUPT"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupMetadata:
    """One backup. `revision`: the snapshot holds at least this revision. `sha256` is that of the whole file.

    `cluster_uid` is the uid in `P/uid`. `etcd_cluster_id` is etcd's own cluster id, in hex as etcdctl prints
    it.
    """

    cluster: str
    cluster_uid: str
    etcd_cluster_id: str
    revision: int
    member: str
    etcd_version: str
    strata_version: str
    size_bytes: int
    sha256: str
    time: datetime

    @property
    def unix_ms(self) -> int:
        return int(self.time.timestamp() * 1000)

    def encode(self) -> bytes:
        """Return the document."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "cluster": self.cluster,
            "cluster_uid": self.cluster_uid,
            "etcd_cluster_id": self.etcd_cluster_id,
            "revision": self.revision,
            "member": self.member,
            "etcd_version": self.etcd_version,
            "strata_version": self.strata_version,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "time": self.time.astimezone(UTC).isoformat(),
        }
        return json.dumps(body, indent=2).encode() + b"\n"


def decode(data: bytes, *, what: str) -> BackupMetadata:
    """Return the metadata in the document called `what`; `BackupCorrupt` if it is no valid metadata."""
    try:
        body = json_object(data, NOTE)
        if body["format"] != FORMAT:
            raise ValueError(f"it is a {shown(body['format'])}")
        version = whole(body["version"])
        if version > VERSION:
            raise BackupCorrupt(
                f"{what} has format {version}, and this release reads up to {VERSION}",
                hint="read it with the release that wrote it, or a newer one",
            )
        if not _SHA256.fullmatch(text(body["sha256"])):
            raise ValueError("sha256 is no SHA-256")
        time = datetime.fromisoformat(text(body["time"]))
        if time.tzinfo is None:
            raise ValueError("its time has no zone")
        return BackupMetadata(
            cluster=text(body["cluster"]),
            cluster_uid=text(body["cluster_uid"]),
            etcd_cluster_id=text(body["etcd_cluster_id"]),
            revision=whole(body["revision"]),
            member=text(body["member"]),
            etcd_version=text(body["etcd_version"]),
            strata_version=text(body["strata_version"]),
            size_bytes=whole(body["size_bytes"]),
            sha256=body["sha256"],
            time=time,
        )
    except KeyError as error:
        raise BackupCorrupt(f"{what} is no metadata of a backup: {error} is missing") from error
    except ValueError as error:
        raise BackupCorrupt(f"{what} is no metadata of a backup: {error}") from error

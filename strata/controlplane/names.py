"""Names of a backup's files: `strata-<cluster>-<UTC time>-<revision>.db`, and the same name with `.json`.

The time has microseconds, so that simultaneous backups of one cluster have different names. The names of one cluster
sort in the order of their times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from strata.core.ids import checked_id
from strata.core.restore.backup_rotation import Part, StoredFile
from strata.errors import InvalidArgument

_TIME: Final = "%Y%m%dT%H%M%S.%fZ"
_STEM: Final = (
    r"strata-(?P<cluster>[A-Za-z0-9][A-Za-z0-9._-]{0,127})"
    r"-(?P<time>[0-9]{8}T[0-9]{6}\.[0-9]{6}Z)-(?P<revision>[0-9]{16})"
)
_FILE: Final = re.compile(
    rf"(?P<hidden>\.?)(?P<stem>{_STEM})\.(?P<part>db|json)(?P<suffix>(\.tmp)?)", re.ASCII
)
_MAX_REVISION: Final = 10**16 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupName:
    """The information in the names of a backup's files. `time` is in UTC."""

    cluster: str
    time: datetime
    revision: int

    @property
    def stem(self) -> str:
        """The name without its suffix, which is the name of the backup."""
        return f"strata-{self.cluster}-{self.time.astimezone(UTC).strftime(_TIME)}-{self.revision:016d}"

    @property
    def database(self) -> str:
        return f"{self.stem}.{Part.DATABASE.value}"

    @property
    def metadata(self) -> str:
        return f"{self.stem}.{Part.METADATA.value}"

    @property
    def unix_ms(self) -> int:
        return int(self.time.timestamp() * 1000)


def backup_name(cluster: str, time: datetime, revision: int) -> BackupName:
    """Return the name of a new backup; `InvalidArgument` if a value does not fit into a name."""
    checked_id("cluster", cluster)
    if not 0 <= revision <= _MAX_REVISION:
        raise InvalidArgument(f"{revision} is no revision of etcd that a backup's name can hold")
    return BackupName(cluster=cluster, time=time, revision=revision)


def temporary(name: str) -> str:
    """Return the name of a file while it is being written."""
    return f".{name}.tmp"


def parse(file: str) -> tuple[BackupName, StoredFile] | None:
    """Parse a file's name; None if it is not one that Strata gives."""
    found = _FILE.fullmatch(file)
    if found is None or bool(found["hidden"]) != bool(found["suffix"]):
        return None
    try:
        time = datetime.strptime(found["time"], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None
    name = BackupName(cluster=found["cluster"], time=time, revision=int(found["revision"]))
    part = Part.TEMPORARY if found["suffix"] else Part(found["part"])
    stored = StoredFile(name=file, stem=found["stem"], cluster=name.cluster, unix_ms=name.unix_ms, part=part)
    return name, stored


def parse_stem(text: str) -> BackupName:
    """Return the backup that a person named by its stem or by one of its files."""
    stem = text.removesuffix(".db").removesuffix(".json")
    found = parse(f"{stem}.json")
    if found is None:
        raise InvalidArgument(
            f"{text[:200]!r} is no name of a backup",
            hint="strata controlplane backups shows the names",
        )
    return found[0]

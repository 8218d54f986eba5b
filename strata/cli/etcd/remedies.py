"""Shell commands that repair, back up or restore etcd, as `strata doctor` and `strata etcd` print them.

Each printed command has the options with which the printing command connected to etcd. They never include a password,
which stays in `etcd.password_file`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.config import CoordinatorConfig
from strata.core.restore.lineage import OLDER_SNAPSHOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options with which an operator connects to this etcd."""

    endpoints: tuple[str, ...]
    config: Path | None = None
    """The file that `--config` named."""
    insecure: bool = False

    cluster: str = ""
    """The name of the Strata cluster; "" for the default one."""

    @classmethod
    def of(cls, config: CoordinatorConfig, file: Path | None) -> Connection:
        """Return the options for `config`; `file` is the file it was loaded from, or None."""
        usual = config.cluster == CoordinatorConfig().cluster
        return cls(
            endpoints=config.etcd.endpoints,
            config=file,
            insecure=config.credentials.insecure,
            cluster="" if usual else config.cluster,
        )

    def command(self, *words: str) -> str:
        """Return `strata etcd WORDS` with these options, for a shell."""
        return shlex.join(["strata", "etcd", *words, *self._options()])

    def controlplane(self, *words: str) -> str:
        """Return `strata controlplane WORDS` with these options, for a shell."""
        named = ["--cluster", self.cluster] if self.cluster else []
        return shlex.join(["strata", "controlplane", *words, *self._options(), *named])

    def _options(self) -> list[str]:
        options = ["--etcd", ",".join(self.endpoints)]
        if self.config is not None:
            options += ["--config", str(self.config)]
        if self.insecure:
            options.append("--insecure")
        return options


UNKNOWN: Final = Connection(endpoints=("ETCD",))
"""For a host that cannot reach etcd: the operator replaces ETCD by etcd's endpoints."""


def no_space_remedy(connection: Connection, *, voters: int) -> tuple[str, ...]:
    """Return the commands that clear the alarm NOSPACE: etcd must free space before the alarm can be switched off.

    A cluster of one voter stalls during the defragmentation. This is acceptable, since it already refuses writes.
    """
    stall = ("--stall-all",) if voters == 1 else ()
    return connection.command("defrag", "--compact", *stall), connection.command("alarm", "--disarm")


def corrupt_remedy(connection: Connection, members: Sequence[str]) -> tuple[str, ...]:
    """Return the commands that clear the alarm CORRUPT of these members: each is replaced by a copy of the others."""
    replacements = (replacement_command(connection, member) for member in members)
    return *replacements, connection.command("alarm", "--disarm")


def replacement_command(connection: Connection, member: str) -> str:
    """Return the command that replaces a member whose disk or host is lost."""
    return connection.command("replace-member", member)


def backup_command(connection: Connection, place: str) -> str:
    """Return the command that backs up the control plane to `place`."""
    return connection.controlplane("backup", "--to", place)


def restore_commands(
    reason: str, connection: Connection, *, roots: Sequence[str] = (), place: str = "PLACE"
) -> tuple[str, ...]:
    """Return the commands that restore the control plane after etcd lost its data or went back to older data.

    `reason` is the coordinators' error, or the text of `P/restoring`; it selects the commands. `place` is the folder
    or URI of the backups. Words in capitals stand for values that this host does not know; the operator replaces
    them.
    """
    searched = [word for root in roots or ("ROOT",) for word in ("--storage", root)]
    in_place = connection.controlplane("restore", "--in-place", *searched)
    from_backup = connection.controlplane("restore", "--from", place, *searched)
    rebuild = connection.controlplane("rebuild", *searched)
    for words, command in (
        (OLDER_SNAPSHOT, in_place),
        ("began, from etcd as of revision", in_place),
        ("began, from storage", rebuild),
        ("began, from the ", from_backup),
    ):
        if words in reason:
            return (command,)
    return from_backup, rebuild

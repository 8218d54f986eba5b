"""The commands that mend, back up or restore etcd, as `strata doctor` and `strata etcd` print them.

Each has the options with which the printing command reached etcd. A password is never part of one: it stays
in `etcd.password_file`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.config import CoordinatorConfig
from strata.core.lineage import OLDER_SNAPSHOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options with which an operator reaches this etcd."""

    endpoints: tuple[str, ...]
    config: Path | None = None
    """The file that `--config` named."""
    insecure: bool = False

    def command(self, *words: str) -> str:
        """Return `strata etcd WORDS` with these options, for a shell."""
        options = ["--etcd", ",".join(self.endpoints)]
        if self.config is not None:
            options += ["--config", str(self.config)]
        if self.insecure:
            options.append("--insecure")
        return shlex.join(["strata", "etcd", *words, *options])


def no_space_remedy(connection: Connection, *, voters: int) -> tuple[str, ...]:
    """Return what mends the alarm NOSPACE: etcd gives space back, and only then the alarm goes off.

    A cluster of one voter stalls while it is defragmented; it takes no writes already.
    """
    stall = ("--stall-all",) if voters == 1 else ()
    return connection.command("defrag", "--compact", *stall), connection.command("alarm", "--disarm")


def corrupt_remedy(connection: Connection, members: Sequence[str]) -> tuple[str, ...]:
    """Return what mends the alarm CORRUPT of these members: each begins anew from the others' data."""
    replacements = (replacement_command(connection, member) for member in members)
    return *replacements, connection.command("alarm", "--disarm")


def replacement_command(connection: Connection, member: str) -> str:
    """Return what replaces a member whose disk or host is lost."""
    return connection.command("replace-member", member)


def backup_command(config: CoordinatorConfig, place: str) -> str:
    """Return the command that backs up the control plane to `place`.

    Certificates and users of etcd are settings of a file or the environment, where this command finds them.
    """
    return _controlplane(config, "backup", "--to", place)


def _controlplane(config: CoordinatorConfig | None, *command: str) -> str:
    endpoints = ",".join(config.etcd.endpoints) if config is not None else "ETCD"
    words = ["strata", "controlplane", *command, "--etcd", endpoints]
    if config is not None and config.cluster != CoordinatorConfig().cluster:
        words += ["--cluster", config.cluster]
    if config is not None and config.credentials.insecure:
        words.append("--insecure")
    return shlex.join(words)


def restore_commands(
    reason: str, config: CoordinatorConfig | None, *, roots: Sequence[str] = (), place: str = "PLACE"
) -> tuple[str, ...]:
    """Return what leads back after etcd lost its data or went back, by what the coordinators or `P/restoring` say of it.

    `place` is where backups lie. Words in capitals are for the operator, where this host does not know better: `config`
    is None where it does not reach etcd.
    """
    searched = [word for root in roots or ("ROOT",) for word in ("--storage", root)]
    in_place = _controlplane(config, "restore", "--in-place", *searched)
    from_backup = _controlplane(config, "restore", "--from", place, *searched)
    rebuild = _controlplane(config, "rebuild", *searched)
    for words, command in (
        (OLDER_SNAPSHOT, in_place),
        ("began, from etcd as of revision", in_place),
        ("began, from storage", rebuild),
        ("began, from the ", from_backup),
    ):
        if words in reason:
            return (command,)
    return from_backup, rebuild

"""The commands that mend etcd and back it up, as `strata doctor` and `strata etcd` print them.

Each has the options with which the printing command reached etcd. A password is never part of one: it stays
in `etcd.password_file`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.config import CoordinatorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options with which an operator reaches this etcd."""

    endpoints: tuple[str, ...]
    config: Path | None = None
    """The file that `--config` named."""
    insecure: bool = False

    def options(self) -> list[str]:
        """Return these options as words of a command."""
        options = ["--etcd", ",".join(self.endpoints)]
        if self.config is not None:
            options += ["--config", str(self.config)]
        if self.insecure:
            options.append("--insecure")
        return options

    def command(self, *words: str) -> str:
        """Return `strata etcd WORDS` with these options, for a shell."""
        return shlex.join(["strata", "etcd", *words, *self.options()])


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


def backup_command(connection: Connection, place: str, *, cluster: str) -> str:
    """Return what backs up the control plane of `cluster` to `place`."""
    named = ("--cluster", cluster) if cluster != CoordinatorConfig().cluster else ()
    words = ("strata", "controlplane", "backup", "--to", place, *connection.options(), *named)
    return shlex.join(words)

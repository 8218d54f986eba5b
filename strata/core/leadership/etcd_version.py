"""Supported versions of etcd, and the known bugs of the other versions.

The table lists etcd bugs that break a promise of Strata. For each bug and every minor line, the table names the
first release without the bug. Two bounds follow from the table. Releases before 3.4 are refused. Releases before
3.5.28 (in 3.6: before 3.6.9) get a warning that names the bugs.

Sources: etcd's CHANGELOG, and the record of its robustness tests (tests/robustness/README.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

_NUMBERS = re.compile(r"(?:etcd Version:\s*|^\s*v?)(\d+)\.(\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class EtcdVersion:
    """A released version; a suffix after the numbers (`-rc.1`, `+ds`) is dropped."""

    major: int
    minor: int
    patch: int

    @classmethod
    def parse(cls, text: str) -> EtcdVersion:
        """Parse `3.5.30`, `v3.6.0-rc.1` or the output of `etcd --version`; else `ValueError`."""
        found = _NUMBERS.search(text)
        if found is None:
            raise ValueError(f"no etcd version in {text[:80]!r}")
        return cls(*(int(number) for number in found.groups()))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def line(self) -> tuple[int, int]:
        """The minor release that the version belongs to."""
        return self.major, self.minor


_v = EtcdVersion.parse

OLDEST_SPOKEN = _v("3.4.0")
"""Older etcd lacks features that the client uses (watch progress requests, fragments)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A defect of etcd. `fixed` holds the first good release of each minor line that ever had the defect."""

    issue: int
    summary: str
    fixed: tuple[EtcdVersion, ...]
    since: EtcdVersion = OLDEST_SPOKEN
    splits_members: bool = False
    """Members of one cluster may permanently hold different data."""

    def affects(self, version: EtcdVersion) -> bool:
        """Return whether a member of this version has the defect.

        A minor line that the table does not list is good if it is newer than the listed ones.
        """
        if version < self.since:
            return False
        for fix in self.fixed:
            if fix.line == version.line:
                return version < fix
        return version < min(self.fixed)

    def __str__(self) -> str:
        return f"{self.summary} (etcd#{self.issue})"


BUGS = (
    Bug(
        issue=13766,
        summary="members can become inconsistent after a crash under load",
        fixed=(_v("3.5.3"),),
        since=_v("3.5.0"),
        splits_members=True,
    ),
    Bug(
        issue=15271,
        summary="a watch can travel back in time after a partition",
        fixed=(_v("3.4.25"), _v("3.5.8")),
    ),
    Bug(issue=15247, summary="renewed leases can be revoked", fixed=(_v("3.5.13"),)),
    Bug(
        issue=17529,
        summary="a starved watch can lose events",
        fixed=(_v("3.4.31"), _v("3.5.13")),
    ),
    Bug(
        issue=18089,
        summary="a watch can lose a delete that was compacted",
        fixed=(_v("3.4.34"), _v("3.5.16")),
    ),
    Bug(
        issue=19179,
        summary="a watch opened at the compacted revision can miss a delete",
        fixed=(_v("3.5.18"),),
    ),
    Bug(
        issue=20418,
        summary="linearizable reads can be stale after a pause",
        fixed=(_v("3.5.28"), _v("3.6.9")),
    ),
)


class Fitness(Enum):
    """Strata's response to a version."""

    GOOD = "good"
    SUSPECT = "suspect"
    """Strata runs on it, with a warning; `strata doctor` fails."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on one version, and a sentence with the reason ("" if it is good)."""

    version: EtcdVersion
    fitness: Fitness
    reason: str = ""
    one_member_only: bool = False
    """A cluster of several members must not run this version."""


def judge(version: EtcdVersion) -> Verdict:
    """Return whether Strata may use a member of this version, with every known bug that matters."""
    if version < OLDEST_SPOKEN:
        reason = f"etcd {version} is too old: Strata needs {OLDEST_SPOKEN} or newer"
        return Verdict(version=version, fitness=Fitness.REFUSED, reason=reason)
    bugs = [bug for bug in BUGS if bug.affects(version)]
    if not bugs:
        return Verdict(version=version, fitness=Fitness.GOOD)
    return Verdict(
        version=version,
        fitness=Fitness.SUSPECT,
        reason=f"etcd {version} has known bugs, update to {_advised(version)} or newer: "
        + "; ".join(map(str, bugs)),
        one_member_only=any(bug.splits_members for bug in bugs),
    )


def _advised(version: EtcdVersion) -> EtcdVersion:
    """Return the first release that is free of all bugs, on the same minor line if that line has such a release."""
    good = [fix for bug in BUGS for fix in bug.fixed if not any(b.affects(fix) for b in BUGS)]
    return min(good, key=lambda fix: (fix.line != version.line, fix))

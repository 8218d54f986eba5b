"""Files removed after a backup: the oldest beyond `keep`, and leftovers of interrupted backups."""

from __future__ import annotations

import pytest

from strata.core.restore.backup_rotation import LEFTOVER_MS, Part, StoredFile, complete_stems, removals

NOW = 100 * LEFTOVER_MS


def files(*described: str, cluster: str = "default") -> list[StoredFile]:
    """Return files from `hours:parts`: `3:db,json` is a whole backup of three hours ago."""
    return [
        StoredFile(
            name=f"{cluster}-{hours}.{part}",
            stem=f"{cluster}-{hours}",
            cluster=cluster,
            unix_ms=NOW - round(float(hours) * 3600 * 1000),
            part=Part(part),
        )
        for hours, _, parts in (each.partition(":") for each in described)
        for part in parts.split(",")
    ]


def lost(
    there: list[StoredFile], *, keep: int, made: str = "default-0", related: set[str] | None = None
) -> list[str]:
    related = {file.stem for file in there} if related is None else related
    found = removals(there, cluster="default", made=made, related=related, keep=keep, now_unix_ms=NOW)
    return [file.name for file in found]


@pytest.mark.parametrize(
    ("there", "keep", "expected"),
    [
        (["0:db,json"], 1, []),
        (["0:db,json", "1:db,json"], 2, []),
        # metadata first, so that an interrupted removal leaves no backup that counts
        (["0:db,json", "1:db,json"], 1, ["default-1.json", "default-1.db"]),
        # the oldest first
        (
            ["0:db,json", "1:db,json", "2:db,json", "3:db,json"],
            2,
            ["default-3.json", "default-3.db", "default-2.json", "default-2.db"],
        ),
        # an incomplete backup does not count towards `keep`
        (["0:db,json", "1:db", "2:json", "3:db,json"], 2, []),
        # leftovers of interrupted backups are removed after a day, not before
        (["0:db,json", "23.9:db"], 9, []),
        (["0:db,json", "24.1:db"], 9, ["default-24.1.db"]),
        (["0:db,json", "24.1:tmp", "23.9:tmp"], 9, ["default-24.1.tmp"]),
        (["0:db,json", "30:db,json,tmp"], 9, ["default-30.tmp"]),
        # Strata never leaves metadata without a database: a person moved the database and may bring it back
        (["0:db,json", "99:json"], 1, []),
        # another host's clock is ahead: the new backup is kept
        (["0:db,json", "-1:db,json"], 1, ["default--1.json", "default--1.db"]),
    ],
)
def test_backup_rotation_removes_the_expected_files(there: list[str], keep: int, expected: list[str]) -> None:
    assert lost(files(*there), keep=keep) == expected


def test_files_of_other_clusters_stay() -> None:
    there = files("0:db,json") + files("50:db,json", "60:db,tmp", cluster="other")
    assert lost(there, keep=1) == []


def test_backups_of_another_lineage_stay_and_do_not_count_toward_keep() -> None:
    there = files("0:db,json", "1:db,json", "2:db,json", "3:db,json", "30:db")
    assert lost(there, keep=2, related={"default-2", "default-3"}) == [
        "default-3.json",
        "default-3.db",
        "default-30.db",
    ]


def test_complete_backups_are_listed_newest_first() -> None:
    assert complete_stems(files("3:db,json", "1:json,db", "2:db", "4:json")) == ["default-1", "default-3"]

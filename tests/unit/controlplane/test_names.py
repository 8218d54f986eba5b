"""Names of a backup's files: every written name is parsed, and no other name is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from strata.controlplane.names import backup_name, parse, parse_stem, temporary
from strata.core.restore.backup_rotation import Part
from strata.errors import InvalidArgument

TIME = datetime(2026, 11, 28, 3, 15, 2, 123456, tzinfo=UTC)
STEM = "strata-default-20261128T031502.123456Z-0000000000004711"


def test_a_name_is_readable_and_sorts_by_time() -> None:
    name = backup_name("default", TIME, 4711)
    assert (name.stem, name.database, name.metadata) == (STEM, f"{STEM}.db", f"{STEM}.json")
    assert backup_name("default", TIME + timedelta(microseconds=1), 1).stem > name.stem
    elsewhere = TIME.astimezone(timezone(timedelta(hours=5)))
    assert backup_name("default", elsewhere, 4711).stem == STEM


@pytest.mark.parametrize(
    "cluster", ["default", "a-b.c_d", "20261128T031502.123456Z-0000000000000001", "x" * 128]
)
@pytest.mark.parametrize("part", Part)
def test_every_name_is_read_back(cluster: str, part: Part) -> None:
    name = backup_name(cluster, TIME, 10**16 - 1)
    file = temporary(name.database) if part is Part.TEMPORARY else f"{name.stem}.{part.value}"
    assert len(file) <= 255
    found = parse(file)
    assert found is not None
    assert found[0] == name
    assert (found[1].stem, found[1].cluster, found[1].part) == (name.stem, cluster, part)
    assert found[1].unix_ms == 1795835702123


@pytest.mark.parametrize(
    "file",
    [
        "",
        "strata.json",
        f"{STEM}",
        f"{STEM}.db.bak",
        f".{STEM}.db",
        f"{STEM}.db.tmp",
        f"my{STEM}.db",
        f"{STEM}.db\n",
        STEM.replace("20261128", "20261328") + ".db",
        STEM.replace("default", "de fault") + ".db",
        STEM.replace("0000000000004711", "4711") + ".db",
        STEM.replace("4711", "٤٧١١") + ".db",
    ],
)
def test_other_file_names_are_not_backups(file: str) -> None:
    assert parse(file) is None


@pytest.mark.parametrize("given", [STEM, f"{STEM}.db", f"{STEM}.json"])
def test_a_person_may_name_a_backup_by_any_of_its_files(given: str) -> None:
    assert parse_stem(given).stem == STEM


@pytest.mark.parametrize("given", ["", "latest", "../etc/passwd", f"a/{STEM}"])
def test_a_name_that_is_no_backup_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgument, match="no name of a backup"):
        parse_stem(given)


@pytest.mark.parametrize(("cluster", "revision"), [("a/b", 1), ("", 1), ("a", -1), ("a", 10**16)])
def test_a_backup_name_rejects_an_invalid_cluster_or_revision(cluster: str, revision: int) -> None:
    with pytest.raises(InvalidArgument):
        backup_name(cluster, TIME, revision)

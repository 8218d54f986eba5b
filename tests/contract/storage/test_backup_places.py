"""The places of backups under one contract: a folder, and three servers that speak S3."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from strata.checkpoint.storage.sink import ObjectMissing
from strata.controlplane import places
from strata.controlplane.backup import MadeBackup, back_up
from strata.controlplane.backup_store import find_metadata, list_backups, newest_backup, verify_backup
from strata.controlplane.metadata import BackupCorrupt
from strata.controlplane.names import BackupName, backup_name, parse
from strata.controlplane.places import (
    BackupPlace,
    FolderPlace,
    S3BackupPlace,
    creating,
    open_place,
    put,
    unobserved,
)
from strata.core.restore.backup_rotation import Part
from strata.errors import ConfigError, NotFound, StorageError
from tests.contract.storage.conftest import new_bucket, s3_storage
from tests.storage.s3_stub import StubS3
from tests.unit.controlplane.stub_etcd import DATABASE, StubEtcd

BEGIN = datetime(2026, 11, 28, 3, 0, tzinfo=UTC)
NAME = backup_name("default", BEGIN, 4711)
LARGE = bytes(range(256)) * (places.CHUNK_BYTES // 256 + 400) + b"tail"
"""Data of more than one piece, and of more than one part of an upload."""


@pytest.fixture(params=["folder", "stub", "moto", "rclone"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> BackupPlace:
    if request.param == "folder":
        return FolderPlace(tmp_path / "backups")
    if request.param == "stub":
        return S3BackupPlace(s3_storage(request.getfixturevalue("stub").url))
    url = request.getfixturevalue(f"{request.param}_url")
    return S3BackupPlace(s3_storage(url, bucket=new_bucket(url)))


def made(place: BackupPlace, etcd: StubEtcd, *, at: datetime = BEGIN, keep: int = 48) -> MadeBackup:
    seconds = itertools.count()
    return back_up(
        etcd.connect,
        place,
        cluster="default",
        keep=keep,
        strata_version="0.1.0",
        now=lambda: at + timedelta(seconds=next(seconds)),
        progress=unobserved,
    )


def verified(place: BackupPlace, name: BackupName) -> None:
    verify_backup(place, name, advance=lambda _count: None, described=find_metadata(place, name))


def replaced(place: BackupPlace, name: str, data: bytes) -> None:
    place.delete(name)
    put(place, name, data)


@pytest.mark.parametrize("data", [b"x", LARGE], ids=["small", "large"])
def test_a_file_is_read_back(place: BackupPlace, data: bytes) -> None:
    place.prepare()
    with creating(place, NAME.database) as file:
        for start in range(0, len(data), 1 << 20):
            file.write(data[start : start + (1 << 20)])
        found = [parse(name) for name in place.names()]
        assert all(each is not None and each[1].part is Part.TEMPORARY for each in found)
        file.commit(unobserved)
    assert place.names() == [NAME.database]
    assert place.size(NAME.database) == len(data)
    assert b"".join(place.pieces(NAME.database)) == data


def test_a_file_that_was_not_committed_leaves_nothing(place: BackupPlace) -> None:
    place.prepare()
    with contextlib.suppress(KeyboardInterrupt), creating(place, NAME.database) as file:
        file.write(LARGE)
        raise KeyboardInterrupt
    assert place.names() == []
    put(place, NAME.database, b"x")  # an uncommitted file does not block the next file of its name
    assert place.read(NAME.database) == b"x"


def test_no_file_replaces_another(place: BackupPlace) -> None:
    place.prepare()
    put(place, NAME.metadata, b"first")
    with pytest.raises(StorageError, match="exists already"):
        put(place, NAME.metadata, b"second")
    assert (place.read(NAME.metadata), place.names()) == (b"first", [NAME.metadata])


def test_reading_a_missing_backup_fails_and_deleting_it_does_not(place: BackupPlace) -> None:
    place.prepare()
    place.delete(NAME.database)
    for look in (place.read, place.size, lambda name: list(place.pieces(name))):
        with pytest.raises(ObjectMissing):
            look(NAME.metadata)


def test_backups_are_made_rotated_listed_and_verified(place: BackupPlace) -> None:
    etcd = StubEtcd()
    backups = [made(place, etcd, at=BEGIN + timedelta(hours=hour), keep=2) for hour in range(3)]
    listed = list_backups(place)
    assert [each.name for each in listed] == [backups[2].name, backups[1].name]
    assert [each.metadata for each in listed] == [backups[2].metadata, backups[1].metadata]
    assert len(place.names()) == 4
    assert newest_backup(place) == backups[2].name
    for backup in backups[1:]:
        verified(place, backup.name)
    with pytest.raises(NotFound, match="no finished backup strata-default-"):
        find_metadata(place, backups[0].name)


def test_a_large_backup_passes_in_pieces(place: BackupPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = StubEtcd()
    etcd.snapshot_bytes = LARGE + hashlib.sha256(LARGE).digest()
    etcd.piece_bytes = 32 << 10
    backup = made(place, etcd)
    monkeypatch.setattr(places, "CHUNK_BYTES", 1 << 20)
    assert max(map(len, place.pieces(backup.name.database))) == 1 << 20
    verified(place, backup.name)


@pytest.mark.parametrize(
    ("damage", "printed"),
    [
        (lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], "has changed since the backup"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 128]), "has changed since the backup"),
        (lambda data: data[:-100], f"has {len(DATABASE) - 68} bytes, and had {len(DATABASE) + 32}"),
        (lambda data: data + b"\0", "bytes, and had"),
    ],
    ids=["a flipped bit", "a flipped bit at the end", "truncated", "longer"],
)
def test_a_damaged_database_is_found(
    place: BackupPlace, damage: Callable[[bytes], bytes], printed: str
) -> None:
    name = made(place, StubEtcd()).name
    replaced(place, name.database, damage(b"".join(place.pieces(name.database))))
    with pytest.raises(BackupCorrupt, match=printed):
        verified(place, name)


def test_a_database_that_is_missing_is_damage(place: BackupPlace) -> None:
    name = made(place, StubEtcd()).name
    place.delete(name.database)
    with pytest.raises(BackupCorrupt, match="is missing"):
        verified(place, name)
    assert [each.fault for each in list_backups(place)] == ["its database is missing"]


def test_metadata_of_another_backup_is_damage(place: BackupPlace) -> None:
    etcd = StubEtcd()
    first, second = made(place, etcd), made(place, etcd, at=BEGIN + timedelta(hours=1))
    replaced(place, second.name.metadata, place.read(first.name.metadata))
    with pytest.raises(BackupCorrupt, match="describes another backup"):
        find_metadata(place, second.name)
    assert [each.fault == "" for each in list_backups(place)] == [False, True]
    assert newest_backup(place) == first.name


def test_an_unfinished_backup_is_listed_as_unfinished_and_is_not_the_newest(place: BackupPlace) -> None:
    first = made(place, StubEtcd())
    later = backup_name("default", BEGIN + timedelta(hours=1), 4711)
    put(place, later.database, b"x" * 100)
    put(place, "notes.txt", b"not ours")
    assert [(each.name, each.fault, each.size_bytes) for each in list_backups(place)] == [
        (later, "unfinished", 100),
        (first.name, "", len(DATABASE) + 32),
    ]
    assert newest_backup(place) == first.name


def test_backups_are_listed_by_cluster_name(place: BackupPlace) -> None:
    first = made(place, StubEtcd())
    put(place, backup_name("other", BEGIN, 1).database, b"x")
    assert [each.name for each in list_backups(place, cluster="default")] == [first.name]
    with pytest.raises(NotFound, match="no finished backup of cluster other"):
        newest_backup(place, cluster="other")


# -- S3 alone


def test_an_upload_that_is_interrupted_leaves_nothing_there(stub: StubS3) -> None:
    place = S3BackupPlace(s3_storage(stub.url))
    etcd = StubEtcd()
    etcd.snapshot_bytes = 3 * LARGE + hashlib.sha256(3 * LARGE).digest()

    @contextlib.contextmanager
    def ctrl_c(what: str, _total_bytes: int) -> Iterator[Callable[[int], None]]:
        def advance(_count: int) -> None:
            if what == "uploading":
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        back_up(
            etcd.connect,
            place,
            cluster="default",
            keep=1,
            strata_version="0.1.0",
            now=lambda: BEGIN,
            progress=ctrl_c,
        )
    assert (stub.objects, stub.uploads) == ({}, {})
    assert made(place, etcd).warnings == ()


@pytest.mark.parametrize(
    ("status", "code", "printed", "hint"),
    [
        (404, "NoSuchBucket", "NoSuchBucket", "create the bucket"),
        (403, "InvalidAccessKeyId", "InvalidAccessKeyId", "the credentials are not accepted"),
        (403, "AccessDenied", "AccessDenied", "the credentials may not do this here"),
    ],
)
def test_an_unusable_bucket_fails_a_backup_before_etcd_is_read(
    stub: StubS3, status: int, code: str, printed: str, hint: str
) -> None:
    stub.fail("list", status=status, code=code, times=99)
    etcd = StubEtcd()
    with pytest.raises(StorageError, match=printed) as caught:
        made(S3BackupPlace(s3_storage(stub.url)), etcd)
    assert hint in caught.value.hint
    assert etcd.opened == 0


def test_a_backup_whose_metadata_the_server_rejects_stays_unfinished(stub: StubS3) -> None:
    place = S3BackupPlace(s3_storage(stub.url))
    stub.fail("put", status=403, times=99, key=".json")
    with pytest.raises(StorageError, match="AccessDenied"):
        made(place, StubEtcd())
    assert [each.fault for each in list_backups(place)] == ["unfinished"]


# -- the names of places


def test_a_place_is_a_folder_or_a_prefix_of_s3(tmp_path: Path) -> None:
    assert open_place(str(tmp_path)).uri == tmp_path.as_uri()
    assert open_place(tmp_path.as_uri()).uri == tmp_path.as_uri()
    assert open_place("s3://bucket/a/b/").uri == "s3://bucket/a/b"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", "no place for backups"),
        ("gs://bucket/x", "not to gs:"),
        ("s3://user:secret@bucket/x", "has a user"),
        ("s3://", "names no bucket"),
    ],
)
def test_an_invalid_backup_place_is_refused(text: str, printed: str) -> None:
    with pytest.raises(ConfigError, match=printed):
        open_place(text)


def test_without_the_extra_an_error_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "strata.checkpoint.storage.s3_control", None)
    with pytest.raises(ConfigError, match="backups in S3 need") as caught:
        open_place("s3://bucket/x")
    assert caught.value.hint == 'pip install "strata-control[s3]"'


def test_without_credentials_an_error_says_how_to_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="no credentials are found for s3://bucket/x"):
        open_place("s3://bucket/x")

"""One backup, with an etcd in memory and a real folder: when the backup counts, and the files that a failure leaves."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from strata.controlplane.backup import MadeBackup, back_up
from strata.controlplane.backup_store import (
    backup_to_restore,
    find_metadata,
    list_backups,
    newest_backup,
    verify_backup,
)
from strata.controlplane.metadata import BackupCorrupt
from strata.controlplane.names import backup_name, parse_stem
from strata.controlplane.places import FolderPlace, unobserved
from strata.core.kv.records import ClusterUid, decode, encode
from strata.core.kv.txn import Delete, Put, Range, Txn
from strata.core.restore.records import Backup
from strata.errors import Conflict, NotFound, Refused, StorageError, StrataError, Unavailable
from strata.etcd import Alarm, MemberStatus
from tests.unit.controlplane.stub_etcd import KEYS, SNAPSHOT, UID, StubEtcd

BEGIN = datetime(2026, 11, 28, 3, 0, tzinfo=UTC)


@pytest.fixture
def etcd() -> StubEtcd:
    return StubEtcd()


@pytest.fixture
def place(tmp_path: Path) -> FolderPlace:
    return FolderPlace(tmp_path / "backups")


def clock(begin: datetime = BEGIN) -> Callable[[], datetime]:
    """Return a clock that advances by one second at each reading."""
    seconds = itertools.count()
    return lambda: begin + timedelta(seconds=next(seconds))


def made(
    etcd: StubEtcd,
    place: FolderPlace,
    *,
    keep: int = 48,
    cluster: str = "default",
    now: Callable[[], datetime] | None = None,
) -> MadeBackup:
    return back_up(
        etcd.connect,
        place,
        cluster=cluster,
        keep=keep,
        strata_version="0.1.0",
        now=now or clock(),
        progress=unobserved,
    )


def counting(place: FolderPlace) -> list[str]:
    return [backup.name.stem for backup in list_backups(place) if not backup.fault]


def test_a_backup_is_the_snapshot_and_its_metadata(etcd: StubEtcd, place: FolderPlace) -> None:
    backup = made(etcd, place)
    assert backup.warnings == ()
    assert etcd.requests == ["h2:2379"], "a follower"
    assert place.names() == [f"{backup.name.stem}.db", f"{backup.name.stem}.json"]
    assert (place.folder / backup.name.database).read_bytes() == SNAPSHOT
    described = json.loads((place.folder / backup.name.metadata).read_bytes())
    assert described == {
        "format": "strata-controlplane-backup",
        "version": 1,
        "cluster": "default",
        "cluster_uid": UID,
        "etcd_cluster_id": "f025",
        "revision": 2,
        "member": "etcd-2",
        "etcd_version": "3.5.30",
        "strata_version": "0.1.0",
        "size_bytes": len(SNAPSHOT),
        "sha256": described["sha256"],
        "time": "2026-11-28T03:00:00+00:00",
    }
    name = newest_backup(place)
    verify_backup(place, name, advance=lambda _count: None, described=find_metadata(place, name))
    assert etcd.opened == etcd.closed == 2


def test_only_the_owner_may_read_a_backup(etcd: StubEtcd, place: FolderPlace) -> None:
    made(etcd, place)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place.folder, *place.folder.iterdir())]
    assert modes == [0o700, 0o600, 0o600]


def test_a_backup_is_recorded_in_etcd(etcd: StubEtcd, place: FolderPlace) -> None:
    backup = made(etcd, place)
    [kv] = etcd.memory.read(Range(key=KEYS.backup)).kvs
    assert decode(Backup, kv.value) == Backup(
        revision=2, unix_ms=backup.name.unix_ms, where=place.uri, size_bytes=len(SNAPSHOT)
    )


# -- failures before the backup counts


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        SNAPSHOT[:-1],
        SNAPSHOT[: len(SNAPSHOT) // 2],
        SNAPSHOT[:-32],
        SNAPSHOT[:1000] + bytes([SNAPSHOT[1000] ^ 4]) + SNAPSHOT[1001:],
        SNAPSHOT + b"\0",
    ],
    ids=["nothing", "short by one", "half", "no trailer", "a flipped bit", "one more"],
)
def test_a_damaged_stream_is_never_kept(etcd: StubEtcd, place: FolderPlace, sent: bytes) -> None:
    etcd.snapshot_bytes = sent
    with pytest.raises(BackupCorrupt, match="snapshot of etcd member etcd-2 came damaged"):
        made(etcd, place)
    assert place.names() == []
    assert etcd.memory.read(Range(key=KEYS.backup)).kvs == ()


@pytest.mark.parametrize("error", [Unavailable("the stream broke"), KeyboardInterrupt()])
def test_a_broken_stream_and_ctrl_c_leave_nothing(
    etcd: StubEtcd, place: FolderPlace, error: BaseException
) -> None:
    etcd.breaks_with = error
    with pytest.raises(type(error)):
        made(etcd, place)
    assert place.names() == []
    assert etcd.opened == etcd.closed


@pytest.mark.parametrize("step", range(1, 7))
@pytest.mark.parametrize("dies", [False, True], ids=["an error", "the process dies"])
def test_a_failed_step_leaves_no_partial_backup_that_counts(
    etcd: StubEtcd, place: FolderPlace, monkeypatch: pytest.MonkeyPatch, step: int, dies: bool
) -> None:
    """The steps are fsync, rename and fsync of the folder, first for the database, then for the metadata."""
    made(etcd, place)
    left = itertools.count(1)
    dead = False

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal dead
            if next(left) == step:
                dead = dies
                raise OSError(5, "Input/output error")
            return real(*given, **named)

        return call

    def alive(real: Callable[..., Any]) -> Callable[..., Any]:
        # a dead process removes no files
        return lambda *given, **named: None if dead else real(*given, **named)

    # the fsync of a folder is in `sync_folder`, which `places` imported by name
    with monkeypatch.context() as patch:
        patch.setattr("strata.controlplane.places.os.fsync", counted(os.fsync))
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "unlink", alive(Path.unlink))
        with pytest.raises(StorageError, match="Input/output error"):
            made(etcd, place, now=clock(BEGIN + timedelta(hours=1)))
    for name in counting(place):
        backup = parse_stem(name)
        verify_backup(place, backup, advance=lambda _count: None, described=find_metadata(place, backup))
    if not dies:
        assert len(counting(place)) == 1, "the failed one does not count"
        assert not [name for name in place.names() if name.endswith(".tmp")]
    # two days later the next backup succeeds, and removes the files left behind
    made(etcd, place, now=clock(BEGIN + timedelta(days=2)))
    assert all(not backup.fault for backup in list_backups(place))
    assert len(place.names()) == 2 * len(counting(place))


def test_an_unknown_cluster_is_refused_and_the_known_ones_are_listed(
    etcd: StubEtcd, place: FolderPlace
) -> None:
    for cluster in ("prod", "prod-2", "zeta"):
        key = KEYS.uid.replace("default", cluster)
        etcd.memory.execute(Txn(success=(Put(key=key, value=encode(ClusterUid(uid="x"))),)))
    with pytest.raises(NotFound, match="etcd holds no cluster typo") as caught:
        made(etcd, place, cluster="typo")
    assert caught.value.hint == "it holds default, prod-2, prod, zeta: --cluster names one"
    assert (place.names(), etcd.requests) == ([], [])


def test_an_empty_etcd_is_refused_as_possibly_the_wrong_one(etcd: StubEtcd, place: FolderPlace) -> None:
    etcd.memory = type(etcd.memory)()
    with pytest.raises(NotFound, match="etcd holds no cluster default") as caught:
        made(etcd, place)
    assert caught.value.hint == "no coordinator has ever started there: is it the right etcd?"


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        (lambda status: Unavailable("no connection"), "h2:2379: it does not answer \\(no connection\\)"),
        (lambda status: replace(status, leader_id=0), "h2:2379: it knows no leader"),
    ],
)
def test_without_a_healthy_member_the_error_gives_the_reason(
    etcd: StubEtcd,
    place: FolderPlace,
    change: Callable[[MemberStatus], MemberStatus | StrataError],
    printed: str,
) -> None:
    for name, status in etcd.status.items():
        assert isinstance(status, MemberStatus)
        etcd.status[name] = change(status)
    with pytest.raises(Unavailable, match=f"no etcd member can give a snapshot: .*{printed}"):
        made(etcd, place)
    assert place.names() == []


def test_a_corrupt_member_is_passed_over(etcd: StubEtcd, place: FolderPlace) -> None:
    etcd.alarms_on = (Alarm(member_id=2, kind="CORRUPT"), Alarm(member_id=3, kind="NOSPACE"))
    assert made(etcd, place).metadata.member == "etcd-3"


def test_a_denied_backup_names_the_missing_root_role(etcd: StubEtcd, place: FolderPlace) -> None:
    etcd.status = dict.fromkeys(etcd.status, Refused("etcd h1:2379: etcdserver: permission denied"))
    with pytest.raises(Refused, match="needs an etcd user with the role root"):
        made(etcd, place)


@pytest.mark.parametrize("by_then", ["restoring", "another"])
def test_a_snapshot_of_a_cluster_that_is_being_restored_does_not_count(
    etcd: StubEtcd, place: FolderPlace, by_then: str
) -> None:
    """A restore begins just before the member takes the snapshot, which may have half of the keys and no uid."""

    def restore_begins() -> None:
        removed = Txn(success=(Delete(key=KEYS.uid),))
        new = Txn(success=(Put(key=KEYS.uid, value=encode(ClusterUid(uid=f"{UID}.77"))),))
        etcd.memory.execute(removed if by_then == "restoring" else new)

    etcd.at_snapshot = restore_begins
    with pytest.raises(Conflict, match="changed while its snapshot was taken") as caught:
        made(etcd, place)
    assert (
        "etcd holds no cluster default" if by_then == "restoring" else f"{UID}.77"
    ) in caught.value.message
    assert place.names() == []


# -- failures after the backup counts


def test_a_backup_that_etcd_could_not_record_still_counts(etcd: StubEtcd, place: FolderPlace) -> None:
    etcd.writes_fail_with = Unavailable("no leader")
    backup = made(etcd, place)
    assert backup.warnings == (
        "etcd has no record of this backup, so strata doctor does not see it: no leader",
    )
    assert counting(place) == [backup.name.stem]


def test_a_backup_is_not_recorded_in_a_replaced_cluster(etcd: StubEtcd, place: FolderPlace) -> None:
    original = etcd.execute

    async def replaced(txn: Txn) -> Any:
        etcd.memory.execute(Txn(success=(Put(key=KEYS.uid, value=encode(ClusterUid(uid="new"))),)))
        return await original(txn)

    etcd.execute = replaced  # type: ignore[method-assign]
    [warning] = made(etcd, place).warnings
    assert "holds another cluster default by now" in warning
    assert etcd.memory.read(Range(key=KEYS.backup)).kvs == ()


def test_a_newer_record_is_kept_and_an_unreadable_one_is_replaced(etcd: StubEtcd, place: FolderPlace) -> None:
    newer = encode(Backup(revision=9, unix_ms=2**45, where="s3://b/p", size_bytes=1))
    etcd.memory.execute(Txn(success=(Put(key=KEYS.backup, value=newer),)))
    assert made(etcd, place).warnings == ()
    assert etcd.memory.read(Range(key=KEYS.backup)).kvs[0].value == newer
    etcd.memory.execute(Txn(success=(Put(key=KEYS.backup, value=b"by hand"),)))
    again = made(etcd, place, now=clock(BEGIN + timedelta(hours=1)))
    assert decode(Backup, etcd.memory.read(Range(key=KEYS.backup)).kvs[0].value).unix_ms == again.name.unix_ms


def test_older_backups_that_cannot_be_deleted_are_a_warning(
    etcd: StubEtcd, place: FolderPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(etcd, place)

    def refuse(_self: FolderPlace, name: str) -> None:
        raise StorageError(f"cannot remove {name}: Permission denied")

    monkeypatch.setattr(FolderPlace, "delete", refuse)
    backup = made(etcd, place, keep=1, now=clock(BEGIN + timedelta(hours=1)))
    assert len(backup.warnings) == 1
    assert backup.warnings[0].startswith("older backups stay: cannot remove strata-default-")
    assert len(counting(place)) == 2


# -- backups at the same time, and of other clusters


def test_pruning_keeps_the_newest_backups_and_foreign_files(etcd: StubEtcd, place: FolderPlace) -> None:
    place.prepare()
    others = backup_name("other", BEGIN - timedelta(days=9), 7)
    foreign = {"notes.txt", "strata.json", others.database, others.metadata, "strata-default-x.db"}
    for name in foreign:
        (place.folder / name).write_bytes(b"x")
    times = [BEGIN + timedelta(hours=hour) for hour in range(4)]
    backups = [made(etcd, place, keep=2, now=clock(time)) for time in times]
    assert [backup.removed_backups for backup in backups] == [0, 0, 1, 1]
    stay = [backup.name for backup in backups[2:]]
    assert set(place.names()) == foreign | {file for name in stay for file in (name.database, name.metadata)}


def test_backups_of_an_empty_cluster_do_not_displace_those_of_its_predecessor(
    etcd: StubEtcd, place: FolderPlace
) -> None:
    """etcd is wiped, a coordinator begins a new cluster of the same name, and the backup timer keeps running."""
    good = [made(etcd, place, keep=2, now=clock(BEGIN + timedelta(hours=hour))) for hour in range(2)]
    unreadable = made(etcd, place, keep=9, now=clock(BEGIN - timedelta(hours=1)))
    (place.folder / unreadable.name.metadata).write_bytes(b"{}")
    etcd.begins_anew("new")
    for hour in range(2, 6):
        empty = made(etcd, place, keep=2, now=clock(BEGIN + timedelta(hours=hour)))
        assert empty.warnings == ()
    stay = counting(place)
    assert stay[2:] == [backup.name.stem for backup in reversed(good)]
    assert len(stay) == 4, "and two of the new cluster"
    assert unreadable.name.database in place.names()
    with pytest.raises(Refused, match="backups of 2 clusters named default") as caught:
        backup_to_restore(place, cluster="default")
    assert f"new has 2, the newest {stay[0]}; {UID} has 2, the newest {stay[2]}" in caught.value.hint
    assert backup_to_restore(place, cluster="default", lineage=UID) == good[1].name
    assert backup_to_restore(place, cluster="default", lineage="new").stem == stay[0]
    with pytest.raises(NotFound, match="no finished backup of lineage other"):
        backup_to_restore(place, cluster="default", lineage="other")


def test_backups_of_a_restored_cluster_are_of_one_lineage(etcd: StubEtcd, place: FolderPlace) -> None:
    made(etcd, place)
    etcd.begins_anew(f"{UID}.77")
    later = made(etcd, place, keep=1, now=clock(BEGIN + timedelta(hours=1)))
    assert counting(place) == [later.name.stem]
    assert backup_to_restore(place, cluster="default") == later.name
    with pytest.raises(NotFound, match="no finished backup of cluster other"):
        backup_to_restore(place, cluster="other")


def test_two_backups_that_have_one_name_do_not_mix(etcd: StubEtcd, place: FolderPlace) -> None:
    etcd.writes_fail_with = Unavailable("so that the revision stays")
    first = made(etcd, place, now=lambda: BEGIN)
    etcd.snapshot_bytes = b""
    with pytest.raises(StorageError, match="exists already"):
        made(etcd, place, now=lambda: BEGIN)
    assert counting(place) == [first.name.stem]


def test_a_backup_that_another_one_is_writing_is_left_alone(etcd: StubEtcd, place: FolderPlace) -> None:
    place.prepare()
    writing = place.create(backup_name("default", BEGIN, 2).database)
    with pytest.raises(StorageError, match="written by another process"):
        made(etcd, place, now=lambda: BEGIN)
    writing.write(b"x")
    writing.commit(unobserved)
    later = made(etcd, place, keep=1, now=clock(BEGIN + timedelta(hours=1)))
    assert later.removed == (), "unfinished, and younger than a day"
    assert counting(place) == [later.name.stem]


def test_the_backup_folder_is_created_but_its_parents_are_not(etcd: StubEtcd, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file") as caught:
        made(etcd, FolderPlace(tmp_path / "not" / "mounted"))
    assert caught.value.hint == "make the folder above it first"
    assert etcd.opened == 0, "the place is asked first"

"""The findings of `strata doctor` on storage roots: folders and buckets."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.checkpoint.storage import root
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.cli.checks import mounts, storage
from strata.cli.checks.finding import Finding
from tests.not_none import not_none
from tests.storage.s3_stub import StubS3, serving
from tests.storage.small_disk import Need, mounted

URI = "s3://bucket/runs"


def found(where: object) -> dict[str, Finding]:
    return {finding.what: finding for finding in storage.storage(str(where))}


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    return {what: finding.level for what, finding in findings.items()}


# -- a folder


def test_a_folder_is_writable_and_nothing_stays(tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert findings["storage"].level in {"OK", "WARN"}
    assert "writable" in findings["storage"].says
    assert "direct I/O" in findings["storage kind"].says
    assert "no strata.json yet" in findings["storage root"].says
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "printed"), [("file", "Not a directory"), ("absent", "No such file"), ("gs://x/y", "not to gs:")]
)
def test_an_unusable_storage_path_is_one_failure(tmp_path: Path, name: str, printed: str) -> None:
    (tmp_path / "file").write_text("")
    findings = found(name if "://" in name else tmp_path / name)
    assert levels(findings) == {"storage": "FAIL"}
    assert printed in findings["storage"].says
    assert findings["storage"].hint


def test_missing_file_system_features_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    monkeypatch.setattr(
        fcntl, "flock", lambda *_: None
    )  # as on a mount without locks: every caller gets the lock
    finding = found(tmp_path)["storage"]
    assert finding.level == "FAIL"
    assert finding.says.endswith("cannot link files (link) and cannot lock files (flock)")
    assert "docs/storage.md" in finding.hint
    assert finding.commands == (f"findmnt -T {tmp_path}",)


def test_a_rename_that_does_not_replace_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: None)
    assert "cannot replace files by renaming (rename)" in found(tmp_path)["storage"].says


def test_direct_io_that_refuses_the_write_counts_as_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", refused)
    assert "direct I/O: no" in found(tmp_path)["storage kind"].says


def test_a_full_disk_is_not_a_missing_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "_written", full)
    finding = found(tmp_path)["storage"]
    assert (finding.level, finding.says) == ("FAIL", f"{tmp_path}: No space left on device")
    assert "full-checkpoint-disk.md" in finding.hint


@pytest.mark.parametrize(
    ("free_bytes", "inodes", "free_inodes", "level", "printed"),
    [
        (1 << 40, 1 << 20, 1 << 19, "OK", "1.0 TiB free"),
        (1 << 29, 1 << 20, 1 << 19, "WARN", "512.0 MiB free"),
        (1 << 40, 1 << 20, 500, "WARN", "500 of 1048576 inodes free"),
        (1 << 40, 0, 0, "OK", "1.0 TiB free"),
    ],
)
def test_the_free_space_check_covers_bytes_and_inodes(
    free_bytes: int, inodes: int, free_inodes: int, level: str, printed: str
) -> None:
    finding = storage.free_space_finding(
        Path("/x y"), free_bytes=free_bytes, inodes=inodes, free_inodes=free_inodes
    )
    assert finding.level == level
    assert printed in finding.says
    assert all("'/x y'/*" in command for command in finding.commands)
    assert bool(finding.commands) == (level == "WARN")


@pytest.mark.parametrize(("seconds", "level"), [(0.0004, "OK"), (0.05, "OK"), (0.051, "WARN")])
def test_a_slow_sync_is_warned_of(seconds: float, level: str) -> None:
    finding = storage.sync_finding(Path("/x"), seconds)
    assert finding.level == level
    assert f"{1000 * seconds:.1f} ms" in finding.says
    assert bool(finding.commands) == (level == "WARN")


def test_a_full_and_a_read_only_file_system_show_the_command_to_run(tmp_path: Path, need: Need) -> None:
    with mounted(tmp_path / "full", need, size="1m") as disk:
        disk.fill()
        finding = found(disk.folder)["storage"]
        assert (finding.level, finding.commands) == ("FAIL", (f"du -xsh {disk.folder}/*",))
        disk.clear()
        assert found(disk.folder)["storage"].level == "WARN", "1 MiB is little"
        subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], check=True)
        finding = found(disk.folder)["storage"]
        assert finding.commands == (f"mount -o remount,rw {disk.folder}",)
        assert "memory" in found_mount(disk.folder)


def found_mount(folder: Path) -> str:
    (finding,) = mounts.mount_findings(folder, mounts.mount_of(folder))
    assert finding.level == "WARN"
    return finding.says


# -- mount options

MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/vda rw
30 22 0:40 / /mnt rw shared:1 - tmpfs none rw
31 30 0:41 / /mnt/check\\040points rw,relatime - nfs4 host:/export rw,vers=4.2,hard,local_lock=none,addr=10.0.0.1
32 30 0:42 / /mnt/lustre rw - lustre mgs:/fs rw
33 22 0:43 / /mnt/lustre rw - fuse.sshfs host: rw
34 22 0:44 / /mnt/soft rw - nfs4 host:/export rw,vers=4.2,soft,local_lock=none
35 22 0:45 / /mnt/nolock rw - nfs host:/export rw,vers=3,hard,nolock,local_lock=all
36 22 0:46 / /mnt/scratch rw - lustre 10.0.0.1@tcp:/fs rw,localflock
37 22 0:47 / /mnt/work rw - lustre 10.0.0.1@tcp:/fs rw,flock,lazystatfs
38 22 0:48 / /run rw - overlay overlay rw,lowerdir=/a
a line that is none
"""


@pytest.fixture
def mountinfo(tmp_path: Path) -> Path:
    path = tmp_path / "mounts"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/mnt", "tmpfs"),
        ("/mntx", "ext4"),
        ("/mnt/check points/run", "nfs4"),
        ("/mnt/lustre", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_its_innermost_mount(mountinfo: Path, path: str, kind: str) -> None:
    assert not_none(mounts.mount_of(Path(path), mountinfo)).kind == kind
    assert mounts.mount_of(Path(path), mountinfo / "none") is None


@pytest.mark.parametrize(
    ("path", "level", "printed", "command"),
    [
        ("/mnt/check points", "OK", "hard,local_lock=none,vers=4.2", None),
        ("/mnt/soft", "WARN", "with soft", "mount -t nfs4 -o hard host:/export /mnt/soft"),
        (
            "/mnt/nolock",
            "WARN",
            "locks hold on this host alone",
            "mount -t nfs -o hard,local_lock=none host:/export /mnt/nolock",
        ),
        (
            "/mnt/scratch",
            "WARN",
            "with localflock: locks hold on this host alone",
            "mount -t lustre -o flock 10.0.0.1@tcp:/fs /mnt/scratch",
        ),
        ("/mnt/work", "OK", "flock", None),
        ("/mnt", "WARN", "tmpfs is memory", "findmnt -T /mnt"),
        ("/run/x", "WARN", "lost with the container", "docker run -v /data/checkpoints:/run/x IMAGE"),
    ],
)
def test_unsafe_mount_options_are_a_warning_with_the_command(
    mountinfo: Path, path: str, level: str, printed: str, command: str | None
) -> None:
    (finding,) = mounts.mount_findings(Path(path), mounts.mount_of(Path(path), mountinfo))
    assert finding.level == level
    assert printed in finding.says
    assert (finding.commands[-1] if finding.commands else None) == command


def test_a_plain_disk_has_no_line_about_its_mount(mountinfo: Path) -> None:
    assert list(mounts.mount_findings(Path("/"), mounts.mount_of(Path("/"), mountinfo))) == []


def test_a_lustre_without_locks_is_mounted_with_flock(
    tmp_path: Path, mountinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lustre = not_none(mounts.mount_of(Path("/mnt/lustre"), mountinfo))
    without = dataclasses.replace(lustre, kind="lustre", source="mgs:/fs", options=frozenset({"rw"}))

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(storage, "mount_of", lambda _: without)
    finding = found(tmp_path)["storage"]
    assert finding.commands == ("umount /mnt/lustre", "mount -t lustre -o flock mgs:/fs /mnt/lustre")


def test_a_network_file_system_is_reported_as_such(
    tmp_path: Path, mountinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nfs = mounts.mount_of(Path("/mnt/check points"), mountinfo)
    monkeypatch.setattr(storage, "mount_of", lambda _: nfs)
    findings = found(tmp_path)
    assert "nfs4 over the network" in findings["storage kind"].says
    assert findings["storage shared"].level == "OK"
    assert findings["storage shared"].commands == (f"strata doctor --shared --storage {tmp_path}",)


# -- a root shared by hosts


def shared(root: Path) -> Finding:
    return {each.what: each for each in storage.storage(str(root), marking=True)}["storage shared"]


def test_a_mark_of_another_mount_proves_that_the_root_is_shared(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.symlink_to(here)  # the same files under another path, as on another mount
    assert shared(here).level == "WARN", "nobody has been here"
    assert shared(here).level == "WARN", "its own mark proves nothing"
    seen = shared(there)
    assert (seen.level, seen.commands) == ("OK", ())
    assert "the marks of others are seen here" in seen.says
    assert shared(here).level == "OK"
    assert len(list(here.iterdir())) == 2, "one mark for each"
    assert found(here)["storage root"].level == "OK", "marks are no jobs"


def test_two_separate_roots_are_not_reported_as_shared(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for each in (one, other):
        each.mkdir()
        assert shared(each).level == "WARN"


def test_old_and_malformed_marks_prove_nothing(tmp_path: Path) -> None:
    old = tmp_path / ".strata-seen-old.tmp"
    old.write_text('{"host": "h1", "boot": "b", "root": "/mnt"}')
    os.utime(old, (0, 0))
    for number, text in enumerate(("{", "[]", '{"host": 1}', "x" * 10_000)):
        (tmp_path / f".strata-seen-{number}.tmp").write_text(text)
    os.mkfifo(tmp_path / ".strata-seen-fifo.tmp")
    assert shared(tmp_path).level == "WARN"
    assert not old.exists()


def test_without_the_option_no_mark_stays(tmp_path: Path) -> None:
    assert "storage shared" not in found(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- owners of a root


def test_a_root_reports_its_mode_clusters_and_id(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path, nonce=lambda: "n")
    number = root.claim(place, root.COORDINATED)
    assert (
        f"coordinated, no job yet, id {number}; a host that shares it" in found(tmp_path)["storage root"].says
    )
    for uid, job in (("abc.12", "gpt"), ("abc", "digits"), ("def", "other")):
        root.claim(place, root.job_owner(uid, job), folder=job)
    assert "coordinated, jobs of cluster abc, def, id" in found(tmp_path)["storage root"].says
    assert "the folder of job gpt of cluster abc, id" in found(tmp_path / "gpt")["storage root"].says


def test_a_root_that_another_client_made_has_no_id(tmp_path: Path) -> None:
    (tmp_path / "strata.json").write_text('{"format": "strata-root", "version": 1, "owner": "standalone"}')
    assert "standalone, without an id" in found(tmp_path)["storage root"].says
    (tmp_path / "strata.json").write_text("{")
    assert found(tmp_path)["storage root"].level == "FAIL"


# -- a bucket


@pytest.fixture
def conditions() -> bool:
    return True


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, conditions: bool) -> Iterator[StubS3]:
    pytest.importorskip("boto3")
    with serving(StubS3(conditions=conditions)) as server:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": server.url,
        }.items():
            monkeypatch.setenv(name, value)
        yield server


def test_a_bucket_is_written_conditionally_and_in_parts_and_nothing_stays(stub: StubS3) -> None:
    findings = found(URI)
    assert set(levels(findings).values()) == {"OK"}
    assert "the second is refused" in findings["storage writers"].says
    assert stub.count("complete") == 1
    assert stub.objects == {}


@pytest.mark.parametrize("conditions", [False])
def test_a_server_that_ignores_conditions_is_warned_of(stub: StubS3) -> None:
    findings = found(URI)
    assert levels(findings)["storage writers"] == "WARN"
    assert "--bucket bucket --key runs/probe --if-none-match '*'" in findings["storage writers"].commands[0]
    assert stub.objects == {}


@pytest.mark.parametrize(
    ("kind", "status", "printed", "hint"),
    [
        ("put", 404, "NoSuchBucket", "create the bucket"),
        ("put", 403, "AccessDenied", "the credentials may not do this here"),
        ("create", 403, "AccessDenied", "the credentials may not do this here"),
    ],
)
def test_a_wrong_bucket_and_wrong_credentials_are_one_line(
    stub: StubS3, kind: str, status: int, printed: str, hint: str
) -> None:
    stub.fail(kind, status=status, times=99)
    findings = found(URI)
    assert levels(findings) == {"storage": "FAIL"}
    assert printed in findings["storage"].says
    assert hint in findings["storage"].hint
    assert findings["storage"].commands == ("aws s3 ls s3://bucket/runs/",)

"""What `strata doctor` makes of storage roots: folders and buckets."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.checkpoint import root
from strata.checkpoint.local_storage import LocalStorage
from strata.cli.checks import storage
from strata.cli.checks.finding import Finding
from tests.s3_stub import StubS3, serving

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
    ("name", "said"), [("file", "Not a directory"), ("absent", "No such file"), ("gs://x/y", "not to gs:")]
)
def test_what_is_no_folder_is_one_failure(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    findings = found(name if "://" in name else tmp_path / name)
    assert levels(findings) == {"storage": "FAIL"}
    assert said in findings["storage"].says
    assert findings["storage"].hint


def test_what_a_file_system_cannot_do_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as a mount without locks: nobody is refused
    finding = found(tmp_path)["storage"]
    assert finding.level == "FAIL"
    assert finding.says.endswith("cannot link files (link) and cannot lock files (flock)")


def test_a_full_disk_is_no_lack_of_ability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "_written", full)
    finding = found(tmp_path)["storage"]
    assert (finding.level, finding.says) == ("FAIL", f"{tmp_path}: No space left on device")
    assert "full-checkpoint-disk.md" in finding.hint


@pytest.mark.parametrize(
    ("free_bytes", "inodes", "free_inodes", "level", "said"),
    [
        (1 << 40, 1 << 20, 1 << 19, "OK", "1.0 TiB free"),
        (1 << 29, 1 << 20, 1 << 19, "WARN", "512.0 MiB free"),
        (1 << 40, 1 << 20, 500, "WARN", "500 of 1048576 inodes free"),
        (1 << 40, 0, 0, "OK", "1.0 TiB free"),
    ],
)
def test_room_is_bytes_and_inodes(
    free_bytes: int, inodes: int, free_inodes: int, level: str, said: str
) -> None:
    finding = storage.room_finding(
        "/x: writable", free_bytes=free_bytes, inodes=inodes, free_inodes=free_inodes
    )
    assert finding.level == level
    assert said in finding.says


@pytest.mark.parametrize(("seconds", "level"), [(0.0004, "OK"), (0.05, "OK"), (0.051, "WARN")])
def test_a_slow_sync_is_warned_of(seconds: float, level: str) -> None:
    finding = storage.sync_finding("/x", seconds)
    assert finding.level == level
    assert f"{1000 * seconds:.1f} ms" in finding.says


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/vda rw
30 22 0:40 / /mnt rw shared:1 - tmpfs none rw
31 30 0:41 / /mnt/check\\040points rw - nfs4 host:/export rw
32 30 0:42 / /mnt/lustre rw - lustre mgs:/fs rw
33 22 0:43 / /mnt/lustre rw - fuse.sshfs host: rw
a line that is none
"""


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
def test_a_file_system_is_the_one_of_the_last_mount_above(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert storage.file_system(Path(path), tmp_path / "mounts") == kind
    assert storage.file_system(Path(path), tmp_path / "none") == ""


def test_a_network_file_system_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "file_system", lambda _: "nfs4")
    assert "nfs4 over the network" in found(tmp_path)["storage kind"].says


# -- whose it is


def test_a_root_says_its_mode_its_clusters_and_its_id(tmp_path: Path) -> None:
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
    assert stub.objects == {}


@pytest.mark.parametrize(
    ("kind", "status", "said", "hint"),
    [
        ("put", 404, "NoSuchBucket", "create the bucket"),
        ("put", 403, "AccessDenied", "the credentials may not do this here"),
        ("create", 403, "AccessDenied", "the credentials may not do this here"),
    ],
)
def test_a_wrong_bucket_and_wrong_credentials_are_one_line(
    stub: StubS3, kind: str, status: int, said: str, hint: str
) -> None:
    stub.fail(kind, status=status, times=99)
    findings = found(URI)
    assert levels(findings) == {"storage": "FAIL"}
    assert said in findings["storage"].says
    assert hint in findings["storage"].hint

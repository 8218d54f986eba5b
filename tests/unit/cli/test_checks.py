"""The judgements of `strata doctor` that no healthy machine shows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from strata.cli import checks
from strata.cli.etcd_remedies import Connection
from strata.core.backup_record import Backup


@pytest.mark.parametrize(
    ("version", "level", "said"),
    [
        ("3.5.30", "OK", "3.5.30"),
        ("3.6.9", "OK", "3.6.9"),
        ("3.5.27", "FAIL", "known bugs"),
        ("3.6.8", "FAIL", "known bugs"),
        ("3.5.1", "FAIL", "etcd#13766"),
        ("3.3.27", "FAIL", "too old"),
        ("nonsense", "FAIL", "no etcd version"),
        ("", "FAIL", "did not answer"),
    ],
)
def test_an_etcd_is_judged_by_its_version(version: str, level: str, said: str) -> None:
    finding = checks._etcd_version("e:2379", version, "")
    assert finding.level == level
    assert said in finding.says
    assert finding.hint or level == "OK"


def test_fork_support_of_grpc_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "1")
    assert checks.fork().level == "FAIL"
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    assert checks.fork().level == "OK"


def test_a_trainer_without_the_server_extra_is_warned_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    finding = checks.server_extra()
    assert finding.level == "WARN"
    assert "uvicorn missing" in finding.says


def test_storage_that_is_a_file_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert checks.storage(tmp_path / "file").level == "FAIL"
    assert checks.storage(tmp_path).level in {"OK", "WARN"}


def test_names_that_nobody_looks_up_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SLOW_S", 0.05)
    monkeypatch.setattr(checks, "lookup_s", lambda _host: time.sleep(2.0))
    (finding,) = checks.names("127.0.0.1:50051", timeout_s=0.1)
    assert finding.level == "WARN"
    assert "did not answer within 0.1 s" in finding.says
    assert "RES_OPTIONS" in finding.hint


def test_names_that_take_long_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SLOW_S", 0.05)
    monkeypatch.setattr(checks, "lookup_s", lambda _host: time.sleep(0.2))
    (finding,) = checks.names("127.0.0.1:50051,127.0.0.2:50051", timeout_s=5.0)
    assert finding.level == "WARN"
    assert "looking up 127.0.0.1 took 0.2 s" in finding.says


def test_names_of_what_is_no_endpoint_are_left_to_who_connects_to_it() -> None:
    assert not list(checks.names("nonsense::", timeout_s=1.0))


# -- the newest backup of the control plane

NOW_MS = 1_795_835_702_123
HOUR_MS = 3600 * 1000
CONNECTION = Connection(endpoints=("h1:2379", "h2:2379"), config=Path("strata.toml"), insecure=True)


def backup_of(hours: float) -> Backup:
    made = NOW_MS - round(hours * HOUR_MS)
    return Backup(revision=4711, unix_ms=made, where="s3://backups/strata", size_bytes=20_512)


def test_no_backup_is_warned_of_with_the_line_to_copy() -> None:
    finding = checks.backup_finding(None, CONNECTION, cluster="default", now_unix_ms=NOW_MS)
    assert (finding.level, finding.says) == ("WARN", "no backup of the control plane")
    assert finding.commands == (
        "strata controlplane backup --to PLACE --etcd h1:2379,h2:2379 --config strata.toml --insecure",
    )


def test_the_line_names_a_cluster_that_is_not_the_default() -> None:
    here = Connection(endpoints=("127.0.0.1:2379",))
    finding = checks.backup_finding(None, here, cluster="prod", now_unix_ms=NOW_MS)
    assert finding.commands == ("strata controlplane backup --to PLACE --etcd 127.0.0.1:2379 --cluster prod",)


@pytest.mark.parametrize(
    ("hours", "level", "said"),
    [
        (-1.0, "OK", "0 ms old, revision 4711, 20.0 KiB, in s3://backups/strata"),
        (0.5, "OK", "30 min old"),
        (24.0, "OK", "24.0 h old"),
        (24.1, "WARN", "the newest one of the control plane is 24.1 h old, revision 4711"),
        (99.0, "WARN", "4 d old"),
    ],
)
def test_a_backup_is_judged_by_its_age(hours: float, level: str, said: str) -> None:
    finding = checks.backup_finding(backup_of(hours), CONNECTION, cluster="default", now_unix_ms=NOW_MS)
    assert finding.level == level
    assert said in finding.says
    if level == "WARN":
        (command,) = finding.commands
        assert command.startswith("strata controlplane backup --to s3://backups/strata --etcd h1:2379,")

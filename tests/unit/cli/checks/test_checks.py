"""The findings of `strata doctor` about this machine and about etcd that a healthy system never has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from strata.cli.checks import etcd, machine
from strata.cli.etcd.remedies import Connection
from strata.config import CoordinatorConfig, Credentials, EtcdConfig
from strata.core.restore.records import Backup, Restoring


@pytest.mark.parametrize(
    ("version", "level", "printed"),
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
def test_an_etcd_is_judged_by_its_version(version: str, level: str, printed: str) -> None:
    finding = etcd.etcd_version("e:2379", version, "")
    assert finding.level == level
    assert printed in finding.says
    assert finding.hint or level == "OK"


def test_fork_support_of_grpc_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "1")
    assert machine.fork().level == "FAIL"
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    assert machine.fork().level == "OK"


def test_a_trainer_without_the_server_extra_is_warned_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    finding = machine.server_extra()
    assert finding.level == "WARN"
    assert "uvicorn missing" in finding.says


def test_a_name_lookup_without_an_answer_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SLOW_S", 0.05)
    monkeypatch.setattr(machine, "lookup_s", lambda _host: time.sleep(2.0))
    (finding,) = machine.names("127.0.0.1:50051", timeout_s=0.1)
    assert finding.level == "WARN"
    assert "did not answer within 0.1 s" in finding.says
    assert "RES_OPTIONS" in finding.hint


def test_slow_name_lookups_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SLOW_S", 0.05)
    monkeypatch.setattr(machine, "lookup_s", lambda _host: time.sleep(0.2))
    (finding,) = machine.names("127.0.0.1:50051,127.0.0.2:50051", timeout_s=5.0)
    assert finding.level == "WARN"
    assert "looking up 127.0.0.1 took 0.2 s" in finding.says


def test_the_name_check_skips_an_invalid_endpoint() -> None:
    assert not list(machine.names("nonsense::", timeout_s=1.0))


# -- the newest backup of the control plane

NOW_MS = 1_795_835_702_123
HOUR_MS = 3600 * 1000
CONNECTION = Connection.of(
    CoordinatorConfig(
        etcd=EtcdConfig(endpoints=("h1:2379", "h2:2379")), credentials=Credentials(insecure=True)
    ),
    file=None,
)


def backup_of(hours: float) -> Backup:
    made = NOW_MS - round(hours * HOUR_MS)
    return Backup(revision=4711, unix_ms=made, where="s3://backups/strata", size_bytes=20_512)


def test_no_backup_is_warned_of_with_the_line_to_copy() -> None:
    finding = etcd.backup_finding(None, CONNECTION, now_unix_ms=NOW_MS)
    assert (finding.level, finding.says) == ("WARN", "no backup of the control plane")
    assert finding.commands == ("strata controlplane backup --to PLACE --etcd h1:2379,h2:2379 --insecure",)


def test_the_backup_command_names_a_cluster_other_than_the_default() -> None:
    connection = Connection.of(CoordinatorConfig(cluster="prod"), file=Path("strata.toml"))
    finding = etcd.backup_finding(None, connection, now_unix_ms=NOW_MS)
    assert finding.commands == (
        "strata controlplane backup --to PLACE --etcd 127.0.0.1:2379 --config strata.toml --cluster prod",
    )


@pytest.mark.parametrize(
    ("hours", "level", "printed"),
    [
        (-1.0, "OK", "0 ms old, revision 4711, 20.0 KiB, in s3://backups/strata"),
        (0.5, "OK", "30 min old"),
        (24.0, "OK", "24.0 h old"),
        (24.1, "WARN", "the newest one of the control plane is 24.1 h old, revision 4711"),
        (99.0, "WARN", "4 d old"),
    ],
)
def test_a_backup_is_judged_by_its_age(hours: float, level: str, printed: str) -> None:
    finding = etcd.backup_finding(backup_of(hours), CONNECTION, now_unix_ms=NOW_MS)
    assert finding.level == level
    assert printed in finding.says
    if level == "WARN":
        (command,) = finding.commands
        assert command.startswith("strata controlplane backup --to s3://backups/strata --etcd h1:2379,")


# -- an unfinished restore of the control plane

NEWEST = backup_of(1.0)
COMMAND = "strata controlplane"
TAIL = "--etcd h1:2379,h2:2379 --insecure"


@pytest.mark.parametrize(
    ("newest", "roots", "commands"),
    [
        (
            None,
            (),
            (
                f"{COMMAND} restore --from PLACE --storage ROOT {TAIL}",
                f"{COMMAND} rebuild --storage ROOT {TAIL}",
            ),
        ),
        (
            NEWEST,
            ("/mnt/a b", "s3://bucket/runs"),
            (
                f"{COMMAND} restore --from s3://backups/strata --storage '/mnt/a b' --storage s3://bucket/runs {TAIL}",
                f"{COMMAND} rebuild --storage '/mnt/a b' --storage s3://bucket/runs {TAIL}",
            ),
        ),
    ],
)
def test_a_restore_that_has_not_ended_fails_with_the_line_that_takes_it_over(
    newest: Backup | None, roots: tuple[str, ...], commands: tuple[str, ...]
) -> None:
    restoring = Restoring(who="ada@h1, process 7", since_unix_ms=NOW_MS - 300_000, source="")
    finding = etcd.restore_finding(restoring, newest, CONNECTION, roots, now_unix_ms=NOW_MS)
    assert finding.level == "FAIL"
    assert finding.says == ("the control plane is being restored: ada@h1, process 7 began, 5 min ago")
    assert "takes it over" in finding.hint
    assert finding.commands == commands

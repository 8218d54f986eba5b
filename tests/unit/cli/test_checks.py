"""The judgements of `strata doctor` that no healthy machine shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cli import checks


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

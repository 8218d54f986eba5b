"""systemd accepts the units below deploy/etcd/systemd, and rates their exposure as low."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Need

FOLDER = ROOT / "deploy" / "etcd" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
TIMERS = sorted(FOLDER.glob("*.timer"))

MAX_EXPOSURE = 1.5
"""On systemd's scale from 0 to 10; a service without any restriction has 9.6."""


@pytest.fixture
def analyze(need: Need) -> str:
    program = shutil.which("systemd-analyze")
    need("systemd", program is not None, "apt-get install systemd")
    assert program is not None
    return program


def installed(unit: Path, folder: Path, etcd_bin: Path) -> Path:
    """A copy of the unit with the program paths of this clone, because systemd checks that they exist."""
    text = unit.read_text()
    for path, here in (
        ("/usr/local/bin/etcd", etcd_bin / "etcd"),
        ("/opt/strata/bin/strata", Path(sys.executable).with_name("strata")),
    ):
        text = text.replace(f"ExecStart={path}", f"ExecStart={here}")
    copy = folder / unit.name
    copy.write_text(text)
    return copy


def test_etcd_coordinators_and_backups_each_have_a_unit() -> None:
    names = ["strata-backup.service", "strata-coordinator@.service", "strata-etcd@.service"]
    assert [unit.name for unit in UNITS] == names
    assert [timer.name for timer in TIMERS] == ["strata-backup.timer"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_analyze_finds_no_fault_in_a_unit(
    unit: Path, analyze: str, etcd_bin: Path, tmp_path: Path
) -> None:
    copy = installed(unit, tmp_path, etcd_bin)
    done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("timer", TIMERS, ids=lambda timer: timer.name)
def test_systemd_analyze_finds_no_fault_in_a_timer(
    timer: Path, analyze: str, etcd_bin: Path, tmp_path: Path
) -> None:
    installed(timer.with_suffix(".service"), tmp_path, etcd_bin)
    copy = installed(timer, tmp_path, etcd_bin)
    done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_systemd_analyze_reports_a_planted_fault(analyze: str, etcd_bin: Path, tmp_path: Path) -> None:
    copy = installed(UNITS[0], tmp_path, etcd_bin)
    copy.write_text(copy.read_text().replace("ProtectHome=", "ProtectHouse="))
    done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=False)
    assert "ProtectHouse" in done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_each_unit_stays_below_the_exposure_limit(unit: Path, analyze: str) -> None:
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) <= MAX_EXPOSURE, done.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_file_that_a_unit_reads_has_an_example(unit: Path) -> None:
    instance = unit.stem.removeprefix("strata-").replace("@", "-1")
    read = re.findall(r"^EnvironmentFile=/etc/strata/(.+)$", unit.read_text(), re.MULTILINE)
    assert read
    for path in read:
        assert (FOLDER / path.replace("%i", instance)).exists()

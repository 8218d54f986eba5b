"""Precedence of settings: flag > environment > file > default; an error names the source of the bad value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata.config import CoordinatorConfig, EtcdConfig, settings, split_address
from strata.errors import ConfigError


def load(
    flags: dict[str, Any] | None = None, env: dict[str, str] | None = None, path: Path | None = None
) -> CoordinatorConfig:
    return CoordinatorConfig.load(flags=flags or {}, env=env or {}, path=path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "strata.toml"
    path.write_text(
        'cluster = "lab"\ndetect_s = 8\ninsecure = true\n'
        '[coordinator]\nlisten = "127.0.0.1:6000"\n'
        '[etcd]\nendpoints = ["a:1", "b:2"]\n'
        "[run]\nslots = 4\n"
    )
    return path


def test_the_defaults_need_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load()
    assert config == CoordinatorConfig()
    assert config.etcd.endpoints == ("127.0.0.1:2379",)


def test_flags_override_the_environment_which_overrides_the_file(file: Path) -> None:
    assert load(path=file).listen == "127.0.0.1:6000"
    env = {"STRATA_LISTEN": "127.0.0.1:7000", "STRATA_ETCD_ENDPOINTS": "c:3, d:4,"}
    assert load(env=env, path=file).listen == "127.0.0.1:7000"
    config = load({"listen": "127.0.0.1:8000", "cluster": None}, env, file)
    assert config.listen == "127.0.0.1:8000"
    assert config.cluster == "lab"
    assert config.etcd.endpoints == ("c:3", "d:4")
    assert config.detect_s == 8.0


def test_a_nested_flag_is_named_by_its_path(file: Path) -> None:
    assert load({"etcd.endpoints": ("e:5",)}, path=file).etcd.endpoints == ("e:5",)


def test_an_empty_variable_was_not_set(file: Path) -> None:
    assert load(env={"STRATA_LISTEN": ""}, path=file).listen == "127.0.0.1:6000"


def test_the_file_of_the_working_directory_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert load().cluster == "lab"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("cluter = 'x'", "no setting cluter"),
        ("[coordinator]\nlissen = 'x'", "no setting coordinator.lissen"),
        ("[coordinator]\nlisten = 7", "coordinator.listen in"),
        ("coordinator = 7", "no setting coordinator"),
        ("[etcd]\nwait_s = 'soon'", "etcd.wait_s in"),
        ("[etcd]\nendpoints = [1]", "etcd.endpoints in"),
        ("[etcd]\nquota_bytes = 1.5", "whole number"),
        ("detect_s = true", "detect_s in"),
        ("detect_s = nan", "finite"),
        ("not toml", "not TOML"),
        ("[log]\nlevel = 'loud'", "log.level cannot be 'loud'"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, printed: str) -> None:
    path = tmp_path / "strata.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=printed):
        load(path=path)


@pytest.mark.parametrize(
    ("env", "printed"),
    [
        ({"STRATA_DETECT_S": "five"}, "STRATA_DETECT_S"),
        ({"STRATA_MAX_JOBS": "0"}, "at least 1"),
        ({"STRATA_MAX_CONNECTIONS": "15"}, "max_connections must be at least 16"),
        ({"STRATA_MAX_CONNECTIONS_PER_ADDRESS": "0"}, "per_address must be at least 16"),
        ({"STRATA_LISTEN": "somewhere"}, "not an address"),
        ({"STRATA_LISTEN": "h:70000"}, "not a port"),
        ({"STRATA_LISTEN": "0.0.0.0:50051"}, "cannot connect to 0.0.0.0"),
        ({"STRATA_ADVERTISE": "h:0"}, "not 0"),
        ({"STRATA_LISTEN": "10.0.0.1:50051"}, "plaintext"),
        ({"STRATA_LISTEN": "node-7:50051"}, "plaintext"),
        ({"STRATA_ETCD_ENDPOINTS": "127.0.0.1:2379,node-7:2379"}, "node-7:2379 is not on this machine"),
        ({"STRATA_ETCD_ENDPOINTS": "http://[fd00::1]:2379"}, "the connection would be plaintext"),
        ({"STRATA_ETCD_CERT_FILE": "x.pem"}, "need each other"),
        ({"STRATA_ETCD_USERNAME": "me"}, "need each other"),
        ({"STRATA_ETCD_ENDPOINTS": ","}, "no etcd endpoint"),
    ],
)
def test_a_mistake_in_the_environment_is_named(
    env: dict[str, str], printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=printed):
        load(env=env)


@pytest.mark.parametrize(
    "env",
    [
        {"STRATA_LISTEN": "0.0.0.0:50051", "STRATA_ADVERTISE": "h:50051", "STRATA_INSECURE": "yes"},
        {"STRATA_LISTEN": "[::1]:50051"},
        {"STRATA_LISTEN": "localhost:50051"},
    ],
)
def test_loopback_or_insecure_listen_addresses_are_accepted(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(env=env).listen == env["STRATA_LISTEN"]


@pytest.mark.parametrize(
    "env",
    [
        {"STRATA_ETCD_ENDPOINTS": "node-7:2379", "STRATA_INSECURE": "1"},
        {"STRATA_ETCD_ENDPOINTS": "node-7:2379", "STRATA_ETCD_CA_FILE": "etcd-ca.pem"},
        {"STRATA_ETCD_ENDPOINTS": "https://node-7:2379"},
        {"STRATA_ETCD_ENDPOINTS": "http://localhost:2379,[::1]:2379,127.0.0.2:1"},
    ],
)
def test_etcd_may_be_remote_with_tls_or_insecure_and_local_without(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ",".join(load(env=env).etcd.endpoints) == env["STRATA_ETCD_ENDPOINTS"]


def test_a_file_that_is_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load(path=tmp_path / "absent.toml")


def test_an_unknown_flag_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'lissen'"):
        load({"lissen": "x"})


def test_a_password_is_read_from_its_file(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("open sesame\n")
    config = EtcdConfig(username="me", password_file=secret)
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        config.password()
    secret.chmod(0o600)
    assert config.password() == "open sesame"
    assert "sesame" not in repr(config)
    secret.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        config.password()


def test_every_setting_has_a_place_a_variable_and_words() -> None:
    found = list(settings(CoordinatorConfig))
    assert len({s.toml for s in found}) == len({s.env for s in found}) == len(found)
    assert all(s.env.startswith("STRATA_") and s.doc for s in found)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host:1", ("host", 1)),
        ("[::1]:50051", ("::1", 50051)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address("x", address) == parts


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "::1:50051", "host:http"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        split_address("x", address)

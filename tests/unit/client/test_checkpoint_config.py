from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata.client.checkpoint_config import CheckpointManagerConfig
from strata.client.checkpoint_port import PORT_MEMBERS
from strata.client.checkpoints import CheckpointManager
from strata.errors import ConfigError
from tests.unit.checkpoint.ports import Cluster


def folder(path: Any) -> Path:
    return CheckpointManagerConfig(storage_path=path).folder()


def test_a_folder_is_given_as_a_path_or_as_its_uri() -> None:
    for text in (
        "/data/a b",
        "file:///data/a%20b",
        "file://localhost/data/a%20b",
        "file:/data/a%20b",
        "FILE:/data/a b",
    ):
        assert folder(text) == Path("/data/a b")
    assert folder(Path("/data/a b")) == Path("/data/a b")
    assert folder("x") == Path.cwd() / "x"
    assert folder("a:b") == Path.cwd() / "a:b"


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("file://host/x", "names the host 'host'"),
        ("file://", "a path alone"),
        ("file:x", "a path alone"),
        ("s3:/bucket", "local or shared paths only"),
        ("\udcff", "no Unicode text"),
        ("file:///x?y", "a path alone"),
        ("file:///x#y", "a path alone"),
        ("file://[x/y", "no URI"),
        ("/a\0b", "NUL"),
        ("file:///a%00b", "NUL"),
        ("~nobody-has-this-name/x", "home"),
        (5, "is a int"),
        (b"/x", "is a bytes"),
    ],
)
def test_a_path_that_would_lead_elsewhere_is_refused_with_a_way_out(path: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        folder(path)
    assert error.value.hint


@pytest.mark.parametrize(
    "setting",
    [
        {"save_wait_s": float("nan")},
        {"save_wait_s": -1},
        {"save_wait_s": "5"},
        {"save_wait_s": float("inf")},
        {"commit_timeout_s": 10**400},
        {"commit_timeout_s": True},
        {"keep_count": "3"},
        {"keep_count": 2.5},
        {"when_full": "wait"},
        {"io_threads": 0},
        {"io_threads": True},
        {"io_threads": 65},
    ],
)
def test_a_setting_that_is_no_such_number_is_named(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        CheckpointManagerConfig(**setting)


def test_what_is_no_client_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="client is a int") as error:
        CheckpointManager(tmp_path / "root", client=5)  # type: ignore[arg-type]  # on purpose
    assert "strata.connect()" in error.value.hint
    assert not (tmp_path / "root").exists()


def test_what_the_manager_asks_for_is_what_a_port_has() -> None:
    port = Cluster(a=1).port(0)
    assert [name for name in PORT_MEMBERS if not hasattr(port, name)] == []
    assert {"uid", "rank", "call", "observe_checkpoints"} <= set(PORT_MEMBERS)

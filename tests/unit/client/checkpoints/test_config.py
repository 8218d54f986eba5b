from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.storage.place import S3Place, parse_place
from strata.client.checkpoints.config import CheckpointManagerConfig
from strata.client.checkpoints.manager import CheckpointManager
from strata.errors import ConfigError


def folder(path: Any) -> Any:
    return CheckpointManagerConfig(storage_path=path).place()


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
        ("s3:/bucket", "names no bucket"),
        (Path("s3://bucket/x"), "names no bucket"),
        ("gs://bucket/x", "to local or shared paths and to S3"),
        ("s3:///x", "names no bucket"),
        ("s3://a", "no name of a bucket"),
        ("s3://a..b/x", "no name of a bucket"),
        ("s3://-bucket/x", "no name of a bucket"),
        ("s3://key:secret@bucket/x", "a user or a port"),
        ("s3://bucket:9000/x", "a user or a port"),
        ("s3://key:secret@bucket/x?y", "a user or a port"),
        ("s3://bucket/x?versionId=1", "a bucket and a prefix alone"),
        ("s3://bucket/x#y", "a bucket and a prefix alone"),
        ("s3://bucket/../x", "is . or .."),
        ("s3://bucket/a/%2e%2e/x", "is . or .."),
        ("s3://bucket/a%2F..%2Fx", "is . or .."),
        ("s3://bucket/a//x", "empty part"),
        ("s3://bucket/%", "encodes nothing"),
        ("s3://bucket/%ff", "no UTF-8"),
        ("s3://bucket/%252e", "spell differently"),
        ("s3://bucket/a%00b", "spell differently"),
        ("s3://bucket/ä", "spell differently"),
        ("s3://bucket/~x", "spell differently"),
        ("s3://bucket/a%20", "spell differently"),
        ("s3://bucket/" + "x" * 701, "at most 700"),
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
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "uri"),
    [
        ({"storage_path": "s3://my-bucket/checkpoints"}, "s3://my-bucket/checkpoints"),
        ({"storage_path": "S3://my-bucket"}, "s3://my-bucket"),
        ({"storage_path": "s3://my-bucket/a%20b/"}, "s3://my-bucket/a%20b"),
        ({"bucket": "my-checkpoints", "storage_type": "s3"}, "s3://my-checkpoints"),
        (
            {"storage_backend": "s3", "checkpoint_dir": "checkpoints/my-experiment"},
            "s3://checkpoints/my-experiment",
        ),
        ({"bucket": "my-checkpoints", "storage_path": "runs/gpt"}, "s3://my-checkpoints/runs/gpt"),
    ],
)
def test_a_bucket_is_given_as_a_uri_or_by_its_name(settings: dict[str, Any], uri: str) -> None:
    place = CheckpointManagerConfig(**settings, endpoint_url="http://[::1]:9000", region="eu-1").place()
    assert isinstance(place, S3Place)
    assert place.uri == uri
    assert (place.endpoint_url, place.region) == ("http://[::1]:9000", "eu-1")
    assert parse_place(uri, endpoint_url=place.endpoint_url, region="eu-1") == place


def test_keys_lie_below_the_decoded_prefix() -> None:
    assert S3Place(bucket="bucket", prefix="a b").key("x/y") == "a b/x/y"
    assert S3Place(bucket="bucket").key("x") == "x"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"storage_path": "x", "storage_type": "s3"}, "no bucket is named"),
        ({"storage_path": "/x/y", "storage_type": "s3"}, "no bucket is named"),
        ({"storage_path": "file:///x/y", "storage_type": "s3"}, "no bucket is named"),
        ({"storage_path": "s3://bucket/x", "storage_type": "local"}, "in an object store"),
        ({"storage_path": "s3://bucket/x", "bucket": "other"}, "names a place of its own"),
        ({"storage_path": "/data", "bucket": "bucket"}, "names a place of its own"),
        ({"storage_path": "../x", "bucket": "bucket"}, "is . or .."),
        ({"storage_path": "x", "storage_type": "nfs"}, "storage_type is 'nfs'"),
        ({"storage_path": "x", "bucket": 5}, "bucket is a int"),
        ({"storage_path": "x", "region": "eu-1"}, "is for S3"),
        ({"storage_path": "x", "endpoint_url": "http://x"}, "is for S3"),
        ({"storage_path": "s3://bucket", "region": "../x"}, "name of a region"),
        ({"storage_path": "s3://bucket", "endpoint_url": "ftp://x"}, "and a host"),
        ({"storage_path": "s3://bucket", "endpoint_url": "https://x/y"}, "more than a host"),
        ({"storage_path": "s3://bucket", "endpoint_url": "https://u:p@x"}, "a user or a password in it"),
        ({"storage_path": "s3://bucket", "endpoint_url": "https://x:99999"}, "no URL"),
        ({"storage_path": "/data", "replica_path": "/data"}, "storage path itself"),
        ({"storage_path": "/data", "keep_every_steps": 10}, "retention: "),
        ({"storage_path": "/data", "keep_count": 1, "keep_best": 2}, "retention: "),
        ({"storage_path": "/data", "keep_count": 1, "best_metric": "loss"}, "retention: "),
        ({"storage_path": "/data", "keep_count": 1, "best_mode": "lowest"}, "best_mode"),
        ({"storage_path": "/data", "replica_path": 5}, "replica_path is a int"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], match: str) -> None:
    def use() -> None:
        config = CheckpointManagerConfig(**settings)
        config.place()
        config.replica()

    with pytest.raises(ConfigError, match=match):
        use()


@pytest.mark.parametrize("name", ["storage_path", "replica_path", "checkpoint_dir"])
def test_a_value_that_is_no_path_is_refused_with_a_path_hint(name: str) -> None:
    settings: dict[str, Any] = {name: 5}
    with pytest.raises(ConfigError) as caught:
        CheckpointManagerConfig(**settings)
    assert "the path of a folder" in caught.value.hint


@pytest.mark.parametrize("name", ["storage_type", "bucket", "endpoint_url", "region"])
def test_a_value_that_is_no_text_is_refused_without_a_path_hint(name: str) -> None:
    settings: dict[str, Any] = {"storage_path": "s3://bucket", name: 5}
    with pytest.raises(ConfigError, match=f"{name} is a int, not text") as caught:
        CheckpointManagerConfig(**settings)
    assert "path" not in caught.value.hint


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
        {"keep_count": -1},
        {"keep_age_s": -1, "keep_count": 1},
        {"keep_every_steps": 0, "keep_count": 1},
        {"model_keys": "model"},
        {"optimizer_keys": [1]},
        {"no_such_setting": 1},
        {"keep_count": 2.5},
        {"when_full": "wait"},
        {"io_threads": 0},
        {"io_threads": True},
        {"io_threads": 65},
    ],
)
def test_an_invalid_setting_is_named(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        CheckpointManager("x", **setting)


def test_an_invalid_client_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="client is a int") as error:
        CheckpointManager(tmp_path / "root", client=5)  # type: ignore[arg-type]  # wrong on purpose
    assert "strata.connect()" in error.value.hint
    assert not (tmp_path / "root").exists()

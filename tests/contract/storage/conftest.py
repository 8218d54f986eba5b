"""The storages under contract: local files, memory, and three servers that speak S3.

moto implements S3's semantics (conditions, listing of uploads). rclone is a real server in another process. The stub
is ours and fails on request.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.place import S3Place
from strata.checkpoint.storage.s3_control import S3Options
from strata.checkpoint.storage.s3_storage import S3Storage
from strata.checkpoint.storage.sink import OnStep, Storage, unobserved
from tests.storage import rclone_server
from tests.storage.s3_stub import StubS3, serving
from tests.unit.checkpoint.memory_storage import MemoryStorage

KEY, SECRET = "strata-test", "not-a-secret-at-all"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the machine's own AWS configuration, and set dummy credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@dataclass(slots=True)
class Pauses:
    """Records the pauses that the storage requests; does not wait."""

    seconds: list[float]

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def s3_storage(
    url: str,
    *,
    bucket: str = "bucket",
    prefix: str = "checkpoints/run 1",
    attempts: int = 3,
    answer_s: float = 10.0,
    on_step: OnStep = unobserved,
    nonce: Callable[[], str] = lambda: f"n{next(_numbers)}",
) -> S3Storage:
    return S3Storage(
        S3Place(bucket=bucket, prefix=prefix, endpoint_url=url, region="us-east-1"),
        nonce=nonce,
        now=lambda: datetime.now(UTC),
        pause=Pauses([]),
        options=S3Options(attempts=attempts, connect_s=2.0, answer_s=answer_s),
        on_step=on_step,
    )


@pytest.fixture
def stub() -> Iterator[StubS3]:
    with serving(StubS3()) as server:
        yield server


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def rclone_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real server for the buckets in a folder."""
    with rclone_server.serving(tmp_path_factory.mktemp("rclone"), key=KEY, secret=SECRET) as url:
        yield url


def new_bucket(url: str) -> str:
    name = f"bucket-{next(_numbers)}"
    client = s3_storage(url)._control._client  # Strata itself creates no buckets
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture(params=["local", "memory", "stub", "moto", "rclone"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path / "not" / "yet", nonce=lambda: f"n{next(_numbers)}")
    if request.param == "memory":
        return MemoryStorage()
    if request.param == "stub":
        return s3_storage(request.getfixturevalue("stub").url)
    url = request.getfixturevalue(f"{request.param}_url")
    return s3_storage(url, bucket=new_bucket(url))

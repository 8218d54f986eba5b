"""The metadata document of a backup: it is read as written, and any other content is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from strata.controlplane.metadata import BackupCorrupt, BackupMetadata, decode

WHOLE = BackupMetadata(
    cluster="default",
    cluster_uid="0b6f4a9e2d714c53b8e1f7a2c9d05e36",
    etcd_cluster_id="f025f8397fb9821",
    revision=4711,
    member="etcd-2",
    etcd_version="3.5.30",
    strata_version="0.1.0",
    size_bytes=20512,
    sha256="a" * 64,
    time=datetime(2026, 11, 28, 3, 15, 2, 123456, tzinfo=UTC),
)


def test_metadata_survives_a_round_trip() -> None:
    assert decode(WHOLE.encode(), what="x.json") == WHOLE


def test_metadata_may_have_fields_of_a_newer_release() -> None:
    body = {**json.loads(WHOLE.encode()), "signed_by": "somebody"}
    assert decode(json.dumps(body).encode(), what="x.json") == WHOLE


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({"format": "strata-root"}, "it is a 'strata-root'"),
        ({"version": 2}, "has format 2, and this release reads up to 1"),
        ({"sha256": "a" * 63}, "sha256"),
        ({"sha256": None}, "no text"),
        ({"size_bytes": -1}, "no whole number"),
        ({"revision": "4711"}, "no whole number"),
        ({"time": "yesterday"}, "yesterday"),
        ({"time": "2026-11-28T03:15:02"}, "no zone"),
    ],
)
def test_invalid_metadata_is_refused(change: dict[str, Any], printed: str) -> None:
    body = {**json.loads(WHOLE.encode()), **change}
    with pytest.raises(BackupCorrupt, match=printed):
        decode(json.dumps(body).encode(), what="x.json")


@pytest.mark.parametrize("name", list(json.loads(WHOLE.encode())))
def test_every_metadata_field_is_required(name: str) -> None:
    body = json.loads(WHOLE.encode())
    del body[name]
    with pytest.raises(BackupCorrupt, match=f"x.json.*{name}"):
        decode(json.dumps(body).encode(), what="x.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 1000, b'{"a":"' + b"x" * 70_000 + b'"}'])
def test_bytes_that_are_not_metadata_are_refused(data: bytes) -> None:
    with pytest.raises(BackupCorrupt, match="no metadata"):
        decode(data, what="x.json")

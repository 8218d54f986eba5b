"""Other languages can generate code from `proto/strata/v1` unchanged, including Go, which needs a package name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto" / "strata" / "v1").glob("*.proto"))
GO_PACKAGE = "strata/v1;stratav1"


@pytest.mark.parametrize("name", [proto.stem for proto in PROTOS])
def test_every_proto_file_has_the_same_go_package(name: str) -> None:
    descriptor = import_module(f"strata.v1.{name}_pb2").DESCRIPTOR
    assert descriptor.package == "strata.v1"
    assert descriptor.GetOptions().go_package == GO_PACKAGE


def test_the_page_names_the_go_package() -> None:
    assert len(PROTOS) > 10
    assert f"`{GO_PACKAGE}`" in (ROOT / "docs" / "api.md").read_text()

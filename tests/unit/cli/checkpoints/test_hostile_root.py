"""The newest checkpoint has a hostile document: each command reports it; a restore uses the previous checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.format.digest import named_digest
from strata.client.checkpoints.manager import CheckpointManager
from tests.unit.cli.in_process import outcome_of
from tests.unit.documents import hostile


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A root with the steps 10 and 20."""
    folder = tmp_path / "root"
    with CheckpointManager(folder) as manager:
        for step in (10, 20):
            manager.save_state({"model": {"w": np.full((3, 4), float(step))}, "step": step}, step).wait()
    return folder


def run(*words: object) -> tuple[int, str]:
    return outcome_of("checkpoints", *words)


Change = Callable[[Path], None]


def in_marker(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        body = json.loads((folder / "COMMIT").read_bytes()) | changes
        (folder / "COMMIT").write_bytes(hostile.to_json(hostile.signed(body)))

    return change


def in_manifest(change_body: Callable[[dict[str, Any]], object]) -> Change:
    def change(folder: Path) -> None:
        body = json.loads((folder / "manifest.json").read_bytes())
        change_body(body)
        (folder / "manifest.json").write_bytes(json.dumps(body).encode())
        hostile.remark(folder)

    return change


def in_part(change_body: Callable[[dict[str, Any]], object]) -> Change:
    def change(folder: Path) -> None:
        body = json.loads((folder / "rank-00000.json").read_bytes())
        change_body(body)
        (folder / "rank-00000.json").write_bytes(json.dumps(body).encode())
        hostile.reseal(folder)

    return change


def text_of_manifest(text: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / "manifest.json").write_bytes(text)
        in_marker(manifest_digest=named_digest(text))(folder)

    return change


def shape(name: str, kind: str) -> Change:
    return lambda folder: hostile.put_shape(folder / name, kind)


HUGE = [2**40] * 60_000
"""Dimensions of a tensor whose product has two million bits."""
ATTACKS: dict[str, tuple[Change, str]] = {
    "a deep manifest": (
        text_of_manifest(b"[" * 100_000),
        "manifest.json cannot be read: it is nested more than",
    ),
    "a manifest of too many values": (
        text_of_manifest(b"[" + b"0," * 2_000_000 + b"0]"),
        "more than 2000000 values",
    ),
    "a header of 2^50 bytes": (
        in_part(lambda body: body["image"].update(header_bytes=2**50)),
        "rank-00000.json cannot be read: 1125899906842624 is no whole number",
    ),
    "a world of 10^12 ranks": (
        in_manifest(lambda body: body.update(world_size=10**12)),
        "manifest.json cannot be read: 1000000000000 is no whole number",
    ),
    "a world of 1000 ranks and one part": (
        in_manifest(lambda body: body.update(world_size=1000)),
        "it is of 1000 ranks, and names 1",
    ),
    "one manifest for 1000 ranks": (
        in_manifest(lambda body: body.update(world_size=1000, ranks=body["ranks"] * 1000)),
        "the manifest of rank 1 is not that of rank 0",
    ),
    "a manifest elsewhere": (
        in_manifest(lambda body: body["ranks"][0].update(manifest="../../../etc/passwd")),
        "'../../../etc/passwd' is no name of a file",
    ),
    "an image elsewhere": (
        in_part(lambda body: body["image"].update(file="/etc/passwd")),
        "'/etc/passwd' is no name of a file",
    ),
    "a pipe as marker": (shape("COMMIT", "fifo"), "COMMIT: it is no regular file"),
    "a pipe as manifest": (shape("manifest.json", "fifo"), "manifest.json: it is no regular file"),
    "a pipe as image": (shape("rank-00000.safetensors", "fifo"), "rank-00000.safetensors"),
    "a device as part": (shape("rank-00000.json", "zero"), "rank-00000.json: it is no regular file"),
    "a link to itself as marker": (shape("COMMIT", "loop"), "COMMIT: it is no regular file"),
    "a folder as marker": (shape("COMMIT", "folder"), "COMMIT: it is a folder"),
    "a sparse marker": (shape("COMMIT", "sparse"), "it has 8589934592 bytes, and at most 33554432 are read"),
    "a large marker": (shape("COMMIT", "huge"), "COMMIT cannot be read: it has 32505856 bytes"),
    "a time of no year": (
        in_manifest(lambda body: body.update(created_unix_ms=10**18)),
        "is no whole number from 0 to 253402300799999",
    ),
    "a type of none": (in_manifest(lambda body: body.update(type="evil")), "'evil' is not a valid"),
    "too many dimensions": (
        in_part(lambda body: body["tensors"]["model.w"].update(shape=HUGE)),
        "a tensor has 60000 dimensions",
    ),
    "one byte for many tensors": (
        in_part(
            lambda body: body["tensors"].update({f"w{n}": body["tensors"]["model.w"] for n in range(1000)})
        ),
        "bytes of files that have",
    ),
    "a tree of no kind": (
        in_part(lambda body: body.update(tree={"evil": 1})),
        "a value of kind 'evil' is none",
    ),
    "a tree of lists": (in_part(lambda body: body.update(tree={"l": [[[]]]})), "a list stands where"),
    "a step of infinity": (
        text_of_manifest(b'{"format":"strata-manifest","version":1e999}'),
        "a number is too large",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_document_costs_its_own_checkpoint_only(where: Path, attack: str) -> None:
    change, problem = ATTACKS[attack]
    (newest,) = where.glob("step-000000000020-*")
    change(newest)
    began = time.process_time()
    code, output = run("list", "--json", "-s", where)
    assert code == 0, output
    states = {c["step"]: c["state"] for c in json.loads(output)}
    assert states == {10: "committed", 20: "corrupt"}
    code, output = run("show", 20, "--json", "-s", where)
    assert code == 0, output
    code, output = run("verify", 20, "-s", where)
    assert code == 1, output
    assert problem in output, "the file and what is wrong"
    assert newest.name in output
    code, output = run("verify", "--all", "-s", where)
    assert code == 1
    assert "step 10, generation 1: good" in output, "and goes on"
    state: dict[str, Any] = {"model": {}, "step": None}
    with CheckpointManager(where) as manager:
        restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, state["step"]) == (10, 10)
    assert time.process_time() - began < 20


def test_a_reference_to_a_missing_tensor_fails_only_its_own_checkpoint(where: Path) -> None:
    """All digests fit: only a restore and `verify` look up the tensors that the state refers to."""
    (newest,) = where.glob("step-000000000020-*")
    in_part(lambda body: body.update(tree={"d": [["model", {"t": "nowhere"}]], "c": "dict"}))(newest)
    code, output = run("verify", 20, "-s", where)
    assert code == 1
    assert "it refers to 'nowhere', which it does not hold" in output
    state: dict[str, Any] = {"step": None}
    with CheckpointManager(where) as manager:
        restored = manager.restore(state)
    assert restored is not None
    assert restored.step == 10


@pytest.mark.parametrize("kind", ["fifo", "sparse", "zero", "random"])
def test_a_hostile_root_document_is_an_error_that_names_it(where: Path, kind: str) -> None:
    hostile.put_shape(where / "strata.json", kind)
    code, output = run("list", "-s", where)
    assert code in {1, 4}, output
    assert "strata.json" in output


@pytest.mark.parametrize("kind", ["fifo", "sparse", "huge", "zero", "random", "socket"])
def test_hostile_tags_pins_and_claims_block_neither_restores_nor_saves(where: Path, kind: str) -> None:
    for path in (
        where / "tags" / "evil",
        where / "pins" / "evil",
        where / "generations" / "²",
        where / "generations" / "000009",
    ):
        path.parent.mkdir(exist_ok=True)
        hostile.put_shape(path, kind)
    assert run("list", "-s", where)[0] == 0
    with CheckpointManager(where) as manager:
        state: dict[str, Any] = {"model": {}, "step": None}
        restored = manager.restore(state)
        assert restored is not None
        assert restored.step == 20
        manager.save_state({"model": {"w": np.zeros((3, 4))}, "step": 30}, 30).wait()
    assert run("verify", 30, "-s", where)[0] == 0

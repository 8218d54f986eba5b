"""A checkpoint that is unreadable, or too new for this release, fails the restore; no older step is used."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.format import manifest as documents
from strata.checkpoint.format.digest import digest
from strata.checkpoint.format.manifest import Manifest, RankManifest
from strata.checkpoint.format.marker import Marker
from strata.client.checkpoints.manager import CheckpointManager
from strata.errors import CheckpointCorrupt, CheckpointError, StorageError


def state(value: float) -> dict[str, Any]:
    return {"w": np.full(3 << 20, value, np.float32), "step": value}


def save(root: Path, *steps: int) -> None:
    with CheckpointManager(root) as manager:
        for step in steps:
            manager.save_state(state(step), step)


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_device_read_error_is_raised_and_no_older_step_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    save(tmp_path, 1, 2)
    (image,) = tmp_path.glob("step-000000000002-*/rank-00000.safetensors")
    genuine: Callable[..., Any] = getattr(os, call)
    failed: list[str] = []

    def failing(where: Any, *more: Any) -> Any:
        path = str(Path(f"/proc/self/fd/{where}").readlink()) if isinstance(where, int) else os.fspath(where)
        if path == str(image):
            failed.append(path)
            raise OSError(code, os.strerror(code))
        return genuine(where, *more)

    here = state(0)
    with CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            with pytest.raises(StorageError, match=os.strerror(code)):
                manager.restore(here)
        assert failed
        assert (here["step"], here["w"].max()) == (0, 0), "nothing was changed"
        restored = manager.restore(here)
        assert restored is not None
        assert (restored.step, here["step"], here["w"].min()) == (2, 2, 2)


@pytest.mark.parametrize("document", [Manifest, RankManifest, Marker])
def test_a_checkpoint_of_a_newer_release_is_neither_damaged_nor_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: type[Any]
) -> None:
    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(document, "to_bytes", _of_version_9(document))
        patch.setattr(documents, "VERSION", 9)  # so the newer release accepts its own documents
        save(tmp_path, 3)
    here = state(0)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match=r"has format 9.*newer one") as error,
    ):
        manager.restore(here)
    assert not isinstance(error.value, CheckpointCorrupt)
    assert (here["step"], here["w"].max()) == (0, 0)


def _of_version_9(document: type[Any]) -> Callable[[Any], bytes]:
    genuine: Callable[[Any], bytes] = document.to_bytes

    def to_bytes(self: Any) -> bytes:
        data = genuine(self)
        for gap in (b"", b" "):
            data = data.replace(b'"version":' + gap + b"1", b'"version":' + gap + b"9", 1)
        assert b"9" in data
        if document is not Marker:
            return data
        body = data.partition(b', "self"')[0] + b"}"
        return body[:-1] + b', "self": "%s"}' % digest(body).encode()

    return to_bytes

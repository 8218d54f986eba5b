"""Verifies a committed checkpoint on disk byte for byte, without Strata's own reader.

docs/checkpoints.md, "On disk", describes the layout and what each digest covers. The catalog's record holds the
digest of manifest.json, and manifest.json holds the digests of the ranks' manifests. A rank's manifest holds the
digest of every chunk of its image. A chunk has at most 8 MiB, and each tensor begins a new chunk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import xxhash

CHUNK_BYTES: Final = 8 << 20
ALGORITHM: Final = "xxh3-128"


def problem_of(folder: Path, manifest_digest: str, *, marked: bool) -> str:
    """Return the problem of a checkpoint's folder, in words; empty if everything matches the digests.

    `marked`: a client got the report that the checkpoint is committed, so the COMMIT marker must exist.
    """
    try:
        manifest = _document(folder / "manifest.json", manifest_digest)
        for part in manifest["ranks"]:
            rank = _document(folder / part["manifest"], part["digest"])
            if wrong := _image(folder / rank["image"]["file"], rank):
                return wrong
        if marked and not (folder / "COMMIT").is_file():
            return f"{folder / 'COMMIT'} is missing"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, OSError) as error:
        return f"{folder.name} cannot be read: {error}"
    return ""


def _document(path: Path, digest: str) -> dict[str, Any]:
    data = path.read_bytes()
    if f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}" != digest:
        raise ValueError(f"{path.name} differs from its digest")
    body = json.loads(data)
    if not isinstance(body, dict):
        raise TypeError(f"{path.name} is no object")
    return body


def _image(path: Path, rank: dict[str, Any]) -> str:
    size, header = rank["image"]["size_bytes"], rank["image"]["header_bytes"]
    with path.open("rb") as file:
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes, not {size}"
        if xxhash.xxh3_128_hexdigest(file.read(header)) != rank["image"]["header_digest"]:
            return f"the header of {path.name} differs from its digest"
        for name, tensor in rank["tensors"].items():
            start, end = tensor["range"]
            file.seek(start)
            for index, digest in enumerate(tensor["chunks"]):
                data = file.read(min(CHUNK_BYTES, end - start - index * CHUNK_BYTES))
                if xxhash.xxh3_128_hexdigest(data) != digest:
                    return f"chunk {index} of {name} in {path.name} differs from its digest"
    return ""

"""A checkpoint copied from one storage into another, byte for byte, the marker last.

The copy is read back and verified before the marker is written: until then it is no checkpoint.
What it needs of earlier attempts' images comes with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.checkpoint.chunk_map import object_name
from strata.checkpoint.digest import CHUNK_BYTES, named_digest
from strata.checkpoint.manifest import GLOBAL_NAME, Manifest, RankManifest
from strata.checkpoint.marker import write_marker
from strata.checkpoint.memory import allocate
from strata.checkpoint.sink import Storage, put
from strata.checkpoint.uses import NAME as USES
from strata.checkpoint.uses import write_uses
from strata.checkpoint.verifying import OnBytes, ignored, verify
from strata.errors import CheckpointCorrupt


def copy_checkpoint(
    source: Storage,
    target: Storage,
    folder: str,
    manifest: Manifest,
    manifests: Sequence[RankManifest],
    *,
    on_bytes: OnBytes,
) -> None:
    """Return once the checkpoint in `folder` is one of `target`, too; may be repeated after a crash.

    `manifest` and `manifests` are its verified ones. `CheckpointCorrupt` when a byte differs from
    what was saved: then `target` has no such checkpoint.
    """
    if manifest.uses:  # said first, so that nobody takes the images for what a save left over
        target.delete(f"{folder}/{USES}")
        write_uses(target, folder, manifest.uses)
    images = {f"{folder}/{part.image}" for part in manifest.parts}
    images.update(object_name(folder, image) for each in manifests for image in each.files)
    for name in sorted(images):
        _copy(source, target, name, on_bytes)
    for part in manifest.parts:
        _put_anew(target, f"{folder}/{part.manifest}", source.read(f"{folder}/{part.manifest}"))
    data = source.read(f"{folder}/{GLOBAL_NAME}")
    _put_anew(target, f"{folder}/{GLOBAL_NAME}", data)
    found = verify(target, folder, manifest_digest=named_digest(data), on_bytes=ignored)
    if not found.good:
        raise CheckpointCorrupt(found.problems[0], hint="verify the checkpoint that was copied")
    write_marker(target, folder, manifest, named_digest(data))


def _copy(source: Storage, target: Storage, name: str, on_bytes: OnBytes) -> None:
    size_bytes = source.size(name)
    target.delete(name)  # what an interrupted copy left
    sink, taken = target.sink(name), source.source(name)
    buffer = allocate(min(CHUNK_BYTES, size_bytes), inherited=True)
    try:
        sink.begin(size_bytes)
        for offset in range(0, size_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, size_bytes - offset)]
            if taken.read_into(offset, chunk) != len(chunk):
                raise CheckpointCorrupt(f"{name} ends before its {size_bytes} bytes")
            sink.write_at(offset, chunk)
            on_bytes(len(chunk))
        sink.finish()
    finally:
        sink.abort()
        taken.close()


def _put_anew(target: Storage, name: str, data: bytes) -> None:
    target.delete(name)
    put(target, name, data)

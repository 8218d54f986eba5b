"""Exporting a checkpoint's tensors as one file of another program: safetensors, NumPy's or torch's.

Every chunk is verified while it is exported. The file appears under its name whole or not at all. A safetensors file
of a whole state also contains the state's tree, so that an import restores the same state. In a file of a part
(`only="model"`), tensors have their names within the part, as `model.load_state_dict(load_file(path))` needs them.
States of random generators are never exported.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

from strata.checkpoint.convert.file_import import STATE_KEY
from strata.checkpoint.format.chunk_map import chunk_places
from strata.checkpoint.format.digest import CHUNK_BYTES, chunks
from strata.checkpoint.format.image import header_of, lay_out
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.format.tree_check import with_json
from strata.checkpoint.restore.assembling import Assembler, requested_tensor
from strata.checkpoint.restore.global_tensors import GlobalTensor, global_tensors
from strata.checkpoint.restore.reader import differing
from strata.checkpoint.restore.verify import Images, OnBytes
from strata.checkpoint.save.sharding import Box
from strata.checkpoint.snapshot.state import Json, children, leaves, named_by, unflatten
from strata.checkpoint.snapshot.tensors import DTYPES, TensorSpec, build
from strata.checkpoint.storage.sink import Storage
from strata.errors import CheckpointError, ConfigError, Refused, StorageError

FORMATS: Final = {
    ".safetensors": "safetensors",
    ".npz": "numpy",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The exported part of a checkpoint: one rank's tree, or a part of it, and its tensors.

    `tensors` maps each tensor's name in the file to its name in the image. `parted` has the tensors that several ranks
    saved in parts, by their names in the images.
    """

    manifests: Sequence[RankManifest]
    rank: int
    tree: Json
    tensors: dict[str, str]
    whole: bool
    parted: Mapping[str, GlobalTensor]

    def spec(self, name: str) -> TensorSpec:
        parted = self.parted.get(self.tensors[name])
        if parted is not None:
            return parted.spec
        return self.manifests[self.rank].tensors[self.tensors[name]].spec

    @property
    def size_bytes(self) -> int:
        return sum(self.spec(name).size_bytes for name in self.tensors)


def choose(manifests: Sequence[RankManifest], *, rank: int | None, only: str | None) -> Part:
    """Return the part to export: that of `rank` or, if `rank` is None, the part that is equal on all ranks.

    With `only`, the part has only the values below that key. `Refused`, naming the path, if the ranks differ and
    `rank` is None, or if there is no such rank or key.
    """
    if rank is not None and not 0 <= rank < len(manifests):
        raise Refused(f"the checkpoint has no rank {rank}, only 0 to {len(manifests) - 1}")
    manifest = manifests[rank or 0]
    if rank is None and len(manifests) > 1:
        below = [path for path in differing(manifests) if only is None or _is_below(path, only)]
        if below:
            raise Refused(
                f"{below[0]} differs between the {len(manifests)} ranks",
                hint="--rank exports the state of one rank, --only a part that is equal on all",
            )
    tree = manifest.tree if only is None else _part_of(manifest.tree, only)
    tensors: dict[str, str] = {}
    for path, leaf in leaves(tree):
        if (image_name := named_by(leaf)) is None:
            continue
        name = image_name if only is None else path or only
        if tensors.setdefault(name, image_name) != image_name:
            raise CheckpointError(f"two tensors would both be called {name} in the file")
    return Part(
        manifests=manifests,
        rank=rank or 0,
        tree=tree,
        tensors=tensors,
        whole=only is None,
        parted=global_tensors(manifests),
    )


def format_of(path: Path, requested: str | None) -> str:
    """Return the requested format, or if None, the format of the path's suffix."""
    if requested is not None:
        if requested not in {*FORMATS.values(), "bytes"}:
            raise ConfigError(f"there is no format {requested!r}", hint="safetensors, numpy, torch, or bytes")
        return requested
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"the format of {path} is not given",
            hint=f"end it in {', '.join(FORMATS)}, or pass --format",
        )
    return FORMATS[path.suffix]


def export(
    storage: Storage,
    folder: str,
    part: Part,
    path: Path,
    *,
    file_format: str,
    replace: bool,
    on_bytes: OnBytes,
) -> int:
    """Write the file and return its size; `Refused` if it exists, unless `replace`.

    `CheckpointCorrupt`, naming file and tensor, if a byte differs from the saved one: then no file is created.
    """
    if not replace and path.exists():
        raise Refused(f"{path} exists already", hint="--force replaces it")
    if file_format == "bytes" and not (isinstance(part.tree, dict) and "b" in part.tree):
        raise CheckpointError("this part is no opaque bytes", hint="choose another format")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with Images(storage, folder) as images, temporary.open("xb") as file:
            _WRITERS[file_format](_Reading(storage, images, folder, part, on_bytes), file)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.seek(0, os.SEEK_END)
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return size_bytes


class _Reading:
    """The verified bytes of a part's tensors."""

    def __init__(self, storage: Storage, images: Images, folder: str, part: Part, on_bytes: OnBytes) -> None:
        self.part = part
        self._assembler = Assembler(storage, folder, part.manifests)
        self._images = images
        self._on_bytes = on_bytes
        self._places = chunk_places(folder, part.manifests, part.rank)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the tensor's bytes in pieces; each is valid until the next is requested."""
        image_name = self.part.tensors[name]
        parted = self.part.parted.get(image_name)
        if parted is not None:
            box = Box.whole(parted.shape)
            for chunk in chunks(
                self._assembler.read({name: requested_tensor(image_name, parted, box)})[name]
            ):
                self._on_bytes(len(chunk))
                yield chunk
            return
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self.part.spec(name).size_bytes)))
        for place in self._places[image_name]:
            chunk = self._images.read(place, buffer, what=f"tensor {name}")
            self._on_bytes(len(chunk))
            yield chunk

    def whole(self, name: str) -> memoryview:
        data, offset = memoryview(bytearray(self.part.spec(name).size_bytes)), 0
        for chunk in self.chunks(name):
            data[offset : offset + len(chunk)] = chunk
            offset += len(chunk)
        return data


def _write_safetensors(reading: _Reading, file: IO[bytes]) -> None:
    part = reading.part
    specs = {name: part.spec(name) for name in part.tensors}
    layout, header = lay_out(specs), b""
    if part.whole:
        kinds = {
            name: (spec.kind, spec.dtype)
            for name, spec in specs.items()
            if spec.kind != "torch" or DTYPES[spec.dtype].trailing
        }
        header = _with_state(layout.header, {"tree": part.tree, "kinds": kinds})
    file.write(header or layout.header)
    for name in layout.places:
        for chunk in reading.chunks(name):
            file.write(chunk)


def _with_state(header: bytes, state: Json) -> bytes:
    """Return the header with the tree of the state in its metadata."""
    body = json.loads(header[8:])
    body["__metadata__"][STATE_KEY] = json.dumps(state, separators=(",", ":"))
    return header_of(body)


def _write_bytes(reading: _Reading, file: IO[bytes]) -> None:
    for name in reading.part.tensors:
        for chunk in reading.chunks(name):
            file.write(chunk)


def _write_numpy(reading: _Reading, file: IO[bytes]) -> None:
    numpy = _imported("numpy")
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name in reading.part.tensors:
            spec = reading.part.spec(name)
            if spec.kind == "bytes":
                array = numpy.frombuffer(reading.whole(name), dtype=numpy.uint8)
            else:
                array = _array(name, spec, reading.whole(name))
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                numpy.lib.format.write_array(member, array, allow_pickle=False)


def _array(name: str, spec: TensorSpec, data: memoryview) -> Any:
    try:
        return build(name, dataclasses.replace(spec, kind="numpy"), data, copied=False)
    except CheckpointError as error:  # NumPy has no such dtype
        raise CheckpointError(error.message, hint="export it as .pt or .safetensors") from None


def _write_torch(reading: _Reading, file: IO[bytes]) -> None:
    torch, part = _imported("torch"), reading.part
    # bytes in which a planner of DCP encoded plain values
    made: dict[str, Any] = {
        image_name: bytes(reading.whole(name))
        for name, image_name in part.tensors.items()
        if image_name in part.parted and part.spec(name).kind == "bytes"
    }
    in_file = {image_name: name for name, image_name in part.tensors.items()}

    def leaf(image_name: str) -> Any:
        if image_name not in made:  # built once for all names that share this tensor's memory
            name = in_file[image_name]
            spec = part.spec(name)
            spec = spec if spec.kind == "bytes" else dataclasses.replace(spec, kind="torch")
            made[image_name] = build(name, spec, reading.whole(name), copied=False)
        return made[image_name]

    torch.save(unflatten(with_json(part.tree, made), leaf), file)


_WRITERS: Final = {
    "safetensors": _write_safetensors,
    "numpy": _write_numpy,
    "torch": _write_torch,
    "bytes": _write_bytes,
}


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this format needs {name}, which is not installed here",
            hint=f"pip install {name}, or choose another format",
        ) from error


def _is_below(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def _part_of(tree: Json, only: str) -> Json:
    """Return the part of a state at `only`, a key or a path; keys on the path may contain dots."""
    for name, part in children(tree) or ():
        if str(name) == only:
            return part
        if only.startswith(f"{name}."):
            try:
                return _part_of(part, only[len(str(name)) + 1 :])
            except Refused:
                continue
    held = ", ".join(str(name) for name, _ in children(tree) or ()) or "no keys"
    raise Refused(f"there is nothing under {only!r}; there is {held[:300]}")

"""A `Storage` in memory with injectable faults, which passes the same contract tests as the real one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from strata.checkpoint.format.digest import Bytes
from strata.checkpoint.storage.sink import NotAnObject, ObjectMissing, checked_name
from strata.documents.parsing import MAX_DOCUMENT_BYTES
from strata.errors import StorageError


class MemoryStorage:
    """Objects in a dictionary. `fault` is called with (verb, name) and may raise."""

    def __init__(self) -> None:
        self.heal()
        self.objects: dict[str, bytes] = {}
        self.held: set[str] = set()
        """Names held by any process; a process that ends releases its holds."""
        self._lock = threading.Lock()

    def heal(self) -> None:
        """Stop injecting faults."""
        self.fault: Callable[[str, str], None] = lambda verb, name: None

    def fail(
        self, error: BaseException, *verbs: str, name: str | tuple[str, ...] = "", times: int = 1_000_000
    ) -> None:
        """Raise `error` for the next `times` calls of these verbs (or any) on names that contain one of `name`."""
        left, parts = iter(range(times)), (name,) if isinstance(name, str) else name

        def fault(verb: str, of: str) -> None:
            if (
                (not verbs or verb in verbs)
                and any(part in of for part in parts)
                and next(left, None) is not None
            ):
                raise error

        self.fault = fault

    @property
    def uri(self) -> str:
        return "memory:///"

    def flip(self, name: str, at: int, bit: int = 0) -> None:
        """Flip one bit of an object."""
        changed = bytearray(self.objects[name])
        changed[at] ^= 1 << bit
        self.objects[name] = bytes(changed)

    def files(self, folder: str) -> dict[str, bytes]:
        """Return the objects below a folder."""
        return {name: data for name, data in self.objects.items() if name.startswith(f"{folder}/")}

    def sink(self, name: str) -> MemorySink:
        return MemorySink(self, checked_name(name))

    def create_once(self, name: str, data: bytes) -> bool:
        self.fault("create", checked_name(name))
        with self._lock:
            if name in self.objects:
                return False
            self.objects[name] = data
            return True

    def hold(self, name: str) -> None:
        if name not in self.objects:
            raise StorageError(f"no {name}")
        self.held.add(name)

    def release(self, name: str) -> None:
        self.held.discard(name)

    def is_held(self, name: str) -> bool:
        return name in self.held

    def read(self, name: str) -> bytes:
        self.fault("read", checked_name(name))
        found = self.found(name)
        if len(found) > MAX_DOCUMENT_BYTES:
            raise NotAnObject(f"cannot read {name}: it has {len(found)} bytes")
        return found

    def found(self, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError:
            raise ObjectMissing(f"no {name}") from None

    def source(self, name: str) -> MemorySource:
        return MemorySource(self, checked_name(name))

    def size(self, name: str) -> int:
        self.fault("read", checked_name(name))
        return len(self.found(name))

    def exists(self, name: str) -> bool:
        return checked_name(name) in self.objects or any(o.startswith(f"{name}/") for o in self.objects)

    def list(self, folder: str = "") -> list[str]:
        prefix = f"{checked_name(folder)}/" if folder else ""
        names = [o[len(prefix) :] for o in self.objects if o.startswith(prefix)]
        return sorted({name.partition("/")[0] for name in names})

    def delete(self, name: str) -> None:
        self.fault("delete", checked_name(name))
        self.objects.pop(name, None)

    def delete_folder(self, folder: str) -> None:
        if self.list(folder):
            raise StorageError(f"{folder} is not empty")


class MemorySink:
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._data = bytearray()

    def begin(self, size_bytes: int) -> None:
        self._storage.fault("begin", self._name)
        self._data = bytearray(size_bytes)

    def write_at(self, offset: int, chunk: Bytes) -> None:
        self._storage.fault("write", self._name)
        if offset < 0 or offset + len(chunk) > len(self._data):
            raise StorageError("outside of the object")
        self._data[offset : offset + len(chunk)] = chunk

    def finish(self) -> None:
        self._storage.fault("finish", self._name)
        if not self._storage.create_once(self._name, bytes(self._data)):
            raise StorageError(f"{self._name} exists already")

    def abort(self) -> None:
        self._data = bytearray()


class MemorySource:
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage = storage
        self._name = name

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._storage.fault("read", self._name)
        piece = self._storage.found(self._name)[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        pass

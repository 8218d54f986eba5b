"""Objects in a bucket of S3, or of a server that speaks S3.

obstore transfers the data, boto3 sends all other requests. S3 itself guarantees that an object exists whole or not at
all. An incomplete upload is aborted when its folder is deleted or, after a day, by the next sweep. S3 has no locks: a
hold is a separate object, which is renewed with each write. A hold that was not renewed for a day has expired.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import obstore
import obstore.store

from strata.checkpoint.snapshot.memory import copy
from strata.checkpoint.storage.place import S3Place
from strata.checkpoint.storage.s3_control import S3Control, S3Options
from strata.checkpoint.storage.s3_errors import S3Error, as_storage_error
from strata.checkpoint.storage.s3_upload import S3Sink
from strata.checkpoint.storage.sink import ObjectMissing, OnStep, checked_name, unobserved
from strata.errors import StorageError

if TYPE_CHECKING:
    from obstore.store import S3Credential

HOLD_S: Final = 24 * 3600.0
"""The lifetime of a hold that is not renewed: longer than any save."""
SWEEP_S: Final = 24 * 3600.0
"""The age from which the sweep aborts an incomplete upload: longer than any save."""
CREDENTIALS_S: Final = 300
_HOLDS: Final = ".holds"
_NOT_PARTIAL: Final = "non-partial response"
"""Obstore's error for a server (rclone's) that sends a range with the status of a whole object."""

log: Final = logging.getLogger("strata.checkpoint")


class S3Source:
    """One object being read. Its size is read once, when it is opened."""

    def __init__(self, control: S3Control, store: Any, key: str) -> None:
        self._control = control
        self._store = store
        self._key = key
        self._size_bytes = control.head(key).size_bytes
        self._plain = False

    def read_into(self, offset: int, buffer: memoryview) -> int:
        end = min(offset + len(buffer), self._size_bytes)
        if end <= offset:
            return 0
        piece = memoryview(self._get(offset, end))
        count = min(len(piece), len(buffer))
        copy(buffer[:count], piece[:count])
        return count

    def _get(self, start: int, end: int) -> Any:
        if not self._plain:
            try:
                with as_storage_error("read", f"s3://{self._control.place.bucket}/{self._key}"):
                    return obstore.get_range(self._store, self._key, start=start, end=end)
            except S3Error as error:
                if _NOT_PARTIAL not in error.message:
                    raise
                self._plain = True
        return self._control.get_range(self._key, start, end)

    def close(self) -> None:
        """Do nothing: each read is a request of its own."""


class S3Storage:
    """The objects below `place`. May be used from any thread.

    `nonce` returns a new random name at each call, `now` returns the time of day, and `pause(s)` waits s seconds.
    """

    def __init__(
        self,
        place: S3Place,
        *,
        nonce: Callable[[], str],
        now: Callable[[], datetime],
        pause: Callable[[float], None],
        options: S3Options | None = None,
        on_step: OnStep = unobserved,
    ) -> None:
        self.place = place
        self._nonce = nonce
        self._now = now
        self._on_step = on_step
        self._control = S3Control(place, options=options or S3Options(), pause=pause)
        self._holds: dict[str, datetime] = {}
        self._failed: dict[str, str] = {}
        """The marks of uploads that failed, by key."""
        self._swept = False
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self.place.uri

    @property
    def honours_conditions(self) -> bool | None:
        """Whether the server rejects the second writer of a name; None until `create_once` has found out."""
        return self._control.conditions

    # -- writing

    def sink(self, name: str) -> S3Sink:
        key = self._key(name)
        self._renew_holds()
        self._sweep_once()
        return S3Sink(
            self._control,
            lambda: self._writing,
            key,
            mark=self._nonce(),
            on_step=self._on_step,
            failed=self._failed,
        )

    def create_once(self, name: str, data: bytes) -> bool:
        key = self._key(name)
        self._on_step(f"create {name.rpartition('/')[2]}")
        return self._control.create(key, data, self._nonce())

    def delete(self, name: str) -> None:
        key = self._key(name)
        self._on_step(f"delete {name.rpartition('/')[2]}")
        self._control.delete(key)

    def delete_folder(self, folder: str) -> None:
        prefix = self._key(folder) + "/"
        self._on_step("delete folder")
        self._control.delete(
            prefix
        )  # the object that a web console, or a server over a file system, makes for a folder
        if self._control.any_below(prefix):
            raise StorageError(f"{self.uri}/{folder} is not empty", hint="another process writes there")
        self._abort_uploads(prefix, older_than_s=0.0)

    # -- reading

    def read(self, name: str) -> bytes:
        return self._control.get(self._key(name))

    def source(self, name: str) -> S3Source:
        return S3Source(self._control, self._reading, self._key(name))

    def size(self, name: str) -> int:
        return self._control.head(self._key(name)).size_bytes

    def exists(self, name: str) -> bool:
        key = self._key(name)
        return self._control.find(key) is not None or self._control.any_below(key + "/")

    def list(self, folder: str = "") -> list[str]:
        prefix = self._key(f"{checked_name(folder)}/x" if folder else "x")[:-1]
        return [name for name in self._control.names(prefix) if not name.startswith(".")]

    # -- holds

    def hold(self, name: str) -> None:
        if self._control.find(self._key(name)) is None:
            raise ObjectMissing(f"{self.uri}/{name} is missing and cannot be held")
        self._touch(name)

    def release(self, name: str) -> None:
        if self._holds.pop(name, None) is not None:
            self._control.delete(self._key(f"{_HOLDS}/{name}"))

    def is_held(self, name: str) -> bool:
        if name in self._holds:
            return True
        found = self._control.find(self._key(f"{_HOLDS}/{name}"))
        return found is not None and found.age_s < HOLD_S

    def _touch(self, name: str) -> None:
        self._control.put(self._key(f"{_HOLDS}/{name}"), b"", self._nonce())
        self._holds[name] = self._now()

    def _renew_holds(self) -> None:
        limit = self._now() - timedelta(seconds=HOLD_S / 24)
        for name, touched in list(self._holds.items()):
            if touched < limit:
                self._touch(name)

    # -- inside

    def _key(self, name: str) -> str:
        return self.place.key(checked_name(name))

    def _sweep_once(self) -> None:
        with self._lock:
            if self._swept:
                return
            self._swept = True
        self._abort_uploads(self._key("x")[:-1], older_than_s=SWEEP_S)

    def _abort_uploads(self, prefix: str, *, older_than_s: float) -> None:
        try:
            count = self._control.abort_uploads(prefix, older_than_s=older_than_s)
        except StorageError as error:
            # Not every server lists uploads, and not every role may list them; a lifecycle rule does the same.
            log.info("incomplete uploads below %s cannot be listed: %s", prefix, error.message)
        else:
            if count:
                log.info("%d incomplete uploads below %s are aborted", count, prefix)

    @cached_property
    def _reading(self) -> Any:
        """Obstore's client for reads, made at the first use."""
        return self._open_data()

    @cached_property
    def _writing(self) -> Any:
        """Obstore's client for uploads in parts, with checksums if the server accepts them."""
        takes = self._control.takes_crc64nvme(self._key(f".probe-{self._nonce()}"))
        return self._open_data(**({"checksum_algorithm": "CRC64NVME"} if takes else {}))

    def _open_data(self, **how: Any) -> Any:
        control, options = self._control, self._control.options
        where: dict[str, Any] = {"region": self.place.region or control.region}
        if control.is_aws:
            where["region"] = control.find_region()
            # Path style is deprecated, but virtual-hosted style breaks TLS if the bucket's name has a dot.
            where["virtual_hosted_style_request"] = "." not in self.place.bucket
        else:
            where["endpoint"] = control.endpoint_url
        return obstore.store.S3Store(
            self.place.bucket,
            # Strata has a digest for every chunk; TLS and the checksum below protect the transfer.
            unsigned_payload=True,
            credential_provider=self._credential,
            client_options={
                "allow_http": control.endpoint_url.startswith("http://"),
                "connect_timeout": timedelta(seconds=options.connect_s),
                "timeout": timedelta(seconds=5 * options.answer_s),
                "user_agent": "strata",
            },
            retry_config={
                "max_retries": options.attempts - 1,
                "retry_timeout": timedelta(seconds=10 * options.answer_s),
            },
            **where,
            **how,
        )

    def _credential(self) -> S3Credential:
        """Return credentials to obstore, which calls this when its own have expired."""
        key, secret, token = self._control.credentials()
        expires = self._now() + timedelta(seconds=CREDENTIALS_S) if token else None
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}

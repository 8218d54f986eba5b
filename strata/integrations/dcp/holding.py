"""A load by DCP that keeps what it reads: retention waits until it is done (PROTOCOLS 8.5).

DCP tells a reader when a load begins and never that it ended: a rank that fails ends it for all of them. So a
checkpoint is kept from the moment it is found until this rank has read its part, or the reader finds another one;
and never longer than its reader lives, or its process by a minute.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Final

from strata.checkpoint.catalog import CheckpointMetadata
from strata.client.checkpoint_catalog import CoordinatedCatalog
from strata.client.checkpoint_readers import ReaderKey
from strata.client.surroundings import random_id
from strata.errors import CheckpointNotFound, Refused, Unavailable
from strata.integrations.dcp.room import Room

ASK_S: Final = 10.0

log: Final = logging.getLogger("strata.checkpoint")


class Hold:
    """What one `StrataReader` keeps: one checkpoint at a time, and none without coordinators.

    A copy, as in another process, keeps nothing.
    """

    def __init__(self) -> None:
        self._catalog: CoordinatedCatalog | None = None
        self._id = ""
        self._key: ReaderKey | None = None
        self._end: weakref.finalize[..., Hold] | None = None

    def __reduce__(self) -> tuple[type[Hold], tuple[()]]:
        return Hold, ()

    def find(self, room: Room, step: int | None) -> CheckpointMetadata:
        """Return the checkpoint of `step`, or where a restore begins, kept from now on.

        `Refused` when it is to be deleted and there is no other.
        """
        self._catalog = room.catalog if isinstance(room.catalog, CoordinatedCatalog) else None
        found = room.find(step)
        try:
            self._take(found)
        except (Refused, CheckpointNotFound):  # it was given up since it was found
            other = room.find(step)
            if other.id == found.id:
                raise
            self._take(other)
            return other
        return found

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Keep what is found in the body also after it, unless it fails; what was kept before is let go."""
        self.release()
        try:
            yield
        except BaseException:
            self.release()
            raise

    @contextlib.contextmanager
    def reading(self, checkpoint: CheckpointMetadata) -> Iterator[None]:
        """Keep this checkpoint, whichever was found, while the body runs, and nothing after it."""
        try:
            if self._key is None or self._id != checkpoint.id:
                self._take(checkpoint)
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Keep nothing any more; harmless when repeated."""
        key, self._key = self._key, None
        if self._end is not None:
            self._end.detach()
            self._end = None
        if key is not None:
            key.close()

    def _take(self, checkpoint: CheckpointMetadata) -> None:
        """Keep this one, and no other. Where no coordinator answers it is asked for again and again."""
        catalog = self._catalog
        if catalog is None:
            return
        key = ReaderKey(
            partial(catalog.ask, wait_s=ASK_S),
            job=catalog.job,
            step=checkpoint.step,
            attempt=checkpoint.id,
            reader=random_id(),
            who=f"{socket.gethostname()}, rank {catalog.rank}",
        )
        try:
            key.register()
        except Unavailable as error:
            log.warning("step %d is read without a lease for now: %s", checkpoint.step, error.message)
        key.start()
        self.release()
        self._id, self._key = checkpoint.id, key
        self._end = weakref.finalize(self, key.stop)

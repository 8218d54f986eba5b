"""`ShardManager`: register datasets, get the assignment of their shards to workers, and listen for its changes."""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Self

from strata.client import event_loop
from strata.client.api.coordinator import POLL_S, CoordinatorClient
from strata.client.api.datasets import DatasetAssignment, DatasetRegistry
from strata.client.api.watch import watch
from strata.config import Credentials
from strata.core.datasets.assignment import shards_of
from strata.core.kv.records import Assignment, decode
from strata.core.members.registration import DEFAULT_JOB
from strata.errors import NotFound, StrataError, Unavailable
from strata.v1.watch_pb2 import KeyEvent

DEFAULT_URL: Final = "localhost:50051"
PREFIX: Final = "datasets/"
SUFFIX: Final = "/assignment"

log: Final = logging.getLogger("strata.client")

OnChange = Callable[[DatasetAssignment], object]


class ShardManager:
    """A blocking client for any thread; its calls raise the same errors as `DatasetRegistry`.

    The coordinators, not this client, assign the shards to the members of the job's world, and assign them again
    whenever the members change. A member's shards move only when it leaves, or when a new member takes a share.
    """

    def __init__(
        self,
        coordinator_url: str | Iterable[str] = DEFAULT_URL,
        *,
        job: str = DEFAULT_JOB,
        timeout_s: float = 10.0,
        credentials: Credentials | None = None,
    ) -> None:
        self._registry = DatasetRegistry(
            coordinator_url, job=job, timeout_s=timeout_s, credentials=credentials
        )
        self._client = CoordinatorClient.connect(
            coordinator_url, job=job, timeout_s=timeout_s, credentials=credentials
        )
        self._listeners: set[_Listener] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every listener, and close the connections."""
        for listener in tuple(self._listeners):
            self._forget(listener)
        self._registry.close()
        self._client.close()

    def register_dataset(
        self, name: str, *, shards: int, uri: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        """Create a dataset, or confirm an existing one; the arguments are those of `DatasetRegistry.register`."""
        self._registry.register(name, shards=shards, uri=uri, metadata=metadata)

    def assign(self, dataset: str | None = None) -> DatasetAssignment:
        """Return the owner of each shard, once they are assigned; `dataset` may be omitted if the job has only one.

        Wait for the assignment up to `timeout_s`, then raise `NotFound`.
        """
        return self._registry.assignment(dataset)

    def reassign(self, dataset: str | None = None) -> DatasetAssignment:
        """Return the owner of each shard among the members of the job's current world.

        For use after a member joined, left or died: wait until the world is formed and the shards are assigned to
        exactly its members. Raise `Unavailable` after `timeout_s`.
        """
        deadline = time.monotonic() + self._client.timeout_s
        while True:
            found = self.assign(dataset)
            try:
                members = sorted(member.worker_id for member in self._client.world().members)
            except NotFound:  # no world: no member to assign shards to
                members = []
            if members and sorted(found.workers) == members:
                return found
            if time.monotonic() >= deadline:
                now = f"the world has {', '.join(members[:8])}" if members else "no world is formed"
                raise Unavailable(
                    f"dataset {found.dataset!r} is divided among {', '.join(found.workers[:8])}, and {now}",
                    hint="the job waits for members, or is paused: see `strata status`",
                )
            time.sleep(POLL_S)

    def listen(self, on_change: OnChange, dataset: str | None = None) -> Callable[[], None]:
        """Call `on_change` with each current assignment, then with every later assignment, in order.

        Without `dataset`, follow all the job's datasets. `on_change` is called in a separate thread and may be
        slow; its errors are logged. No assignment is skipped, even if the listener reconnects to another replica.
        Return a function that stops the listener.
        """
        listener = _Listener(self._client, on_change, dataset)
        self._listeners.add(listener)
        return lambda: self._forget(listener)

    def _forget(self, listener: _Listener) -> None:
        self._listeners.discard(listener)
        listener.stop()


class _Listener:
    """Follows a job's assignments in the background loop, and delivers them in a separate thread."""

    def __init__(self, client: CoordinatorClient, on_change: OnChange, dataset: str | None) -> None:
        self._client = client
        self._on_change = on_change
        self._prefix = PREFIX if dataset is None else f"{PREFIX}{dataset}{SUFFIX}"
        self._news: queue.SimpleQueue[DatasetAssignment | None] = queue.SimpleQueue()
        self._revisions: dict[str, int] = {}
        """Each dataset's last delivered revision; `assign_epoch` restarts if a dataset is registered again."""
        self._following = event_loop.shared().submit(self._follow())
        self._thread = threading.Thread(target=self._deliver, name="strata-shards", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the calls of `on_change`. Idempotent, and allowed inside the callback."""
        self._following.cancel()
        self._news.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def _follow(self) -> None:
        changes = watch(
            self._client.endpoints,
            random.Random(),
            job=self._client.job,
            prefix=self._prefix,
            timeout_s=math.inf,
            credentials=self._client.credentials,
        )
        try:
            async for response in changes:
                for event in response.events:
                    self._take(event)
        except StrataError as error:
            log.error("shards of job %s are no longer watched: %s", self._client.job, error)  # noqa: TRY400  # it says all
        finally:
            await changes.aclose()

    def _take(self, event: KeyEvent) -> None:
        if event.deleted or not event.key.endswith(SUFFIX):
            return
        name = event.key.removeprefix(PREFIX).removesuffix(SUFFIX)
        if (
            self._revisions.get(name) == event.mod_revision
        ):  # a resync lists assignments that were delivered before
            return
        self._revisions[name] = event.mod_revision
        record = decode(Assignment, event.value)
        owned = shards_of(record)
        self._news.put(
            DatasetAssignment(
                dataset=name,
                assign_epoch=record.assign_epoch,
                generation=record.generation,
                shards=record.shards,
                ring=record.ring,
                workers=tuple(record.workers),
                owners={worker: tuple(owned[worker]) for worker in record.workers},
            )
        )

    def _deliver(self) -> None:
        while (news := self._news.get()) is not None:
            if self._following.cancelled():
                return
            try:
                self._on_change(news)
            except Exception:
                # an error of the caller's function; the next change is still delivered
                log.exception("a listener of dataset %s raised", news.dataset)

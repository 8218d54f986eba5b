"""What a rank does for the job's checkpoints beyond its own saves: keeps, clears, reads, and doubts them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.copies.tiers import tiers_of
from strata.checkpoint.format.chunk_map import objects_in
from strata.checkpoint.storage.sink import Storage
from strata.client.checkpoints.catalog import CoordinatedCatalog
from strata.client.checkpoints.config import CheckpointManagerConfig
from strata.client.checkpoints.maintenance import Maintenance
from strata.client.checkpoints.reader_lease import ReaderKey
from strata.client.checkpoints.tiers import Damage
from strata.client.rank.process_environment import random_id
from strata.core.kv.records import CheckpointState
from strata.errors import (
    CheckpointNotFound,
    InvalidArgument,
    PermissionDenied,
    Refused,
    StaleGeneration,
    Unauthenticated,
    Unavailable,
)
from strata.v1.checkpoints_pb2 import Checkpoint, ReportDamageRequest
from strata.v1.retention_pb2 import Retention, SetRetentionRequest
from strata.wire.checkpoints import keep_message
from strata.wire.enums import CHECKPOINT_STATES, from_wire

ASK_S: Final = 10.0
TIDY_ASK_S: Final = 2.0
"""How long a chore waits for a coordinator: the next commit's pass does the same work."""
MARKED_WITHIN_S: Final = 2.0
"""How long rank 0 waits after a commit for the leader to mark what goes; else the next commit's turn."""
LOOK_S: Final = 0.25
CLOSE_S: Final = 5.0

log: Final = logging.getLogger("strata.checkpoint")


class GarbageCollection:
    """One rank's part in it. One process of each host speaks for it when a copy is in doubt.

    Rank 0 hands over the rules of `config`; where they say nothing those that the job has stand.
    """

    def __init__(
        self,
        catalog: CoordinatedCatalog,
        storage: Storage,
        config: CheckpointManagerConfig,
    ) -> None:
        self._catalog = catalog
        self._keep = config.keep
        self._told = config.keep_count is None or catalog.rank != 0
        self._host = socket.gethostname()
        self._corrupt_wait_s = config.corrupt_wait_s
        self._tasks = Maintenance(
            self._ask_soon, job=catalog.job, host=self._host, storages=tiers_of(storage), first=self._tell
        )
        looks = os.environ.get("LOCAL_RANK", "0") == "0"
        self._stop = catalog.observe(self._observe) if looks else lambda: None
        if looks or not self._told:
            self._tasks.soon()  # a doubt may have come up before anybody observed here

    def close(self) -> None:
        """Doubt nothing any more; harmless when repeated."""
        self.let_go()
        self._tasks.close(CLOSE_S)

    def let_go(self) -> None:
        """Do so without waiting for what is under way."""
        stop, self._stop = self._stop, lambda: None
        stop()

    # -- after a commit

    def after_commit(self) -> None:
        """Remove what the policy gives up; for one rank of the job."""
        self._tasks.collect_garbage(marked_within_s=MARKED_WITHIN_S)

    def clear(self) -> None:
        """Remove the bytes of what was marked for deletion, as far as this host has them."""
        self._tasks.collect_garbage()

    def _tell(self) -> None:
        """Hand the rules over, once, from the beginning on; `Unavailable` when nobody takes them just now.

        That they are refused is no error here: of a generation that is over the next one hands over its own, and
        of one that the catalog does not know (yet) they are handed over with a later pass. That this caller may not
        set them is: `PermissionDenied` or `Unauthenticated`, for without them everything stays.
        """
        if not self._told:
            retention = Retention(keep=keep_message(self._keep), who=f"rank {self._catalog.rank}")
            request = SetRetentionRequest(
                job=self._catalog.job, retention=retention, author=self._catalog.author()
            )
            try:
                self._ask_soon(request)
            except (PermissionDenied, Unauthenticated):
                raise
            except Refused as error:
                log.info("these rules of what stays are not handed over: %s", error.message)
            else:
                self._told = True

    # -- reading

    @contextlib.contextmanager
    def reading(self, checkpoint: CheckpointMetadata, *, begins: bool) -> Iterator[None]:
        """Keep the bytes of a checkpoint while it is read.

        The restore point of this generation needs no more than that, as long as this rank `begins`:
        `latest` names it until all ranks, this one among them, have acked a save, and what `latest`
        names is never deleted. Once this rank has saved, that may have happened.
        """
        point = self._catalog.restore_point()
        if begins and point is not None and point.id == checkpoint.id:
            yield
            return
        with contextlib.closing(self.hold(checkpoint)):
            yield

    def hold(self, checkpoint: CheckpointMetadata) -> ReaderKey:
        """Keep the bytes of a checkpoint until the key is closed; `Refused` or `CheckpointNotFound` when they go already.

        Where no coordinator answers it is asked for again and again; the reading goes on meanwhile, without it.
        """
        return ReaderKey(
            self._ask,
            job=self._catalog.job,
            step=checkpoint.step,
            attempt=checkpoint.id,
            reader=random_id(),
            who=f"{self._host}, rank {self._catalog.rank}",
        )

    # -- damage

    def report(self, checkpoint: CheckpointMetadata, damaged: Sequence[Damage], *, begins: bool) -> list[str]:
        """Report the copies that were read twice and are not what was saved; return what others said of them.

        `begins`: none was good, and this rank has not trained yet. Then this generation cannot go on if it begins
        here: wait for what the others find. Once it is confirmed the leader ends the generation, and the next call
        of this rank is `StaleGeneration`, unless its supervisor ends the process first. Where another host found
        the bytes as they were saved, or nobody confirms it in time, it returns: the rank fails as itself.
        """
        point = self._catalog.restore_point()
        waits = begins and point is not None and point.id == checkpoint.id
        generation = self._catalog.generation if waits else 0
        refused = [self._report(checkpoint, each, generation=generation) for each in damaged]
        heard = [why for why in refused if why]
        waited = {each.tier for each, why in zip(damaged, refused, strict=True) if not why}
        deadline = time.monotonic() + (self._corrupt_wait_s if waits else 0.0)
        while waited and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            with contextlib.suppress(Unavailable):
                now = self._catalog.look_up(checkpoint)
                for said in now.doubts:
                    if said not in heard and not said.startswith(f"{self._host} on "):
                        heard.append(said)
                        log.warning("step %d: %s", checkpoint.step, said)
                if not waited & set(now.suspected) and not is_corrupt(now):
                    break
        return heard

    def _report(self, checkpoint: CheckpointMetadata, damage: Damage, *, generation: int) -> str:
        """Say what is wrong with one copy; return "" once that is taken down, else why it is not."""
        report = ReportDamageRequest(
            job=self._catalog.job,
            step=checkpoint.step,
            attempt=checkpoint.id,
            tier=damage.tier,
            host=self._host,
            reason=damage.complaint[:1000],
            object=next(iter(objects_in(damage.complaint)), ""),
            generation=generation,
        )
        try:
            found: Checkpoint = self._ask(report).checkpoint
        except StaleGeneration:
            raise
        except (Unavailable, CheckpointNotFound, Refused, InvalidArgument) as error:
            log.warning("that step %d is damaged here is not taken down: %s", checkpoint.step, error.message)
            return error.message
        if is_corrupt(found):
            log.error("step %d is corrupt: %s", checkpoint.step, found.reason)
        elif damage.tier in found.suspected:
            log.error("step %d on %s is damaged as read here; other hosts look", checkpoint.step, damage.tier)
        else:
            log.error("step %d is corrupt on %s, and has another copy", checkpoint.step, damage.tier)
        return ""

    # -- inside

    def _observe(self, checkpoint: Checkpoint) -> None:
        if checkpoint.suspected:
            self._tasks.soon()

    def _ask_soon(self, request: Message) -> Any:
        return self._catalog.ask(request, wait_s=TIDY_ASK_S)

    def _ask(self, request: Message) -> Any:
        return self._catalog.ask(request, wait_s=ASK_S)


def is_corrupt(message: Checkpoint) -> bool:
    """Tell whether no copy of a checkpoint is left."""
    return from_wire(CHECKPOINT_STATES, message.state) is CheckpointState.CORRUPT

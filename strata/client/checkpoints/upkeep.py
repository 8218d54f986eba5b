"""Upkeep: the work of ranks on a job's checkpoints besides saves, that is retention, removal, reader leases and
corruption reports. `maintenance` removes the files that the leader selects (`core.checkpoints.retention_plan`).
"""

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
from strata.client.checkpoints.reader_lease import ReaderLease
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
MAINTENANCE_CALL_S: Final = 2.0
"""Seconds a maintenance request waits for a coordinator; if none answers, the pass after the next commit does the
work.
"""
MARKED_WITHIN_S: Final = 2.0
"""Seconds rank 0 waits after a commit for the leader to mark checkpoints for deletion; if the leader marks them
later, they are removed after the next commit.
"""
POLL_S: Final = 0.25
CLOSE_S: Final = 5.0

log: Final = logging.getLogger("strata.checkpoint")


class Upkeep:
    """One rank's part in maintenance. One process of each host verifies copies that other hosts reported damaged.

    Rank 0 sends the retention rules of `config`; without rules in `config`, the job keeps its current rules.
    """

    def __init__(
        self,
        catalog: CoordinatedCatalog,
        storage: Storage,
        config: CheckpointManagerConfig,
    ) -> None:
        self._catalog = catalog
        self._keep = config.keep
        self._rules_sent = config.keep_count is None or catalog.rank != 0
        self._host = socket.gethostname()
        self._corrupt_wait_s = config.corrupt_wait_s
        self._tasks = Maintenance(
            self._ask_soon,
            job=catalog.job,
            host=self._host,
            storages=tiers_of(storage),
            first=self._send_rules,
        )
        looks = os.environ.get("LOCAL_RANK", "0") == "0"
        self._stop = catalog.observe(self._observe) if looks else lambda: None
        if looks or not self._rules_sent:
            self._tasks.soon()  # a copy may have been reported damaged before this rank observed

    def close(self) -> None:
        """Stop the upkeep, after waiting for maintenance under way. Idempotent."""
        self.release()
        self._tasks.close(CLOSE_S)

    def release(self) -> None:
        """Stop observing, without waiting for maintenance under way."""
        stop, self._stop = self._stop, lambda: None
        stop()

    # -- after a commit

    def after_commit(self) -> None:
        """Remove the checkpoints that no retention rule keeps; only one rank of the job should call this."""
        self._tasks.collect_garbage(marked_within_s=MARKED_WITHIN_S)

    def clear(self) -> None:
        """Remove the bytes marked for deletion that are in this host's storages."""
        self._tasks.collect_garbage()

    def _send_rules(self) -> None:
        """Send the retention rules, once per process; `Unavailable` if no coordinator accepts them now.

        `Refused` is logged, not raised: if this generation is over, the next generation sends its own rules; if the
        catalog does not know this generation yet, a later pass sends the rules. But `PermissionDenied` and
        `Unauthenticated` are raised, because without the rules every checkpoint stays.
        """
        if not self._rules_sent:
            retention = Retention(keep=keep_message(self._keep), who=f"rank {self._catalog.rank}")
            request = SetRetentionRequest(
                job=self._catalog.job, retention=retention, author=self._catalog.author()
            )
            try:
                self._ask_soon(request)
            except (PermissionDenied, Unauthenticated):
                raise
            except Refused as error:
                log.info("the retention rules are not handed over: %s", error.message)
            else:
                self._rules_sent = True

    # -- reading

    @contextlib.contextmanager
    def reading(self, checkpoint: CheckpointMetadata, *, begins: bool) -> Iterator[None]:
        """Protect the bytes of a checkpoint from deletion while they are read.

        While this rank `begins` (has not saved yet), the restore point of this generation needs no lease: `latest`
        names the restore point until all ranks, including this one, have acked a save. The checkpoint that `latest`
        names is never deleted. After this rank's first save, `latest` may name a newer checkpoint.
        """
        point = self._catalog.restore_point()
        if begins and point is not None and point.id == checkpoint.id:
            yield
            return
        with contextlib.closing(self.hold(checkpoint)):
            yield

    def hold(self, checkpoint: CheckpointMetadata) -> ReaderLease:
        """Protect the bytes of a checkpoint until the lease is closed; `Refused` or `CheckpointNotFound` if the bytes
        are being deleted.

        While no coordinator answers, the request is repeated, and the read goes on without the lease.
        """
        return ReaderLease(
            self._ask,
            job=self._catalog.job,
            step=checkpoint.step,
            attempt=checkpoint.id,
            reader=random_id(),
            who=f"{self._host}, rank {self._catalog.rank}",
        )

    # -- damage

    def report(self, checkpoint: CheckpointMetadata, damaged: Sequence[Damage], *, begins: bool) -> list[str]:
        """Report copies that differed from the saved bytes in two reads; return the findings of other hosts.

        `begins`: no copy was good, and this rank has not trained yet. If the checkpoint is this generation's restore
        point, the generation cannot go on, so wait for the findings of the other hosts. Once they confirm the damage,
        the leader ends the generation; the next call of this rank raises `StaleGeneration`, unless its agent
        stops the process first. If another host found the bytes intact, or no host confirms the damage in time,
        return: then only this rank fails.
        """
        point = self._catalog.restore_point()
        waits = begins and point is not None and point.id == checkpoint.id
        generation = self._catalog.generation if waits else 0
        refused = [self._report(checkpoint, each, generation=generation) for each in damaged]
        answers = [why for why in refused if why]
        waited = {each.tier for each, why in zip(damaged, refused, strict=True) if not why}
        deadline = time.monotonic() + (self._corrupt_wait_s if waits else 0.0)
        while waited and time.monotonic() < deadline:
            time.sleep(POLL_S)
            with contextlib.suppress(Unavailable):
                now = self._catalog.look_up(checkpoint)
                for finding in now.corruption_reports:
                    if finding not in answers and not finding.startswith(f"{self._host} on "):
                        answers.append(finding)
                        log.warning("step %d: %s", checkpoint.step, finding)
                if not waited & set(now.suspected) and not is_corrupt(now):
                    break
        return answers

    def _report(self, checkpoint: CheckpointMetadata, damage: Damage, *, generation: int) -> str:
        """Report one damaged copy; return "" once the report is recorded, else the reason why it was not recorded."""
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
            log.warning("cannot report that step %d is damaged here: %s", checkpoint.step, error.message)
            return error.message
        if is_corrupt(found):
            log.error("step %d is corrupt: %s", checkpoint.step, found.reason)
        elif damage.tier in found.suspected:
            log.error(
                "step %d on %s is damaged as read here; other hosts check it", checkpoint.step, damage.tier
            )
        else:
            log.error("step %d is corrupt on %s, and has another copy", checkpoint.step, damage.tier)
        return ""

    # -- inside

    def _observe(self, checkpoint: Checkpoint) -> None:
        if checkpoint.suspected:
            self._tasks.soon()

    def _ask_soon(self, request: Message) -> Any:
        return self._catalog.ask(request, wait_s=MAINTENANCE_CALL_S)

    def _ask(self, request: Message) -> Any:
        return self._catalog.ask(request, wait_s=ASK_S)


def is_corrupt(message: Checkpoint) -> bool:
    """Return whether no good copy of a checkpoint is left."""
    return from_wire(CHECKPOINT_STATES, message.state) is CheckpointState.CORRUPT

"""The exchange in which the ranks of one save compare their tensors: `RankExchange`.

A background barrier carries the messages. The barrier has one name per generation, so a round is not tied to one
save. Every message therefore begins with its attempt and stage. Ranks that met with different attempts or stages
(for example because one of them cancelled its save) read the record, and meet again.

A round breaks after a few seconds unless all ranks have arrived. So a waiting rank soon notices that the attempt was
aborted or cancelled.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from threading import Event
from typing import Final

import xxhash

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.save.sharing import Exchange
from strata.client.checkpoints.catalog import CoordinatedCatalog
from strata.client.checkpoints.port import SessionPort
from strata.core.barriers.arrivals import payload_limit
from strata.core.checkpoints.lifecycle import COMPARE_BARRIER
from strata.core.words import ranks_text
from strata.errors import BarrierBroken, BarrierTimeout, CheckpointAborted, CheckpointError, Unavailable

ROUND_S: Final = 2.0
"""Seconds a round waits for late ranks before all ranks check whether the save goes on."""
AGAIN_S: Final = 0.2
"""Seconds a rank waits before the next round, if a round had no outcome or its ranks had different saves."""

_HEAD: Final = struct.Struct(">QQH")


class RankExchange(Exchange):
    """One rank's exchange, over its session. `wait_s` bounds the wait for the other ranks."""

    def __init__(
        self, port: SessionPort, catalog: CoordinatedCatalog, *, wait_s: float, round_s: float = ROUND_S
    ) -> None:
        self._port = port
        self._catalog = catalog
        self._wait_s = wait_s
        self._round_s = round_s

    @property
    def limit_bytes(self) -> int:
        return payload_limit(self._port.world_size) - _HEAD.size

    def __call__(
        self, record: CheckpointMetadata, stage: int, message: bytes, *, cancelled: Event
    ) -> Sequence[bytes]:
        head = _HEAD.pack(record.step, xxhash.xxh3_64_intdigest(record.id.encode()), stage)
        deadline_s = time.monotonic() + self._wait_s
        while True:
            try:
                messages = self._port.barrier(COMPARE_BARRIER, head + message, timeout_s=self._round_s)
            except BarrierTimeout as error:
                why = error.message
            except BarrierBroken as error:
                raise CheckpointAborted(
                    f"the save of step {record.step} lost a rank: {error.message}", hint="save it again"
                ) from None
            except Unavailable as error:
                cancelled.wait(AGAIN_S)  # the port may raise `Unavailable` immediately
                self._check_in_time(record, cancelled, deadline_s, error.message)
                continue  # the same round: this rank may be the only one that missed the round's outcome
            else:
                if len(messages) == self._port.world_size and all(
                    one[: _HEAD.size] == head for one in messages.values()
                ):
                    return [messages[rank][_HEAD.size :] for rank in sorted(messages)]
                why = "the ranks are at different saves"
                cancelled.wait(AGAIN_S)
            self._check_in_time(record, cancelled, deadline_s, why)
            self._check_open(record)

    def _check_in_time(
        self, record: CheckpointMetadata, cancelled: Event, deadline_s: float, why: str
    ) -> None:
        if cancelled.is_set():
            raise CheckpointAborted(f"the save of step {record.step} was cancelled")
        if time.monotonic() >= deadline_s:
            raise Unavailable(
                f"step {record.step} is not committed after {self._wait_s:g} s: not all ranks have come to"
                f" compare their tensors: {why}",
                hint="check the missing ranks (strata members); commit_timeout_s is the time to wait for them",
            )

    def _check_open(self, record: CheckpointMetadata) -> None:
        """Raise unless the attempt is open and no rank has acked it already.

        A rank in the exchange acks only after the last stage, and this rank has not reached that stage yet. So a
        rank that has acked already takes no part in the exchange.
        """
        found = self._catalog.look(record)
        if found.acked:
            raise CheckpointError(
                f"ranks {ranks_text(found.acked)} saved step {record.step} without comparing it with the others",
                hint="give the managers of all ranks the same `replicated` and `low_memory`",
            )

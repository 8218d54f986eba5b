"""Cases with invalid numbers, for every numeric argument of the library."""

from __future__ import annotations

from typing import Final

import strata
from strata import CoordinatorClient, DatasetRegistry
from strata.v1 import worlds_pb2
from tests.integration.bad_input.case import COUNTS, SPANS, Case, numbers, registry, save

NUMBERS: Final[list[Case]] = [
    *numbers(
        "connect.timeout_s",
        lambda p, v: strata.connect(p.endpoints, job="spare", timeout_s=v),
        *(span for span in SPANS if span is not None),  # None is valid: no limit
    ),
    *numbers("connect.min_workers", lambda p, v: strata.connect(p.endpoints, min_workers=v), *COUNTS, 0),
    *numbers(
        "connect.max_workers",
        lambda p, v: strata.connect(p.endpoints, max_workers=v),
        *(count for count in COUNTS if count is not None),
        0,
    ),
    *numbers(
        "rejoin.timeout_s",
        lambda p, v: p.witness.rejoin(timeout_s=v),
        *(span for span in SPANS if span is not None),
    ),
    *numbers(
        "call.timeout_s",
        lambda p, v: p.witness.call(worlds_pb2.GetWorldRequest(job="witness"), timeout_s=v),
        *SPANS,
    ),
    *numbers(
        "barrier.timeout_s",
        lambda p, v: p.witness.barrier("b", timeout_s=v),
        *(span for span in SPANS if span is not None),
    ),
    *numbers("progress.step", lambda p, v: p.witness.progress(v), *COUNTS),
    *numbers("client.timeout_s", lambda p, v: CoordinatorClient.connect(p.endpoints, timeout_s=v), *SPANS),
    *numbers("registry.timeout_s", lambda p, v: DatasetRegistry(p.endpoints, timeout_s=v), *SPANS),
    *numbers("register.slots", lambda p, v: p.client("spare").register(worker_id="s", slots=v), *COUNTS, 0),
    *numbers("dataset.shards", lambda p, v: registry(p).register("d", shards=v), *COUNTS, 0),
    *numbers("save.step", lambda p, v: save(p, step=v), *COUNTS),
    *numbers("save.epoch", lambda p, v: save(p, step=71, epoch=v), *COUNTS),
    *numbers(
        "restore.step",
        lambda p, v: p.checkpoints.restore({}, step=v),
        *(count for count in COUNTS if count is not None),
    ),
    *numbers(
        "wait.timeout_s",
        lambda p, v: p.checkpoints.wait_until_finished(v),
        *(span for span in SPANS if span not in {None, 0}),
    ),
]

"""The job's history for goodput and save cadence: how often the job fails, and when this generation began."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from strata.errors import StrataError
from strata.training.rank_context import RankContext
from strata.training.save.cadence import PRIOR_S, time_between_failures
from strata.v1.recovery_pb2 import RecoveryRequest, RecoveryResponse
from strata.v1.worlds_pb2 import ListGenerationsRequest
from strata.wire.pages import whole

ASK_S: Final = 5.0

log: Final = logging.getLogger("strata.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """`began_unix_s`: when this generation began; `failure_s`: the expected time to a failure."""

    began_unix_s: float
    uncommitted_unix_s: float
    """The start of the generation that followed the last generation with a committed checkpoint."""
    failure_s: float = PRIOR_S


def past_of(context: RankContext, *, now_unix_s: float) -> Past:
    """Return the history that the coordinators have; without an answer, assume that nothing has failed."""
    try:
        answer = whole(
            lambda page: context.call(page, timeout_s=ASK_S), ListGenerationsRequest(job=context.job)
        )
    except StrataError as error:
        log.info("the job's history is not known: %s", error.message)
        return Past(began_unix_s=now_unix_s, uncommitted_unix_s=now_unix_s)
    began_s = {g.world.generation: g.began_unix_ms / 1000 for g in answer.generations}
    committed = max((g.world.generation for g in answer.generations if g.has_committed), default=0)
    since_s = [unix_s for generation, unix_s in began_s.items() if generation > committed]
    return Past(
        began_unix_s=began_s.get(context.generation, now_unix_s),
        uncommitted_unix_s=min(since_s, default=now_unix_s),
        failure_s=time_between_failures(
            # a generation that began because the job grew, was paused or was preempted is not a failure
            failures=sum(g.failure for g in answer.generations),
            began_s=min(began_s.values(), default=now_unix_s),
            now_s=now_unix_s,
        ),
    )


def recovery_of(context: RankContext) -> RecoveryResponse:
    """Return what this member's ranks resumed from; `Refused` for a training without coordinators."""
    request = RecoveryRequest(job=context.job, worker_id=context.worker_id)
    response: RecoveryResponse = whole(context.call, request)
    return response

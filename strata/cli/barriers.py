"""`strata barriers`: open barriers with their missing ranks, and ended rounds."""

from __future__ import annotations

from strata.cli.console.credentials import connecting
from strata.cli.console.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Job,
    Json,
    TimeoutS,
    age,
    print_json,
    print_table,
    ranks,
)
from strata.config import Credentials


@connecting
def barriers(
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    job: Job = "default",
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Show the open barriers of a job with the missing ranks, and the rounds that ended last.

    Example: strata barriers --job gpt
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it
    from strata.v1.barriers_pb2 import BarrierResult  # noqa: PLC0415  # likewise

    with CoordinatorClient.connect(
        endpoints, job=job, timeout_s=timeout_s, credentials=credentials
    ) as client:
        answer = client.barriers()
        if not answer.open and not answer.recent:
            client.job_status()  # raises NotFound if the job does not exist
    if as_json:
        print_json(answer)
        return
    print_table(
        "open",
        ("BARRIER", "GENERATION", "ROUND", "ARRIVED", "MISSING RANKS", "SINCE"),
        (
            (
                b.name,
                b.generation,
                b.round,
                f"{b.arrived} of {b.expected}",
                ranks(b.missing),
                age(b.age_ms),
            )
            for b in answer.open
        ),
        empty="no open barrier",
    )
    print_table(
        "ended",
        ("BARRIER", "GENERATION", "ROUND", "RESULT", "REASON"),
        (
            (
                o.name,
                o.generation,
                o.round,
                BarrierResult.Name(o.result).removeprefix("BARRIER_RESULT_").lower(),
                o.reason,
            )
            for o in answer.recent
        ),
        empty="no barrier has ended yet",
    )

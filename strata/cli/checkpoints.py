"""`strata checkpoints`: what is saved."""

from __future__ import annotations

from datetime import UTC, datetime

from strata.cli.credentials import connecting
from strata.cli.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Job,
    Json,
    TimeoutS,
    print_json,
    print_table,
    size,
)
from strata.config import Credentials


@connecting
def checkpoints(
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    job: Job = "default",
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Show the checkpoints of a job, newest last.

    Example: strata checkpoints --job gpt --json
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it
    from strata.v1.checkpoints_pb2 import (  # noqa: PLC0415  # likewise
        CheckpointState,
        CheckpointType,
    )

    with CoordinatorClient.connect(
        endpoints, job=job, timeout_s=timeout_s, credentials=credentials
    ) as client:
        listed = client.checkpoints()
        if not listed:
            client.job_status()  # a job that does not exist is said to be missing, not empty
    if as_json:
        print_json(listed)
        return
    print_table(
        f"job {job}",
        ("STEP", "GENERATION", "TYPE", "STATE", "ACKS", "SIZE", "SAVED AT", "PATH"),
        (
            (
                f"{c.step}{' (latest)' if c.latest else ''}{' (pinned)' if c.pinned else ''}",
                c.generation,
                CheckpointType.Name(c.type).removeprefix("CHECKPOINT_TYPE_").lower(),
                CheckpointState.Name(c.state).removeprefix("CHECKPOINT_STATE_").lower(),
                f"{len(c.acked)} of {c.ranks}{', sealed' if c.sealed else ''}",
                size(c.size_bytes),
                datetime.fromtimestamp(c.created_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
                c.path,
            )
            for c in listed
        ),
        empty=f"job {job} has no checkpoint yet",
    )

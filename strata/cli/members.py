"""`strata members`: who takes part in a job."""

from __future__ import annotations

from strata.cli.credentials import connecting
from strata.cli.output import (
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
def members(
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    job: Job = "default",
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Show the members of a job, their ranks and how far each rank is.

    Example: strata members --job gpt
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(
        endpoints, job=job, timeout_s=timeout_s, credentials=credentials
    ) as client:
        listed = client.members()
        if as_json:
            print_json(listed)
            return
        world = client.world()
    places = {(m.worker_id, m.incarnation): m for m in world.members}
    rows = []
    for member in listed:
        place = places.get((member.worker_id, member.incarnation))
        heard = min((r.age_ms for r in member.ranks), default=None)
        rows.append(
            (
                member.worker_id,
                member.host,
                "standby"
                if place is None
                else ranks(range(place.first_rank, place.first_rank + place.slots)),
                _span([r.step for r in member.ranks]),
                ", ".join(sorted({r.phase for r in member.ranks if r.phase})) or "-",
                "-" if heard is None else f"{age(heard)} ago",
                member.incarnation,
            )
        )
    generation = world.world.generation or "none"
    print_table(
        f"job {job}: generation {generation}, {world.world.size} ranks"
        + (f" ({world.world.reason})" if world.world.reason else ""),
        ("MEMBER", "HOST", "RANKS", "STEP", "PHASE", "HEARD", "INCARNATION"),
        rows,
        empty=f"job {job} has no members",
    )


def _span(steps: list[int]) -> str:
    """Return where the ranks are: one step, or the slowest and the fastest."""
    if not steps:
        return "-"
    slowest, fastest = min(steps), max(steps)
    return str(slowest) if slowest == fastest else f"{slowest}-{fastest}"

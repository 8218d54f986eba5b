"""Held saves: a rank trains on while the storage refuses its part for a reason that may pass.

Three facts report a held save, each to a different reader:

    reader                fact                                    how it ends
    --------------------  --------------------------------------  ----------------------------------
    people, immediately   `SaveHold` in the rank's progress       the rank's next report without one
    the plan of worlds    the key `worlds/<generation>/held`      with the keys of its generation
    people, in one line   `no_checkpoint`                         -

The key is written at most once a generation, and only for a step after the step that the generation began from. The
rank that writes it has trained that step but cannot save it, or cannot begin the step because its start waits for
the storage. Such a generation made progress that it could not save, or could not make progress. So the generation
does not count as "without progress" (`core.worlds.changes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.core.checkpoints.attempt import Author, authorised
from strata.core.checkpoints.references import SavesHeld
from strata.core.job import JobView
from strata.core.kv.records import encode
from strata.core.kv.txn import Decision, Put, Txn, absent, refusable
from strata.core.words import first_few
from strata.errors import InvalidArgument

MAX_REASON_CHARS: Final = 200
MAX_HOST_CHARS: Final = 128
NAMED: Final = 3
"""The maximum number of hosts, and of reasons, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHold:
    """One rank that cannot save at present.

    `step`: the step whose save is held. `reason`: the cause in words, such as `disk full`. `held_s`: how long the
    rank has not been able to save, at the time of the report.
    """

    step: int
    reason: str
    host: str
    held_s: float = 0.0


def no_checkpoint(*holds: SaveHold, committed_step: int | None) -> str:
    """Return the sentence shown to people: `no checkpoint since step 40, 4 min: disk full on host a`.

    If several ranks have held saves, the sentence has the time of the longest hold, and each reason with its hosts.
    """
    since = "no checkpoint yet" if committed_step is None else f"no checkpoint since step {committed_step}"
    longest_s = max((hold.held_s for hold in holds), default=0.0)
    hosts: dict[str, set[str]] = {}
    for hold in holds:
        hosts.setdefault(hold.reason or "the storage refuses", set()).add(hold.host or "?")
    where = [
        f"{reason} on host{'s' if len(names) > 1 else ''} {first_few(sorted(names), NAMED)}"
        for reason, names in sorted(hosts.items())
    ]
    if len(where) > NAMED:
        where = [*where[:NAMED], f"{len(where) - NAMED} more reasons"]
    return f"{since}, {_span(longest_s)}: {'; '.join(where)}"


@refusable
def decide_hold_saves(job: JobView, *, author: Author, step: int, reason: str, host: str) -> Decision:
    """Record that a rank has trained and cannot save; only the first report of a generation is recorded."""
    guards = authorised(job, author)
    if step < 0:
        raise InvalidArgument(f"step {step} is below 0")
    key, began = job.keys.held(author.generation), job.restored(author.generation) or 0
    who = f"rank {author.rank} of generation {author.generation}"
    if job.held(author.generation) is not None:
        return Decision(reason=f"generation {author.generation} has held saves on record already")
    if step <= began:
        return Decision(reason=f"{who} has not trained beyond step {began}, where it began")
    record = SavesHeld(
        step=step,
        rank=author.rank,
        worker=author.worker,
        host=host[:MAX_HOST_CHARS],
        reason=reason[:MAX_REASON_CHARS],
    )
    return Decision(
        reason=f"{who} cannot save step {step}: {record.reason} on host {record.host}",
        txn=Txn(compares=(*guards, absent(key)), success=(Put(key=key, value=encode(record)),)),
    )


def _span(seconds: float) -> str:
    """Return a duration for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

"""The generations of a job, and what asks the current one to stop: as data, and on its page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.core.job import JobView
from strata.core.stopping import active_world
from strata.dashboard.html import Markup
from strata.dashboard.layout import NONE, Column, at, empty, note, short, table

SHOWN: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStatus:
    """One generation. `committed_step` is known once it has ended."""

    generation: int
    began_unix_ms: int
    members: int
    ranks: int
    restored_step: int | None
    committed_step: int | None
    failure: bool
    """Whether a failure ended the one before."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeStatus:
    """What the ranks of the current generation are asked for, and how many have stopped."""

    action: str
    reason: str
    workers: tuple[str, ...]
    grace_ms: int
    stopped: int
    ranks: int


def generations_of(job: JobView) -> tuple[GenerationStatus, ...]:
    """Return the newest `SHOWN` generations, the newest first."""
    return tuple(
        GenerationStatus(
            generation=int(entry.name),
            began_unix_ms=entry.record.began_unix_ms,
            members=entry.record.members,
            ranks=entry.record.size,
            restored_step=entry.record.restore.step if entry.record.restore is not None else None,
            committed_step=entry.record.committed_step,
            failure=entry.record.failure,
            reason=entry.record.reason,
        )
        for entry in reversed(job.history()[-SHOWN:])
    )


def notice_of(job: JobView) -> NoticeStatus | None:
    """Return what the ranks of the current generation are asked for, or None."""
    world = active_world(job)
    entry = None if world is None else job.notice(world.head.generation)
    if world is None or entry is None:
        return None
    record = entry.record
    return NoticeStatus(
        action=record.action.value,
        reason=record.reason,
        workers=tuple(record.workers),
        grace_ms=record.grace_ms,
        stopped=len(job.stopped(world.head.generation)),
        ranks=world.head.size,
    )


def notice_note(notice: NoticeStatus) -> Markup:
    """Return the sentence that says what a job is asked for."""
    who = f" ({short(', '.join(notice.workers))})" if notice.workers else ""
    how = f"within {notice.grace_ms / 1000:g} s" if notice.grace_ms else "at once, without a save"
    return note(
        f"Its ranks are asked to stop {how}: {notice.action}{who}, {short(notice.reason)}."
        f" {notice.stopped} of {notice.ranks} have stopped."
    )


def generation_table(generations: tuple[GenerationStatus, ...]) -> Markup:
    """Return why each generation began."""
    if not generations:
        return empty("It has had no generation yet.")
    return table(
        (
            Column("generation", number=True),
            Column("began"),
            Column("members", number=True),
            Column("ranks", number=True),
            Column("from step", number=True),
            Column("committed", number=True),
            Column("why", class_="why"),
        ),
        (
            (
                each.generation,
                at(each.began_unix_ms),
                each.members or "forming",
                each.ranks or NONE,
                NONE if each.restored_step is None else each.restored_step,
                NONE if each.committed_step is None else each.committed_step,
                short(each.reason),
            )
            for each in generations
        ),
    )

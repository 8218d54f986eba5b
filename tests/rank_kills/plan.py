"""Plans which rank is killed and at which moment; the seed decides everything."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

RANKS = 2
MOST_SAVES = 4
"""One more than the number of saves until the next Full."""


class Moment(StrEnum):
    """What a rank is doing when it is killed."""

    MID_STEP = "mid-step"
    MID_SAVE = "mid-save"
    """Its part of a checkpoint is being copied, written or committed."""
    AFTER_COMMIT = "after a commit"
    RESTORING = "restoring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kill `rank` after it has begun, or seen committed, `saves` more saves, or during its restore.

    `part` is the exact time of the kill, as a fraction of how long the moment usually lasts.
    """

    number: int
    moment: Moment
    rank: int
    saves: int
    part: float


def make_plan(seed: int, kills: int) -> list[Kill]:
    """Return the kills of a seed: every four in a row cover all moments.

    The first kill never hits a restore, because nothing is saved yet.
    """
    rng = random.Random(seed)
    moments: list[Moment] = []
    while len(moments) < kills:
        four = list(Moment)
        rng.shuffle(four)
        moments += four
    first = next(number for number, moment in enumerate(moments) if moment is not Moment.RESTORING)
    moments[0], moments[first] = moments[first], moments[0]
    return [
        Kill(
            number=number,
            moment=moment,
            rank=rng.randrange(RANKS),
            saves=rng.randint(1, MOST_SAVES),
            part=rng.random(),
        )
        for number, moment in enumerate(moments[:kills], 1)
    ]

"""Plans the kills: the rank and the moment of each. The seed decides everything."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

RANKS = 2
MOST_SAVES = 4
"""One more than the number of saves until the next Full."""


class Moment(StrEnum):
    """The activity of a rank at the moment of its kill."""

    MID_STEP = "mid-step"
    MID_SAVE = "mid-save"
    """The rank's part of a checkpoint is being copied, written or committed."""
    AFTER_COMMIT = "after a commit"
    RESTORING = "restoring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kill `rank` after it has begun, or seen committed, `saves` more saves, or during its restore.

    `part` is the time of the kill within the moment, as a fraction of the moment's usual length.
    """

    number: int
    moment: Moment
    rank: int
    saves: int
    part: float


def make_plan(seed: int, kills: int) -> list[Kill]:
    """Return the kills of a seed: four consecutive kills cover all moments.

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

"""The store that an agent is given for one generation: torch's own, with two questions answered here.

An agent uses its store for two things, and waits in it for other agents that may be gone by then:

- to number the workers. All that is known from the join barrier, so it is answered without asking.
- to leave together, once its workers have ended well. It says so to Strata at that moment, and
  waits no longer than the generation lasts: in a newer one nobody will ever come. Who has the store
  lets the others read there that all have come, before it takes the store away by leaving: they would
  end well all the same, but with a traceback.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistError, DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]  # not in their list

from strata.agent.environment import Place
from strata.errors import ConfigError
from strata.integrations.torchrun.meeting import Met

ROLE_INFO: Final = "torchelastic/role_info/"
ASSIGNED_RANKS: Final = "torchelastic/assigned_ranks/"
EXIT_BARRIER: Final = "torchelastic/agent/terminal_state"
PARTED: Final = "strata/parted"
"""How many agents have read that all have come."""
PART_S: Final = 2.0
"""How long who has the store waits for them: some may be gone already."""
LOOK_S: Final = 0.2
PART_LOOK_S: Final = 0.02


class AgentStore(PrefixStore):
    """A store of one generation, `store` behind it.

    `finished` is called when the agent begins to leave; `ended_within` waits up to so many seconds
    and says whether the generation has ended.
    """

    def __init__(
        self,
        store: Store,
        *,
        place: Place,
        met: Met,
        finished: Callable[[], None],
        ended_within: Callable[[float], bool],
    ) -> None:
        super().__init__("strata/agent", store)
        self._place = place
        self._met = met
        self._finished = finished
        self._ended_within = ended_within

    def set(self, key: str, value: Any) -> None:
        if key.startswith(ROLE_INFO):
            self._check(value)
        elif not key.startswith(ASSIGNED_RANKS):
            super().set(key, value)

    def get(self, key: str) -> bytes:
        if not key.startswith(ASSIGNED_RANKS):
            return super().get(key)
        member, met = self._place.member, self._met
        numbers = [member.first_rank, self._place.world.size, met.role_rank, met.role_size]
        return json.dumps(numbers).encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not all(key.startswith(ROLE_INFO) for key in keys):
            return list(super().multi_get(list(keys)))
        # only so that rank 0's agent has something to add up: nobody reads what it makes of it
        return [
            json.dumps({"role": "", "rank": int(key.removeprefix(ROLE_INFO)), "local_world_size": 0}).encode()
            for key in keys
        ]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        if not all(key.startswith(ASSIGNED_RANKS) for key in keys):
            super().multi_set(list(keys), list(values))  # type: ignore[misc]  # torch's stub lacks it

    def add(self, key: str, amount: int) -> int:
        if key.startswith(EXIT_BARRIER):
            self._finished()
        return int(super().add(key, amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there; `DistStoreError` after the time, or when they cannot come."""
        wanted = list(keys)
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        left_s = limit.total_seconds()
        while not self.check(wanted):
            if left_s <= 0:
                raise DistStoreError(f"{', '.join(wanted)} did not come in time")
            if self._ended_within(min(LOOK_S, left_s)):
                raise DistStoreError(f"generation {self._place.generation} has ended")
            left_s -= LOOK_S
        if any(key.startswith(EXIT_BARRIER) for key in wanted):
            self._part()

    def _part(self) -> None:
        """Leave the store; who has it does so last, or after `PART_S`."""
        if self._place.member.first_rank != 0:
            with contextlib.suppress(DistError):  # who has the store waits for so long, and no longer
                super().add(PARTED, 1)
            return
        others, until = self._place.world.members - 1, time.monotonic() + PART_S
        while super().add(PARTED, 0) < others and time.monotonic() < until:
            time.sleep(PART_LOOK_S)

    def _check(self, value: bytes | str) -> None:
        """Refuse an agent that runs another number of workers than this one registered with."""
        slots = int(json.loads(value)["local_world_size"])
        if slots != self._place.member.slots:
            raise ConfigError(
                f"the agent runs {slots} workers, and registered with {self._place.member.slots} slots",
                hint=f"give --rdzv-conf=slots={slots}",
            )

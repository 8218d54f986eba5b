"""`AgentStore`: the store of an agent for one generation: torch's own store, except for two operations.

torch's agent waits in its store for other agents in two cases. These agents may be lost by then, so this class changes
both cases:

- to number the workers. The join barrier has already given all numbers, so the store returns them locally.
- to leave together, once its workers have ended with success. At that moment `finished` reports this to Strata,
  and the wait ends with the generation, since nobody arrives in an ended generation. The agent that hosts the
  store leaves last, so that the other agents can still read from the store that all have arrived. Otherwise
  they would exit with 0, but with a traceback.
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
"""The key of a counter: each agent adds 1 once it has read that all agents have arrived."""
PART_S: Final = 2.0
"""How long the agent that hosts the store waits for the other agents: some may have ended already."""
POLL_S: Final = 0.2
PART_POLL_S: Final = 0.02


class AgentStore(PrefixStore):
    """The store of one generation, on top of `store`.

    `finished` is called when the agent begins to leave. `ended_within` waits up to the given seconds, and returns
    whether the generation has ended.
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
        # placeholders for rank 0's agent to add up: nothing reads the sums
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
        """Return once all keys are there; `DistStoreError` after `timeout`, or if the generation has ended."""
        awaited = list(keys)
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        left_s = limit.total_seconds()
        while not self.check(awaited):
            if left_s <= 0:
                raise DistStoreError(f"{', '.join(awaited)} did not arrive in time")
            if self._ended_within(min(POLL_S, left_s)):
                raise DistStoreError(f"generation {self._place.generation} has ended")
            left_s -= POLL_S
        if any(key.startswith(EXIT_BARRIER) for key in awaited):
            self._part()

    def _part(self) -> None:
        """Leave the store; the agent that hosts it leaves last, or after `PART_S`."""
        if self._place.member.first_rank != 0:
            with contextlib.suppress(DistError):  # the hosting agent may have left after `PART_S`
                super().add(PARTED, 1)
            return
        others, until = self._place.world.members - 1, time.monotonic() + PART_S
        while super().add(PARTED, 0) < others and time.monotonic() < until:
            time.sleep(PART_POLL_S)

    def _check(self, value: bytes | str) -> None:
        """Raise `ConfigError` if the agent runs another number of workers than it registered with."""
        slots = int(json.loads(value)["local_world_size"])
        if slots != self._place.member.slots:
            raise ConfigError(
                f"the agent runs {slots} workers, and registered with {self._place.member.slots} slots",
                hint=f"give --rdzv-conf=slots={slots}",
            )

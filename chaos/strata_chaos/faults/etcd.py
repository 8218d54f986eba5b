"""Faults of etcd that leave its processes running."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from strata.errors import Unavailable
from strata_chaos.faults.base import Effect, NoTarget, Wound
from strata_chaos.run.system import System, chosen


class LeaderChange:
    """Moves etcd's leadership to another member (`MoveLeader`), while the workloads go on."""

    name: Final = "etcd-leader-change"
    summary: Final = "etcd's leader hands over to another member (MoveLeader)"

    def available(self, backend: str) -> str:
        return ""

    async def inject(self, system: System, rng: random.Random) -> Wound:
        old = await system.etcd_leader()
        whole = system.running_etcd()
        others = [name for name in whole if name != old]
        if old is None or old not in whole or not others:
            raise NoTarget("etcd has no leader that could hand over")
        new = chosen(rng, others)
        try:
            await asyncio.to_thread(system.etcd[old].hand_over, system.etcd[new])
        except Unavailable as error:
            # another fault interfered; the leader may have changed nevertheless, which `took_effect` checks
            return Wound(targets=(old,), memory=(old, error.message))
        return Wound(targets=(old,), memory=(old, f"etcd moved its leader from {old} to {new}"))

    async def took_effect(self, system: System, wound: Wound) -> Effect:
        old, action = wound.memory
        now = await system.etcd_leader()
        return Effect(now is not None and now != old, f"{action}; the leader now: {now or 'none'}")

    async def heal(self, system: System, wound: Wound) -> None:
        """Do nothing: a change of leader breaks nothing."""


FAULTS: Final = (LeaderChange(),)

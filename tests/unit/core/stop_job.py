"""A job whose ranks get notices to stop, for the tests of notices."""

from __future__ import annotations

from typing import Any

from strata.core.ids import WorkerId
from strata.core.kv.records import StopAction, StopNotice, WorldHead
from strata.core.kv.txn import Decision
from strata.core.members.membership import decide_rank_exit
from strata.core.stop.last_step import BEGIN_BARRIER, Verdict
from strata.core.stop.requests import DEFAULT_GRACE_MS, StopRequest, decide_stop
from tests.not_none import not_none
from tests.unit.core.rig import Store, agreed, carry_out, lead, leave, register, released

PREEMPT, PAUSE, DRAIN = StopAction.PREEMPT, StopAction.PAUSE, StopAction.DRAIN
GRACE_S = DEFAULT_GRACE_MS / 1000


class Job:
    """A job of w0, w1 and w2 with two ranks each, training."""

    def __init__(self, members: int = 3, *, least: int = 2, most: int = 3, **limits: int) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        self.spec: dict[str, Any] = {"min_workers": least, "max_workers": most, **limits}
        for index in range(members):
            self.join(f"w{index}")
        self.go(settled=True)
        if self.store.live.world() is not None:
            self.begun()

    def begun(self) -> None:
        """Release the begin barrier: the current generation's ranks have met before their first step."""
        released(self.store, BEGIN_BARRIER, self.head.generation)

    def agree(self, step: int, verdict: Verdict = Verdict.SAVE) -> None:
        """Make the current generation's ranks agree on a last step."""
        agreed(self.store, step, verdict)

    def join(self, name: str) -> None:
        register(self.store, name, slots=2, **self.spec)

    def leaves(self, *names: str) -> None:
        for name in names:
            leave(self.store, name)

    def go(self, *, settled: bool = False, request_ages_s: float = 0.0) -> str:
        reason = carry_out(self.store, self.epoch, settled=settled, request_ages_s=request_ages_s)
        assert self.store.problems() == []
        return reason

    def stop(self, action: StopAction, *workers: str, **more: Any) -> Decision:
        request = StopRequest(
            action=action, reason="maintenance", workers=tuple(map(WorkerId, workers)), **more
        )
        return self.store.settle(lambda job: decide_stop(job, request))

    def ends(self, *ranks: int, code: int = 75) -> None:
        world = not_none(self.store.live.world())
        for rank in ranks:
            member = world.member_of(rank)
            self.store.settle(
                lambda job, rank=rank, member=member: decide_rank_exit(  # type: ignore[misc]  # bound at once
                    job, member.worker, member.incarnation, world.head.generation, rank, code
                )
            )
        assert self.store.problems() == []

    @property
    def head(self) -> WorldHead:
        return not_none(self.store.live.head()).record

    @property
    def notice(self) -> StopNotice | None:
        held = self.store.live.notice(self.head.generation)
        return held.record if held is not None else None

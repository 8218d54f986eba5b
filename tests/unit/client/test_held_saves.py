"""A rank that cannot save says so: with each of its words, and once for the record."""

from __future__ import annotations

import asyncio

from strata.client.rank import RankClient
from strata.core.save_hold import SaveHold
from strata.v1.checkpoints_pb2 import HoldSavesRequest
from strata.v1.members_pb2 import RankProgress
from tests.unit.client.fake_rank import of_rank
from tests.unit.client.fake_replica import Rig

HOLD = SaveHold(step=20, reason="disk full", host="a", held_s=3.0)


async def last_said(r: Rig, number: int) -> RankProgress:
    """Return what the rank said in the `number`-th message of progress."""
    (said,) = (await r.serving.next("progress", after=number - 1)).ranks
    assert isinstance(said, RankProgress)
    return said


def calls(r: Rig) -> list[HoldSavesRequest]:
    return [call.hold_saves for call in r.serving.all("call") if call.HasField("hold_saves")]


@of_rank()
async def test_every_word_of_the_rank_carries_the_hold_until_it_is_over(r: Rig, client: RankClient) -> None:
    client.progress(20, "step")
    assert not (await last_said(r, 1)).HasField("save_hold")
    client.hold_saves(HOLD)
    said = await last_said(r, 2)
    assert (said.step, said.phase) == (20, "step"), "without a step of its own"
    assert (said.save_hold.step, said.save_hold.reason, said.save_hold.host) == (20, "disk full", "a")
    await asyncio.sleep(60)
    client.progress(24, "step")
    said = await last_said(r, 3)
    assert said.step == 24
    assert 62_900 <= said.save_hold.held_ms <= 64_000, "it is as old as it is by now"
    client.hold_saves(None)
    assert not (await last_said(r, 4)).HasField("save_hold")


@of_rank(2)
async def test_a_hold_is_put_on_record_though_replicas_go_and_not_after_it_is_over(
    r: Rig, client: RankClient
) -> None:
    client.hold_saves(HOLD)
    await asyncio.sleep(1)
    (asked,) = calls(r)
    assert (asked.step, asked.reason, asked.host, asked.author.rank) == (20, "disk full", "a", 0)
    r.serving.down()
    await asyncio.sleep(5)
    assert len(calls(r)) == 1, "told again to the replica that took over"
    assert (await last_said(r, 1)).save_hold.step == 20, "and shown by it"
    client.hold_saves(None)
    await asyncio.sleep(1)
    r.serving.down()
    await asyncio.sleep(5)
    assert (await last_said(r, 2)).HasField("save_hold") is False
    assert len(calls(r)) == 1, "what it had heard before, and nothing since"


@of_rank()
async def test_nobody_is_troubled_when_the_session_is_over(r: Rig, client: RankClient) -> None:
    await r.session.leave()
    client.hold_saves(HOLD)
    await asyncio.sleep(1)

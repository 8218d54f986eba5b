"""GetStatus, and the warning of a full etcd."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from strata.coordinator.context import EtcdMember
from strata.coordinator.controllers.compaction import Compaction
from strata.coordinator.controllers.loop import drive
from strata.coordinator.gate import Gate
from strata.coordinator.observed import UNHEARD
from strata.coordinator.servicers.admin import AdminServicer
from strata.coordinator.servicers.answering import Desk
from strata.coordinator.servicers.owing import Ledger
from strata.core.authority import Identity
from strata.core.debts import Debts
from strata.testing.virtual_time import in_virtual_time
from strata.v1.admin_pb2 import GetResourceRequest, GetStatusRequest
from tests.unit.coordinator.fleet import fleet
from tests.unit.coordinator.rig import rig


class Call:
    """The context of a call, where nobody is asked who calls."""

    def peer(self) -> str:
        return "ipv4:10.0.0.7:40312"

    def add_done_callback(self, callback: Any) -> None:
        pass


CALL: Any = Call()
NO_CALLS: Any = None


@in_virtual_time()
async def test_the_status_names_replicas_leader_and_who_answers() -> None:
    async with fleet() as f:
        leader, node = await f.leader(), await f.follower()
        await f.register(node, "w")
        await asyncio.sleep(2)
        heard = leader.context.instance
        servicer = AdminServicer(
            node.context,
            Desk(
                calls=NO_CALLS,
                gate=Gate(node.context.config, now=lambda: dt.datetime.now(dt.UTC)),
                ledger=Ledger(measures=node.context.measures, debts=Debts()),
            ),
            peer_ready=lambda instance: instance == heard,
            sessions=lambda: 7,
        )
        answer = await servicer.GetStatus(GetStatusRequest(), CALL)
        assert answer.cluster == "default"
        assert answer.leader == leader.name
        assert answer.leader_epoch == leader.context.election.epoch
        assert answer.answered_by == node.name
        assert (answer.jobs, answer.sessions) == (1, 7)
        assert answer.token.uid == node.context.mirror.uid
        replicas = {r.replica: r for r in answer.replicas}
        assert set(replicas) == {"r1", "r2", "r3"}
        assert [name for name, r in replicas.items() if r.leader] == [leader.name]
        silent = {name for name, r in replicas.items() if r.not_ready_reason == UNHEARD}
        assert silent == set(replicas) - {leader.name, node.name}
        assert replicas[node.name].ready
        assert replicas[node.name].address == f"{node.name}:50051"


class Refusing(Call):
    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        raise AbortedError(f"{code.name}: {details}")


class AbortedError(Exception):
    pass


@in_virtual_time()
async def test_a_resource_of_the_http_api_is_told_over_grpc_too_if_it_fits() -> None:
    async with fleet() as f:
        node = await f.leader()
        desk = Desk(
            calls=NO_CALLS,
            gate=Gate(node.context.config, now=lambda: dt.datetime.now(dt.UTC)),
            ledger=Ledger(measures=node.context.measures, debts=Debts()),
        )
        servicer = AdminServicer(node.context, desk, peer_ready=lambda _instance: True, sessions=lambda: 0)
        call: Any = Refusing()
        with pytest.raises(AbortedError, match="UNAVAILABLE: this replica shows nothing"):
            await servicer.GetResource(GetResourceRequest(path="/jobs"), call)

        async def read(path: str, identity: Identity | None) -> bytes:
            assert identity is None
            return b"x" * int(path.strip("/"))

        node.context.soft.resource = read
        assert len((await servicer.GetResource(GetResourceRequest(path="/200000"), call)).json) == 200_000
        with pytest.raises(AbortedError, match=r"RESOURCE_EXHAUSTED.*300000 bytes"):
            await servicer.GetResource(GetResourceRequest(path="/300000"), call)


@in_virtual_time()
async def test_an_etcd_that_fills_up_is_warned_of_once_a_minute() -> None:
    sizes = {"bytes": 69}

    async def members() -> Sequence[EtcdMember]:
        return [EtcdMember(endpoint="a", db_size_bytes=n) for n in (10, sizes["bytes"])]

    async with rig() as r, asyncio.TaskGroup() as tasks:
        compaction = Compaction(store=r.client, mirror=r.mirror, quota_bytes=100, members=members)
        with capture_logs() as logs:
            driving = tasks.create_task(drive(compaction, r.mirror))
            await asyncio.sleep(100)
            assert [e for e in logs if e["event"] == "etcd_fills_up"] == []
            sizes["bytes"] = 70
            await asyncio.sleep(180)
        warnings = [e for e in logs if e["event"] == "etcd_fills_up"]
        assert len(warnings) == 3
        assert (warnings[0]["percent"], warnings[0]["log_level"]) == (70, "warning")
        driving.cancel()

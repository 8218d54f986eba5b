"""Closing an endpoint."""

from __future__ import annotations

import asyncio

from strata.etcd.endpoint import Endpoint, Health
from strata.etcd.options import Address
from tests.unit.etcd.fake_etcd import soon


async def test_an_endpoint_closed_before_its_state_wait_ends_without_error() -> None:
    endpoint = Endpoint(Address(target="127.0.0.1:1", tls=None), None, Health())
    closing: list[asyncio.Task[None]] = []

    def report(endpoint: Endpoint, *, lost: bool) -> None:
        closing.append(asyncio.create_task(endpoint.close()))

    await soon(endpoint.keep_connected(report))
    await soon(asyncio.gather(*closing))
    assert closing

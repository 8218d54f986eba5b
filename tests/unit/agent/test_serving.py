"""The log lines of an agent about a session that is not connected."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from strata.agent.serving import REASONS, REMIND_S, AgentObserver
from strata.errors import Unavailable
from strata.testing.virtual_time import in_virtual_time
from strata.v1.session_pb2 import Welcome


async def _disconnected_for(observer: AgentObserver, seconds: int, *, reasons: int) -> list[str]:
    """Fail to connect twice a second, with `reasons` reasons in turn; return the logged reasons."""
    with capture_logs() as logs:
        for number in range(2 * seconds):
            observer.on_disconnected(Unavailable(f"reason {number % reasons}"))
            await asyncio.sleep(0.5)
    return [line["reason"] for line in logs if line["event"] == "session.disconnected"]


@in_virtual_time()
async def test_a_lasting_reason_is_logged_once_a_minute() -> None:
    observer = AgentObserver()
    reasons = await _disconnected_for(observer, 600, reasons=1)
    assert len(reasons) == 10
    assert set(reasons) == {"reason 0"}


@in_virtual_time()
async def test_changing_reasons_are_logged_a_few_times_and_then_once_a_minute() -> None:
    observer = AgentObserver()
    reasons = await _disconnected_for(observer, 600, reasons=1_000_000)
    assert reasons[:REASONS] == [f"reason {number}" for number in range(REASONS)]
    assert len(reasons) <= REASONS + 600 / REMIND_S


@in_virtual_time()
async def test_a_disconnect_reason_is_logged_again_after_a_new_connection() -> None:
    observer = AgentObserver()
    await _disconnected_for(observer, 1, reasons=1)
    observer.on_connected(Welcome(replica="c1"))
    assert await _disconnected_for(observer, 1, reasons=1) == ["reason 0"]

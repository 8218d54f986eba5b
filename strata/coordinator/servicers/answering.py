"""How a unary method answers: the one call, errors as statuses, and what bounds an answer.

An answer has at most `ANSWER_BYTES`: lists come in pages, and what one item may have is bounded where it is
written. So a larger one is a bug of ours, and its caller is told so. From here until its call has ended an answer
is owed (`core.debts`); grpc.aio calls back when the status, which follows the last byte, was sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from strata.coordinator.calls.dispatch import ANYBODY, Calls
from strata.coordinator.calls.pages import ANSWER_BYTES
from strata.coordinator.gate import Gate
from strata.coordinator.servicers.owing import Context, Ledger
from strata.core.authority import Identity
from strata.errors import StrataError
from strata.observe import get_logger
from strata.wire.status import abort

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """Where unary calls come in: who may, what answers, and what is owed."""

    calls: Calls
    gate: Gate
    ledger: Ledger


async def answer(desk: Desk, name: str, request: Any, context: Context) -> Any:
    """Return the response to `request`, or end the call with the reason why there is none."""
    return await answered(
        desk, name, context, lambda identity: desk.calls.answer(name, request, ANYBODY, identity)
    )


async def answered(
    desk: Desk, name: str, context: Context, make: Callable[[Identity | None], Awaitable[Any]]
) -> Any:
    """Return what `make` returns for whoever calls, within bounds; or end the call with the reason why not."""
    try:
        identity = desk.gate.asks(context)
        account = desk.ledger.account(context, identity)
        account.check()
        response = await make(identity)
        size_bytes = response.ByteSize()
        if size_bytes > ANSWER_BYTES:
            desk.ledger.measures.oversized.child().add()
            log.error("answer_too_large", call=name, size_bytes=size_bytes, limit_bytes=ANSWER_BYTES)
            why = f"internal error: the answer has {size_bytes} bytes, and at most {ANSWER_BYTES} are sent"
            raise StrataError(why, hint="please report it, with the call")
        account.check()  # others of its calls may have been answered meanwhile
        paid = account.owe(size_bytes)
        context.add_done_callback(lambda _context: paid())
    except StrataError as error:
        await abort(context, error)
    except Exception:
        # the boundary to the caller, who must learn of a bug as an error like any other
        log.exception("call_failed", call=name)
        await abort(context, StrataError("internal error", hint="the server's log has the details"))
    return response

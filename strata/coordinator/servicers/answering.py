"""How a unary method answers: the one call, and errors as statuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from strata.coordinator.calls.dispatch import ANYBODY, Calls
from strata.coordinator.gate import Gate
from strata.errors import StrataError
from strata.observe import get_logger
from strata.wire.status import Aborts, abort
from strata.wire.tls import Context as Caller

log = get_logger()


class Context(Aborts, Caller, Protocol):
    """What answering needs of a servicer's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """Where unary calls come in: who may, and what answers."""

    calls: Calls
    gate: Gate


async def answer(desk: Desk, name: str, request: Any, context: Context) -> Any:
    """Return the response to `request`, or end the call with the reason why there is none."""
    try:
        identity = desk.gate.asks(context)
        response = await desk.calls.answer(name, request, ANYBODY, identity)
    except StrataError as error:
        await abort(context, error)
    except Exception:
        # the boundary to the caller, who must learn of a bug as an error like any other
        log.exception("call_failed", call=name)
        await abort(context, StrataError("internal error", hint="the server's log has the details"))
    return response

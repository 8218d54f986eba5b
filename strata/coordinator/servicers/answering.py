"""How a unary method answers: the one call, and errors as statuses."""

from __future__ import annotations

from typing import Any

from strata.coordinator.calls.dispatch import ANYBODY, Calls
from strata.errors import StrataError
from strata.observe import get_logger
from strata.wire.status import Aborts, abort

log = get_logger()


async def answer(calls: Calls, name: str, request: Any, context: Aborts) -> Any:
    """Return the response to `request`, or end the call with the reason why there is none."""
    try:
        response = await calls.answer(name, request, ANYBODY)
    except StrataError as error:
        await abort(context, error)
    except Exception:
        # the boundary to the caller, who must learn of a bug as an error like any other
        log.exception("call_failed", call=name)
        await abort(context, StrataError("internal error", hint="the server's log has the details"))
    return response

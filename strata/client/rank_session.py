"""`RankSession`: the session of a rank with its agent, over a Unix socket and without gRPC."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from strata.errors import StaleIncarnation, Unavailable
from strata.session.client_session import Session
from strata.session.endpoints import Endpoint, Route
from strata.session.framed import connected, dialled
from strata.session.link import Link
from strata.session.terms import Dial, Pace, SessionObserver
from strata.v1.common_pb2 import Token
from strata.v1.session_pb2 import Down, Hello, RankHello, Up

RETRY_S: Final = 0.5
"""The longest pause between two tries to reach the agent: a rank ends within 1 s after its agent has ended."""


class RankSession(Session):
    """The session of one rank of one generation, attached to its agent's socket."""

    def __init__(
        self,
        socket: Endpoint,
        rank: RankHello,
        observer: SessionObserver,
        *,
        rng: random.Random,
        dial: Dial | None = None,
        pace: Pace | None = None,
    ) -> None:
        def introduce(token: Token, incarnation: int) -> Hello:
            return Hello(token=token, rank=rank)

        super().__init__(
            introduce=introduce,
            route=Route((socket,), rng, cap_s=RETRY_S),
            dial=dial or dial_agent,
            observer=observer,
            pace=pace,
        )


@asynccontextmanager
async def dial_agent(endpoint: Endpoint) -> AsyncIterator[Link[Down, Up]]:
    """Open the stream to an agent.

    Raise `StaleIncarnation` if no process listens at the path any more. The agent has then ended: an agent listens
    before its ranks start, and is never restarted at the same path. Raise `Unavailable` if the agent does not
    answer, but may answer later.
    """
    try:
        sock = connected(endpoint.path)
    except ConnectionRefusedError:
        raise StaleIncarnation(
            f"the agent at {endpoint} has ended, and this rank with it",
            hint="start the program again, as it was started before",
        ) from None
    except FileNotFoundError:
        raise StaleIncarnation(
            f"the agent at {endpoint} has ended, and this rank with it; or its socket was removed, or is hidden from here",
            hint="start the program again, as it was started before; agent and ranks share the folder TMPDIR",
        ) from None
    except OSError as error:
        raise Unavailable(f"{endpoint}: {error}", hint="agent and ranks are of one user") from error
    async with dialled(sock, str(endpoint)) as link:
        yield link

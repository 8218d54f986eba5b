"""`MemberSession`: the session of a member (an agent) with the coordinators, over gRPC."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from strata.config import Credentials
from strata.core.timing import Timing
from strata.session.client_session import Session
from strata.session.endpoints import Endpoint, Route
from strata.session.link import Link
from strata.session.terms import Dial, Pace, SessionObserver, member_hello
from strata.transport.channel import dialer
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import Down, Up


class MemberSession(Session):
    """A member's session with a job, over any of `endpoints` that serves it.

    `registration` names the job, the worker and its boot id; the session adds the member's incarnation. `timing`
    determines how soon the session leaves a replica whose host is lost; the first welcome message replaces `timing`
    by the cluster's own `detect_s`. `dial` replaces the transport.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        registration: Registration,
        observer: SessionObserver,
        *,
        rng: random.Random,
        timing: Timing | None = None,
        dial: Dial | None = None,
        pace: Pace | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        def dial_with_timing(endpoint: Endpoint) -> AbstractAsyncContextManager[Link[Down, Up]]:
            detect_s = self.welcome.detect_s if self.welcome is not None else 0.0
            return dialer(Timing.derive(detect_s) if detect_s else timing or Timing.derive(), credentials)(
                endpoint
            )

        super().__init__(
            introduce=member_hello(registration),
            route=Route(endpoints, rng),
            dial=dial or dial_with_timing,
            observer=observer,
            pace=pace,
        )

"""Services of an agent after its first welcome: the socket for its ranks, and the watch over ranks and devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from strata.agent import relay
from strata.agent.agent import Agent
from strata.agent.environment import Place
from strata.agent.health import rank_watch
from strata.agent.health.devices import OpenDevices
from strata.agent.health.draining import watching_devices
from strata.agent.health.liveness import Liveness
from strata.agent.relay import Relay
from strata.agent.relay_server import serving
from strata.client import MemberSession
from strata.client.rank.inspection import Inspection, RankLog
from strata.config import HealthConfig
from strata.core.timing import Timing
from strata.errors import StrataError
from strata.observe import get_logger
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.session_pb2 import Welcome, WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_PAUSED, JOB_PHASE_RUNNING

log = get_logger()

REASONS: Final = 4
"""How many different reasons are logged without delay: each replica may report a different reason."""
REMIND_S: Final = 60.0

_GOES_ON: Final = {JOB_PHASE_RUNNING: "running", JOB_PHASE_PAUSED: "paused"}


class Ranks(rank_watch.Ranks, relay.Ranks, Protocol):
    """This node's ranks, as the owner of their processes knows them."""

    def on_world(self, update: WorldUpdate) -> None:
        """Record a newer world or phase; an update may repeat a known world."""
        ...

    def rank_dumps_core(self, rank: int, generation: int, reason: str) -> None:
        """Report a rank as ended, though its process is still writing a core file."""
        ...

    def logs(self, rank: int) -> Sequence[RankLog]:
        """Return the remembered log files of a rank, the newest first."""
        ...

    def become_unfit(self, reason: str) -> None:
        """Record why this member must not get a place any more."""
        ...


class AgentObserver:
    """The observer of an agent's session: logs its state, and forwards its events to the relay and the ranks' owner."""

    def __init__(
        self,
        *,
        on_checkpoint: Callable[[Checkpoint], None] = lambda _checkpoint: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when the world may have changed, and when the session connects or disconnects."""
        self.relay: Relay | None = None
        self.ranks: Ranks | None = None
        self._on_checkpoint = on_checkpoint
        self._on_change = on_change
        self._logged: set[str] = set()
        self._logged_at = 0.0
        self._phase_reason = ""

    def warn_once(self, event: str, reason: str, **facts: str) -> None:
        """Log a new reason immediately, up to `REASONS` of them until the session connects again.

        Log all further calls, with known or new reasons, at most once every `REMIND_S`.
        """
        now = asyncio.get_running_loop().time()
        is_new = reason not in self._logged and len(self._logged) < REASONS
        if is_new or now - self._logged_at >= REMIND_S:
            self._logged.add(reason)
            self._logged_at = now
            log.warning(event, reason=reason, **facts)

    def on_connected(self, welcome: Welcome) -> None:
        self._logged.clear()
        log.info("session.connected", replica=welcome.replica, incarnation=welcome.incarnation)
        self._on_change()

    def on_disconnected(self, reason: StrataError) -> None:
        self.warn_once("session.disconnected", reason.message, hint=reason.hint)
        self._on_change()

    def on_world(self, update: WorldUpdate) -> None:
        if update.phase in _GOES_ON and update.phase_reason not in {"", self._phase_reason}:
            self._phase_reason = update.phase_reason  # resumed or paused
            log.info("job.phase", phase=_GOES_ON[update.phase], reason=update.phase_reason)
        if self.relay is not None:
            self.relay.on_world(update)
        if self.ranks is not None:
            self.ranks.on_world(update)
        self._on_change()

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        if self.relay is not None:
            self.relay.on_outcome(outcome)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._on_checkpoint(checkpoint)
        if self.relay is not None:
            self.relay.on_checkpoint(checkpoint)


class _Admission:
    """Hands each place of the agent to three receivers: the relay, the watch over ranks, and the ranks' owner."""

    def __init__(
        self, relay: Relay, watch: rank_watch.Health, on_place: Callable[[Place | None], None]
    ) -> None:
        self._relay = relay
        self._watch = watch
        self._on_place = on_place
        self.in_process = relay.in_process
        self.move: Callable[[Place, Collection[int]], None] = relay.move

    def set_place(self, place: Place | None) -> None:
        self._on_place(place)
        self._relay.set_place(place)
        self._watch.set_place(place)


@asynccontextmanager
async def serving_ranks_of(
    agent: Agent,
    session: MemberSession,
    observer: AgentObserver,
    ranks: Ranks,
    config: HealthConfig,
    *,
    devices: OpenDevices | None,
    listening: rank_watch.Upstream | None = None,
    on_place: Callable[[Place | None], None] = lambda _place: None,
) -> AsyncIterator[Relay]:
    """Serve this node's ranks at `agent.socket` inside the block, and watch them and the devices.

    A coordinator must have welcomed `session`. If `listening` is given, it receives the ranks' progress instead
    of `session`.
    """
    timing = Timing.derive(agent.detect_s)
    watch = rank_watch.Health(config, listening or session, ranks, detect_s=timing.detect_s)
    session.on_request = Inspection(session.evidence, ranks.stack, ranks.logs, log=log).on_request
    liveness = Liveness(detect_s=timing.detect_s, on_frozen=ranks.evict, on_core_dump=ranks.rank_dumps_core)
    relay_of_ranks = Relay(
        session,
        ranks,
        worker_id=agent.config.worker_id,
        detect_s=timing.detect_s,
        grace_s=timing.reconnect_grace_s,
        listener=watch.stalls,
        processes=liveness,
    )
    async with (
        serving(relay_of_ranks, agent.socket, timing),
        liveness.watching(),
        watch.watching(),
        watching_devices(
            devices,
            config,
            session,
            job=agent.config.job,
            worker_id=agent.config.worker_id,
            grace_s=agent.config.preempt_grace_s,
            on_unfit=ranks.become_unfit,
        ),
    ):
        agent.admission = _Admission(relay_of_ranks, watch, on_place)
        observer.relay, observer.ranks = relay_of_ranks, ranks
        yield relay_of_ranks

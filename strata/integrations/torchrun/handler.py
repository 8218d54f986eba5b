"""`StrataRendezvous`: torchrun's rendezvous handler on top of Strata's membership.

It offers three things that torch's own handlers lack:

1. The loss of any node, rank 0's included, leads to a newer world. `num_nodes_waiting` reports the loss, so an agent
   whose workers hang in a collective restarts them.
2. Each generation has a new store, opened by the agent of its rank 0.
3. No call raises because the coordinators are unreachable.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Final, Self

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # not in their list
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from strata.agent.environment import Place
from strata.client import event_loop
from strata.config import Credentials, TrainingConfig
from strata.core.exit_codes import PREEMPTED
from strata.errors import (
    ClusterReplaced,
    ClusterRestored,
    ConfigError,
    Conflict,
    InvalidArgument,
    JobDone,
    JobFailed,
    Refused,
    StaleIncarnation,
    StrataError,
    Unavailable,
)
from strata.integrations.torchrun.launcher import RankFailure, find_failure, find_launch, find_workers
from strata.integrations.torchrun.meeting import Met
from strata.integrations.torchrun.member import AgentMember, Preempted, Spare
from strata.integrations.torchrun.settings import AgentSettings, of_agent, read_settings
from strata.integrations.torchrun.signals import AgentSignals
from strata.integrations.torchrun.store import AgentStore
from strata.observe import configure, get_logger

BACKEND: Final = "strata"
REACH_S: Final = 30.0
"""How long rank 0's store may be unreachable in a world that has not ended, before it counts as failed."""
MAX_UNREACHABLE: Final = 3
OPEN_TIMEOUT: Final = timedelta(seconds=REACH_S)
STORE_TIMEOUT: Final = timedelta(seconds=300)
RELEASE_S: Final = 10.0
"""How long the session of a replaced member may take to end."""
MAX_PAUSE_S: Final = 30.0
"""The longest pause before an agent joins again, if the control plane is restored again and again."""

log = get_logger()


class StrataRendezvous(RendezvousHandler):
    """The rendezvous of one agent. Only one thread may use it, as in torchrun."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._loop = event_loop.shared()
        self._member = AgentMember(settings)
        self._running: concurrent.futures.Future[None] | None = None
        self._server: TCPStore | None = None
        self._before: dict[str, str | None] = {}
        self._closed = False
        self._spare = False
        self._signals = AgentSignals(self._preempt)
        self._preempting: concurrent.futures.Future[None] | None = None

    @classmethod
    def create(cls, parameters: RendezvousParameters) -> Self:
        """Return the handler that torchrun's parameters describe; `ConfigError` if they cannot work."""
        settings = read_settings(
            run_id=parameters.run_id,
            endpoint=parameters.endpoint,
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            local_addr=parameters.local_addr,
            conf=parameters.config,
            launch=find_launch(),
            env=os.environ,
            host=socket.gethostname(),
            pid=os.getpid(),
            credentials=Credentials.load(env=os.environ),
            training=TrainingConfig.load(env=os.environ),
        )
        configure(
            fmt=os.environ.get("STRATA_LOG_FORMAT", "auto"), level=os.environ.get("STRATA_LOG_LEVEL", "info")
        )
        return cls(settings)

    # -- what torchrun calls

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """True: the workers use the store of rank 0's agent. This store serves only the workers, and is new in
        each generation.
        """
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this agent's place once all agents of a newer world have joined.

        torchrun stops the workers before this call. If their generation is still the newest, this call ends
        that generation.
        """
        if self._closed:
            raise RendezvousClosedError(f"the rendezvous {self.get_run_id()} was closed here")
        self._signals.give_back()
        failure = find_failure()
        if self._running is None:
            self._know_workers()
            self._run_member()
        tries = 0
        while True:
            self._server = None
            place, met = self._join(failure)
            try:
                return self._placed(place, met)
            except (DistError, OSError) as error:
                why = f"the store of generation {place.generation} at {met.address}:{met.port}: {error}"
                log.warning("store.unreachable", reason=why)
                failure = RankFailure(rank=place.member.first_rank, code=1, reason=why)
                tries += 0 if self._member.outdated else 1
            if tries == MAX_UNREACHABLE:
                raise RendezvousConnectionError(f"{why} (other nodes must reach it: see --local-addr)")

    def num_nodes_waiting(self) -> int:
        """Return 1 once this generation has ended, by a loss or because members join; else 0. Never raises."""
        if self._member.supports_graceful_stop:
            self._signals.take()
        return 1 if self._member.must_restart else 0

    def is_closed(self) -> bool:
        """Return whether the job was closed, or has ended as far as this agent's run is concerned. Never raises."""
        return self._closed or self._member.closed

    def set_closed(self) -> None:
        """End the generation immediately, and make every agent leave; agents that join later start a new generation."""
        self._closed = True
        if self._running is not None:
            try:
                self._loop.call(self._member.close())
            except StrataError as error:
                raise as_torchs(error, attempt=self._settings.attempt) from error

    def shutdown(self) -> bool:
        """Leave the job: as done if the workers are done, else by a departure that ends the generation immediately."""
        failure = find_failure()
        self._closed = True
        try:
            if self._running is not None:
                self._loop.forget_at_stop(self._member.leave)
                self._loop.call(self._member.leave(failure))
                self._running.result(timeout=5.0)
        except (StrataError, TimeoutError) as error:
            log.warning("agent.not_left", reason=str(error))
            return False
        finally:
            self._server = None
            self._restore_environment()
        if self._spare and isinstance(sys.exc_info()[1], AttributeError):
            # torch's agent then returns None, and torch's launcher (2.13) calls a method of the result
            raise SystemExit(0)
        ended_with = sys.exc_info()[1]
        if self._member.stopped and (ended_with is None or failure is not None):
            # torchrun itself would exit as if the training was done (with 0), or as if its workers had failed
            if failure is not None:
                log.warning(
                    "agent.preempted", reason="the workers have stopped as requested; no restart is left"
                )
            raise SystemExit(PREEMPTED) from None
        return True

    # -- inside

    def _know_workers(self) -> None:
        """Read the role and the number of workers from torchrun's agent, before it becomes a member."""
        try:
            settings = of_agent(self._settings, find_workers())
        except ConfigError as error:
            raise as_torchs(error, attempt=self._settings.attempt) from error
        if settings != self._settings:
            self._settings, self._member = settings, AgentMember(settings)

    def _join(self, failure: RankFailure | None) -> tuple[Place, Met]:
        """Return the next place of this agent's workers; raises torch's errors.

        If the control plane was restored, this agent joins again as a new member.
        """
        pauses = growing_pauses()
        try:
            while True:
                try:
                    return self._loop.call(self._member.join(failure, self._open_store))
                except ClusterRestored as error:
                    log.warning("controlplane.restored", reason=error.message, next="this agent joins again")
                    time.sleep(next(pauses))
                    self._replace_member()
        except Spare as error:
            self._spare = True
            raise RendezvousGracefulExitError(str(error)) from None
        except Preempted as error:
            log.warning("agent.preempted", reason=str(error))
            raise SystemExit(PREEMPTED) from None
        except StrataError as error:
            if isinstance(error, JobDone) and self._settings.scheduled_run:
                self._spare = True  # this agent is late, and its run is done: nothing is left to do
                raise RendezvousGracefulExitError(error.message) from None
            raise as_torchs(error, attempt=self._settings.attempt) from error

    def _run_member(self) -> None:
        self._running = self._loop.submit(self._member.run())
        self._loop.at_stop(self._member.leave)

    def _replace_member(self) -> None:
        """Become a new member with a new boot id. The workers of the previous member have ended."""
        before, running = self._member, self._running
        assert running is not None
        self._loop.forget_at_stop(before.leave)
        self._loop.soon(before.release)
        concurrent.futures.wait((running,), RELEASE_S)
        running.cancel()
        self._member = AgentMember(self._settings)
        self._run_member()

    def _preempt(self, why: str) -> None:
        """Start the common stop of all ranks; called by a signal handler."""
        self._preempting = self._loop.submit(self._member.preempt(why, self._signals.give_up))

    async def _open_store(self, address: str) -> int:
        """Open the store of one generation's agents and workers on this node; return its port."""
        try:
            self._server = await asyncio.to_thread(
                TCPStore, address, 0, is_master=True, wait_for_workers=False, timeout=OPEN_TIMEOUT
            )
        except DistError as error:
            raise ConfigError(
                f"no store can be opened at {address}: {error}",
                hint="--local-addr, or STRATA_ADDRESS, is where others reach this node",
            ) from error
        self._server.set_timeout(STORE_TIMEOUT)
        return int(self._server.port)

    def _placed(self, place: Place, met: Met) -> RendezvousInfo:
        store = self._server if place.member.first_rank == 0 else None
        if store is None:
            self._loop.call(self._member.reach(met, REACH_S))
            store = TCPStore(met.address, met.port, is_master=False, timeout=OPEN_TIMEOUT)
            store.set_timeout(STORE_TIMEOUT)
        agents = AgentStore(
            store,
            place=place,
            met=met,
            finished=lambda: self._loop.soon(self._member.finished),
            ended_within=lambda limit_s: self._loop.call(self._member.ended_within(limit_s)),
        )
        self._set_environment()
        info = RendezvousStoreInfo(met.address, met.port)
        return RendezvousInfo(agents, place.member.group_rank, place.world.members, info)

    def _set_environment(self) -> None:
        """Put the workers' place into the agent's environment, which the workers inherit."""
        environment = self._member.environment()
        for name in {*self._before, *environment}:
            self._before.setdefault(name, os.environ.get(name))
            if name in environment:
                os.environ[name] = environment[name]
            else:
                os.environ.pop(name, None)  # set for the previous generation only, such as its restore point

    def _restore_environment(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()


def growing_pauses() -> Iterator[float]:
    """Yield the pauses before each new join: 0 after the first restore, then 1 s, doubling up to `MAX_PAUSE_S`."""
    yield 0.0
    pause_s = 1.0
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def as_torchs(error: StrataError, *, attempt: int) -> RendezvousError:
    """Return the torch error that corresponds to `error`, with a hint for torchrun."""
    if isinstance(error, JobDone | JobFailed) or type(error) is Refused:
        return RendezvousClosedError(
            f"{error.message} (give another --rdzv-id; or go on with this one by --rdzv-conf=attempt=N,"
            f" with an N above {attempt})"
        )
    if isinstance(error, Conflict | StaleIncarnation | ClusterReplaced | ConfigError | InvalidArgument):
        return RendezvousStateError(str(error))
    if isinstance(error, Unavailable):
        return RendezvousTimeoutError(str(error))
    return RendezvousConnectionError(str(error))

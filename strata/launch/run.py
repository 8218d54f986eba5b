"""`strata run`, put together: agent, supervisor, signals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from strata.agent.agent import Agent, AgentConfig
from strata.agent.health.devices import OpenDevices
from strata.agent.health.draining import prepare_devices
from strata.agent.run_folder import run_folder
from strata.agent.serving import AgentObserver, serving_ranks_of
from strata.agent.storage_wait import grace_s, wait_for_storage
from strata.client import MemberSession, parse_endpoints
from strata.config import RunConfig
from strata.config.scheduler import allocation
from strata.core.exit_codes import PREEMPTED
from strata.core.ids import checked_id
from strata.errors import ClusterRestored, ConfigError, JobDone, Unavailable
from strata.launch.command import check_command, describe, job_name
from strata.launch.console import ConsoleText, PatientText, consoles
from strata.launch.exit_status import of_signal
from strata.launch.local_agent import LocalAgent
from strata.launch.rank_output import RankOutputs
from strata.launch.run_progress import Listening, RunProgress, shown
from strata.launch.stopping import PREEMPT_SIGNALS
from strata.launch.warm.starting import ColdStarter, Starter
from strata.launch.warm.warm_pool import WarmStarter, uses_init
from strata.observe import configure, get_logger
from strata.session.endpoints import Endpoint
from strata.transport.unary import UnaryClient
from strata.v1.members_pb2 import Registration
from strata.v1.worlds_pb2 import JobSpec

log = get_logger()

STDERR: Final = 2
SAY_S: Final = 10.0
"""How often a node says that no coordinator answers, before the first one has."""
RANKS_SOCKET: Final = "ranks.sock"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def run(config: RunConfig, command: Sequence[str]) -> int:
    """Run `run_local_agent`; return once all is passed on that its ranks wrote, and what it says itself."""
    stdout, stderr = consoles(os.environ)
    own, outputs = ConsoleText(stderr), None
    with contextlib.ExitStack() as end:
        if config.tee or (
            config.prefix and config.log_dir is None
        ):  # ranks' threads hold the console as long as they write
            own = PatientText(stderr)
            end.callback(own.close)
            outputs = RankOutputs(stdout, stderr, prefix=config.prefix)
            end.callback(outputs.wait)
        configure(fmt=config.log.format, level=config.log.level, stream=own)
        return asyncio.run(run_local_agent(config, command, outputs))


async def run_local_agent(
    config: RunConfig, command: Sequence[str], outputs: RankOutputs | None = None
) -> int:
    """Return the exit status of `strata run`; raise the `StrataError` that ended its session.

    That is 0, with a warning, when the job was done before this node of the same run came.

    Waits for the first welcome of a coordinator for `config.timeout_s`, after that for coordinators as long as it
    takes; a signal ends that too. If the control plane is restored meanwhile, the node joins again by itself.
    """
    check_command(command)
    if (found := allocation(os.environ)) is not None:
        log.info("run.scheduled", by=found.scheduler, members=found.members, restarts=found.restarts)
        if not config.run_id:
            log.warning("run.unknown", reason=f"{found.scheduler} tells a pod no job's uid", hint=_RUN_HINT)
    sole = not config.job
    config = _named(config, command)
    endpoints = parse_endpoints(config.endpoints, config.credentials)
    worker_id = checked_id("worker", config.worker_id or socket.gethostname())
    job = checked_id("job", config.job)
    devices = await prepare_devices(config.health, job, os.environ)
    config = replace(
        config, run_id=config.run_id or uuid.uuid4().hex
    )  # the same for all members that this node becomes
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    heard = partial(_on_signals, lambda number: None if asked.done() else asked.set_result(number))
    heard()
    await _storage_takes_saves(config, job, endpoints, asked)
    while True:
        try:
            return await _member(
                config, command, worker_id, endpoints, devices, asked, sole=sole, outputs=outputs
            )
        except JobDone as error:  # the others finished without this node: nothing is left to do
            log.warning("job.done_before", reason=error.message, hint=error.hint)
            return 0
        except ClusterRestored as error:
            log.warning("controlplane.restored", reason=error.message, next="this node joins again")
            # the backup may be older than the job's being taken up; and what was begun anew is not begun anew again
            config = replace(config, resume=config.resume or config.new, new=False, timeout_s=0.0)
            heard()


async def _member(
    config: RunConfig,
    command: Sequence[str],
    worker_id: str,
    endpoints: tuple[Endpoint, ...],
    devices: OpenDevices | None,
    asked: asyncio.Future[int],
    *,
    sole: bool,
    outputs: RankOutputs | None,
) -> int:
    """Be one member, with a boot of its own, until the job ends or `asked`; return the exit status.

    `ClusterRestored`: the control plane was restored; the ranks have ended, and another member may follow.
    """
    job = config.job
    registration = Registration(
        job=job,
        worker_id=worker_id,
        boot=uuid.uuid4().hex,
        host=socket.gethostname(),
        slots=config.slots,
        devices=devices.names if devices is not None else (),
        pid=os.getpid(),
        resume=config.resume,
        begin_anew=config.new,
        command=describe(command),
        run_id=config.run_id,
        sole=sole,
        spec=JobSpec(
            min_workers=config.min_workers,
            max_workers=config.max_workers or config.min_workers,
            settle_s=config.settle_s,
            max_no_progress_generations=config.max_no_progress_generations,
            max_generations=config.max_generations,
        ),
    )
    progress = RunProgress(job)
    observer = AgentObserver(on_checkpoint=progress.committed)
    session = MemberSession(
        endpoints, registration, observer, rng=random.Random(), credentials=config.credentials
    )
    agent = Agent(
        AgentConfig(
            job=job,
            worker_id=worker_id,
            endpoints=endpoints,
            shown_endpoints=",".join(config.endpoints),
            address=config.address,
            join_timeout_s=config.join_timeout_s,
            preempt=config.preempt,
            preempt_grace_s=config.preempt_grace_s,
        ),
        session,
    )
    serve_session = asyncio.create_task(session.run(), name="session")
    try:
        with run_folder() as folder:
            if not await _connected(session, serve_session, asked, config):
                return PREEMPTED if asked.result() in PREEMPT_SIGNALS else of_signal(asked.result())
            run = _run(config, command, agent, session, observer, progress, folder, devices, asked, outputs)
            supervise = asyncio.create_task(run, name="supervisor")
            try:
                await asyncio.wait({supervise, serve_session}, return_when=asyncio.FIRST_COMPLETED)
                if not supervise.done() and serve_session.exception() is not None:
                    raise serve_session.exception() or AssertionError
                return await supervise
            finally:
                supervise.cancel()
                await asyncio.gather(supervise, return_exceptions=True)
    finally:
        serve_session.cancel()
        await asyncio.gather(serve_session, return_exceptions=True)


async def _run(
    config: RunConfig,
    command: Sequence[str],
    agent: Agent,
    session: MemberSession,
    observer: AgentObserver,
    progress: RunProgress,
    folder: Path,
    devices: OpenDevices | None,
    asked: asyncio.Future[int],
    outputs: RankOutputs | None,
) -> int:
    assert session.welcome is not None
    await agent.address()  # before a world waits for it
    agent.socket, agent.detect_s = folder / RANKS_SOCKET, session.welcome.detect_s
    local_agent = LocalAgent(
        config,
        _starter(config, command, outputs),
        agent,
        folder=folder,
        will_heed=partial(uses_init, command),
        outputs=outputs,
    )
    async with (
        shown(progress, STDERR, wanted=config.status_line and config.log.format != "json"),
        serving_ranks_of(
            agent,
            session,
            observer,
            local_agent,
            config.health,
            devices=devices,
            listening=Listening(session, progress),
            on_place=lambda place: progress.begin(place.generation if place is not None else 0),
        ),
    ):
        # the first signal is kept: a member that follows this one stops by it, too
        _on_signals(lambda n: local_agent.ask_to_stop(n) if asked.done() else asked.set_result(n))
        asked.add_done_callback(
            lambda first: local_agent.ask_to_stop(first.result())
        )  # also one just on its way
        if session.world is not None:
            local_agent.on_world(session.world)
        return await local_agent.run()


async def _storage_takes_saves(
    config: RunConfig, job: str, endpoints: tuple[Endpoint, ...], asked: asyncio.Future[int]
) -> None:
    """Return once the job's checkpoints can be written, as far as that is known, or somebody asked to stop."""
    unary = UnaryClient(endpoints, random.Random(), config.credentials)
    waiting = asyncio.create_task(
        wait_for_storage(
            unary,
            job=job,
            taken_up=config.resume or config.new,
            say=lambda reason: log.warning("storage.waiting", reason=reason),
            over=lambda reason: log.info("storage.ready", reason=reason),
            limit_s=grace_s(os.environ),
        ),
        name="storage",
    )
    try:
        first: tuple[asyncio.Future[Any], ...] = (waiting, asked)
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await unary.close()


def _starter(config: RunConfig, command: Sequence[str], outputs: RankOutputs | None) -> Starter:
    if not config.warm:
        return ColdStarter(command, outputs)
    inherited = outputs.environment(os.environ) if outputs is not None else os.environ
    warm = WarmStarter.of(command, modules=config.warm_imports, inherited=inherited, outputs=outputs)
    if warm is None and config.warm_imports:
        log.warning("warm.impossible", reason="the command is not `python script.py` or `python -m module`")
    return warm or ColdStarter(command, outputs)


async def _connected(
    session: MemberSession, serve_session: asyncio.Task[None], asked: asyncio.Future[int], config: RunConfig
) -> bool:
    """Return True once a coordinator has welcomed us, False when asked to stop before.

    `Unavailable` after `config.timeout_s`, unless that is 0. It says every `SAY_S` for what it waits.
    """
    connected = asyncio.create_task(session.wait_connected())
    first: tuple[asyncio.Future[Any], ...] = (connected, serve_session, asked)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    left_s = config.timeout_s or math.inf
    where = ", ".join(config.endpoints)
    while not (await asyncio.wait(first, timeout=min(SAY_S, left_s), return_when=asyncio.FIRST_COMPLETED))[0]:
        why = session.last_trouble.message if session.last_trouble is not None else "no answer"
        waited_s = clock() - began_s
        left_s = (config.timeout_s or math.inf) - waited_s
        if left_s <= 0:
            connected.cancel()
            raise Unavailable(
                f"no coordinator at {where} has taken this node in within {config.timeout_s:g} s: {why}",
                hint="check --endpoints and that coordinators run: strata doctor; --timeout-s waits longer (0: for ever)",
            )
        log.warning("coordinators.unreachable", endpoints=where, reason=why, waited_s=round(waited_s))
    if asked.done() and not connected.done():
        connected.cancel()
        return False
    await connected
    return True


def _on_signals(hear: Callable[[int], None]) -> None:
    """Have `hear` called with each signal that stops an agent: as long as nobody runs, the wait for coordinators ends."""
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            asyncio.get_running_loop().add_signal_handler(number, hear, number)


_RUN_HINT = (
    "give STRATA_RUN_ID, from the pod's label batch.kubernetes.io/controller-uid: without it"
    " a pod that comes when the job is done ends with 4, not with 0"
)


def _named(config: RunConfig, command: Sequence[str]) -> RunConfig:
    """Return the configuration with a job's name; `ConfigError` where several nodes would have to guess it."""
    if config.job:
        return config
    if max(config.min_workers, config.max_workers) > 1:
        raise ConfigError("no --job is given, and several nodes need one", hint="give all of them --job NAME")
    name = job_name(command, host=socket.gethostname())
    log.info("job.named", job=name, reason="no --job is given: it is named from this host and its script")
    return replace(config, job=name)

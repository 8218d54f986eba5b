"""`strata run`: connects member session, agent, ranks, console and signals."""

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
from strata.launch.console import ConsoleText, QueuedText, consoles
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
"""How often a node logs that no coordinator answers, until a coordinator has answered."""
RANKS_SOCKET: Final = "ranks.sock"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def run(config: RunConfig, command: Sequence[str]) -> int:
    """Run `run_local_agent`; return once all output of its ranks and its own log lines are passed on."""
    stdout, stderr = consoles(os.environ)
    own, outputs = ConsoleText(stderr), None
    with contextlib.ExitStack() as end:
        if config.tee or (
            config.prefix and config.log_dir is None
        ):  # the threads that pass on ranks' output hold the console while they write
            own = QueuedText(stderr)
            end.callback(own.close)
            outputs = RankOutputs(stdout, stderr, prefix=config.prefix)
            end.callback(outputs.wait)
        configure(fmt=config.log.format, level=config.log.level, stream=own)
        return asyncio.run(run_local_agent(config, command, outputs))


async def run_local_agent(
    config: RunConfig, command: Sequence[str], outputs: RankOutputs | None = None
) -> int:
    """Return the exit status of `strata run`; raise the `StrataError` that ended its session.

    The status is 0, with a warning, if other nodes of the same run had finished the job before this node joined.

    Wait up to `config.timeout_s` for the first welcome of a coordinator. After that, wait for coordinators as long as
    it takes. A signal ends either wait. If the control plane is restored meanwhile, the node joins again by itself.
    """
    check_command(command)
    if (found := allocation(os.environ)) is not None:
        log.info("run.scheduled", by=found.scheduler, members=found.members, restarts=found.restarts)
        if not config.run_id:
            log.warning("run.unknown", reason=f"{found.scheduler} gives a pod no job uid", hint=_RUN_HINT)
    sole = not config.job
    config = _named(config, command)
    endpoints = parse_endpoints(config.endpoints, config.credentials)
    worker_id = checked_id("worker", config.worker_id or socket.gethostname())
    job = checked_id("job", config.job)
    devices = await prepare_devices(config.health, job, os.environ)
    config = replace(
        config, run_id=config.run_id or uuid.uuid4().hex
    )  # the same for all members that this node becomes, one after the other
    stop_signal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    install_signals = partial(
        _on_signals, lambda number: None if stop_signal.done() else stop_signal.set_result(number)
    )
    install_signals()
    await _storage_takes_saves(config, job, endpoints, stop_signal)
    while True:
        try:
            return await _member(
                config, command, worker_id, endpoints, devices, stop_signal, sole=sole, outputs=outputs
            )
        except JobDone as error:  # the others finished without this node: nothing is left to do
            log.warning("job.done_before", reason=error.message, hint=error.hint)
            return 0
        except ClusterRestored as error:
            log.warning("controlplane.restored", reason=error.message, next="this node joins again")
            # the restored backup may be older than the job's resumption: resume again, but do not reset the job twice
            config = replace(config, resume=config.resume or config.new, new=False, timeout_s=0.0)
            install_signals()


async def _member(
    config: RunConfig,
    command: Sequence[str],
    worker_id: str,
    endpoints: tuple[Endpoint, ...],
    devices: OpenDevices | None,
    stop_signal: asyncio.Future[int],
    *,
    sole: bool,
    outputs: RankOutputs | None,
) -> int:
    """Run as one member, with a boot id of its own, until the job ends or a signal arrives; return the exit status.

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
            if not await _connected(session, serve_session, stop_signal, config):
                return (
                    PREEMPTED if stop_signal.result() in PREEMPT_SIGNALS else of_signal(stop_signal.result())
                )
            run = _run(
                config, command, agent, session, observer, progress, folder, devices, stop_signal, outputs
            )
            agent_task = asyncio.create_task(run, name="agent")
            try:
                await asyncio.wait({agent_task, serve_session}, return_when=asyncio.FIRST_COMPLETED)
                if not agent_task.done() and serve_session.exception() is not None:
                    raise serve_session.exception() or AssertionError
                return await agent_task
            finally:
                agent_task.cancel()
                await asyncio.gather(agent_task, return_exceptions=True)
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
    stop_signal: asyncio.Future[int],
    outputs: RankOutputs | None,
) -> int:
    assert session.welcome is not None
    await agent.address()  # looked up early: no world waits for it yet
    agent.socket, agent.detect_s = folder / RANKS_SOCKET, session.welcome.detect_s
    local_agent = LocalAgent(
        config,
        _starter(config, command, outputs),
        agent,
        folder=folder,
        wait_graceful_stop_support=partial(uses_init, command),
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
        # the first signal stays set: a member that follows this one must stop too
        _on_signals(
            lambda n: local_agent.request_stop(n) if stop_signal.done() else stop_signal.set_result(n)
        )
        stop_signal.add_done_callback(
            lambda first: local_agent.request_stop(first.result())
        )  # in case the first signal arrived just before
        if session.world is not None:
            local_agent.on_world(session.world)
        return await local_agent.run()


async def _storage_takes_saves(
    config: RunConfig, job: str, endpoints: tuple[Endpoint, ...], stop_signal: asyncio.Future[int]
) -> None:
    """Return once the job's checkpoints can be written, the wait is over for another reason, or a signal arrived."""
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
        first: tuple[asyncio.Future[Any], ...] = (waiting, stop_signal)
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
    session: MemberSession,
    serve_session: asyncio.Task[None],
    stop_signal: asyncio.Future[int],
    config: RunConfig,
) -> bool:
    """Return True once a coordinator has welcomed this member, False if a signal arrives earlier.

    `Unavailable` after `config.timeout_s`, unless that is 0. Log the reason of the wait every `SAY_S`.
    """
    connected = asyncio.create_task(session.wait_connected())
    first: tuple[asyncio.Future[Any], ...] = (connected, serve_session, stop_signal)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    left_s = config.timeout_s or math.inf
    where = ", ".join(config.endpoints)
    while not (await asyncio.wait(first, timeout=min(SAY_S, left_s), return_when=asyncio.FIRST_COMPLETED))[0]:
        why = session.last_error.message if session.last_error is not None else "no answer"
        waited_s = clock() - began_s
        left_s = (config.timeout_s or math.inf) - waited_s
        if left_s <= 0:
            connected.cancel()
            raise Unavailable(
                f"no coordinator at {where} has accepted this node within {config.timeout_s:g} s: {why}",
                hint="check --endpoints and that coordinators run: strata doctor; --timeout-s waits longer (0: for ever)",
            )
        log.warning("coordinators.unreachable", endpoints=where, reason=why, waited_s=round(waited_s))
    if stop_signal.done() and not connected.done():
        connected.cancel()
        return False
    await connected
    return True


def _on_signals(on_signal: Callable[[int], None]) -> None:
    """Call `on_signal` with each signal that stops an agent, or ends its wait for coordinators before a member runs."""
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


_RUN_HINT = (
    "set STRATA_RUN_ID from the pod's label batch.kubernetes.io/controller-uid: without it"
    " a pod that starts after the job is done exits with 4, not with 0"
)


def _named(config: RunConfig, command: Sequence[str]) -> RunConfig:
    """Return the configuration with a job's name; `ConfigError` if several nodes would have to guess the name."""
    if config.job:
        return config
    if max(config.min_workers, config.max_workers) > 1:
        raise ConfigError("no --job is given, and several nodes need one", hint="pass --job NAME on each")
    name = job_name(command, host=socket.gethostname())
    log.info("job.named", job=name, reason="no --job is given: it is named from this host and its script")
    return replace(config, job=name)

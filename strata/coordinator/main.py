"""`strata coordinator`: a replica as a process, with real clocks, randomness, signals and etcd."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime as dt
import faulthandler
import gc
import os
import random
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Final

import strata
from strata.config import CoordinatorConfig, split_address
from strata.coordinator.access.admission import own_identity
from strata.coordinator.access.descriptors import raise_limit
from strata.coordinator.etcd.access import check_versions, connected, member_statuses
from strata.coordinator.leadership.probe import tcp_probe
from strata.coordinator.replica import PageFactory, Replica, ResourceFactory
from strata.coordinator.rpc.server import Dialer, Server
from strata.coordinator.service_manager import ServiceManager, reporting_readiness
from strata.coordinator.suspended import Suspended, SuspendedPage
from strata.core.access.authority import Identity
from strata.core.ids import checked_id
from strata.core.timing import Timing
from strata.errors import ClusterReplaced, ConfigError, InvalidArgument
from strata.etcd import EtcdStore
from strata.observe import configure, get_logger

log = get_logger()

M_ARENA_MAX: Final = -8
ARENAS: Final = 2
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def serve(
    config: CoordinatorConfig,
    page: PageFactory | None = None,
    resources: ResourceFactory | None = None,
    suspended_page: SuspendedPage | None = None,
) -> None:
    """Run `run_coordinator` on uvloop if it is installed, else on asyncio's own event loop."""
    _bound_arenas()  # must run before a second thread starts
    faulthandler.enable()  # a watchdog's SIGABRT leaves the stacks in the log
    with contextlib.suppress(OSError):  # some containers forbid it; it is only an optimisation
        # barrier arrivals come in bursts: with fewer preemptions, a burst is served sooner
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_coordinator(config, page, resources, suspended_page))


async def run_coordinator(
    config: CoordinatorConfig,
    page: PageFactory | None = None,
    resources: ResourceFactory | None = None,
    suspended_page: SuspendedPage | None = None,
) -> None:
    """Run one replica until SIGTERM or SIGINT, then shut down cleanly.

    `page` makes the replica's HTTP server, and `resources` the reader of the HTTP API's resources over gRPC.
    `suspended_page` makes the HTTP server while etcd does not contain the cluster that the replica served. During
    that time the replica serves nobody; it resumes once its cluster is back.

    `ConfigError`: the port is taken, a name is invalid, or this etcd cannot be used. `Unavailable`: no etcd
    member answered within `etcd.wait_s`. `Conflict`: another replica has the name. From its first log line on,
    this function handles both signals. After this function has returned, both are ignored: the process must then
    exit with its own exit code.
    """
    configure(fmt=config.log.format, level=config.log.level)
    raise_limit()
    name = replica_name(config, own_identity(config, now=lambda: dt.datetime.now(dt.UTC)))
    Timing.derive(config.detect_s)  # reject a wrong value before waiting for etcd
    task = asyncio.current_task()
    assert task is not None
    stop: Callable[[], object] = task.cancel  # replaced by the replica's `stop` once there is a replica
    # installed before the first log line: a reader of the log may send a signal as soon as it sees that line
    with _on_signals(lambda: stop()) as signalled:  # noqa: PLW0108  # `stop` is replaced later
        log.info("coordinator_starts", replica=name, listen=config.listen, etcd=config.etcd.endpoints)
        is_ready: Callable[[], tuple[bool, str]] = lambda: (False, "it connects to etcd")  # noqa: E731 # replaced later
        try:
            with reporting_readiness(ServiceManager.of(os.environ, pid=os.getpid()), lambda: is_ready()):  # noqa: PLW0108 # replaced later
                uid = ""
                while not signalled:
                    async with connected(config.etcd) as store, connected(config.etcd) as renewals:
                        await check_versions(store)
                        replica = _replica(config, name, store, renewals, page, resources, uid=uid)
                        gc.freeze()  # objects that exist now live as long as the process
                        stop, is_ready = replica.stop, replica.is_ready
                        try:
                            await replica.run()
                            break
                        except ClusterReplaced as error:
                            if not replica.context.mirror.uid:
                                raise  # this replica has served no cluster that could come back
                            suspended = _suspended(config, replica, error, suspended_page)
                    stop, is_ready = suspended.stop, suspended.is_ready
                    del replica
                    gc.unfreeze()  # otherwise the replica's objects would stay until the process exits
                    uid = "" if signalled else await suspended.run()
                    if not uid:
                        break
                    stop = task.cancel
        except asyncio.CancelledError:
            if not signalled:
                raise
        log.info("coordinator_ended", replica=name)


def _replica(
    config: CoordinatorConfig,
    name: str,
    store: EtcdStore,
    renewals: EtcdStore,
    page: PageFactory | None,
    resources: ResourceFactory | None,
    *,
    uid: str,
) -> Replica:
    return Replica(
        config,
        store,
        Server,
        Dialer(config, Timing.derive(config.detect_s)),
        replica=name,
        instance=uuid.uuid4().hex,
        new_uid=uuid.uuid4().hex,
        uid=uid,
        clock=_boot_time,
        unix_now=time.time,
        rng=random.Random(),
        renewals=renewals,
        ask_members=lambda: member_statuses(store),
        probe=tcp_probe,
        version=strata.__version__,
        page=page,
        resources=resources,
    )


def _suspended(
    config: CoordinatorConfig, replica: Replica, error: ClusterReplaced, page: SuspendedPage | None
) -> Suspended:
    mirror = replica.context.mirror
    since = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M:%SZ}"
    return Suspended(config, error, uid=mirror.uid, revision=replica.revision, since=since, page=page)


def replica_name(config: CoordinatorConfig, identity: Identity | None) -> str:
    """Return the replica's name, after checking all names that become parts of keys.

    Without a name in the configuration, use the certificate's name, else a name made of host and port.
    """
    _, port = split_address("coordinator.listen", config.listen)
    given = config.replica or (identity.id if identity is not None else "")
    if not given and port == 0:
        raise ConfigError("a replica on a random port needs a name", hint="pass --replica")
    try:
        checked_id("cluster", config.cluster)
        return checked_id("replica", given or f"{socket.gethostname()}-{port}")
    except InvalidArgument as error:
        raise ConfigError(error.message, hint=error.hint) from None


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _bound_arenas() -> None:
    """Limit glibc to two heaps instead of eight a core, so that bursts reuse freed memory (ADR 0047)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no mallopt
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415  # of the server extra, on platforms that have a wheel for it
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


@contextlib.contextmanager
def _on_signals(act: Callable[[], object]) -> Iterator[list[int]]:
    """Call `act` at the first signal while the body runs; yield the list of signals received.

    After the body both signals are ignored. The loop's `add_signal_handler` is not used: on exit it restores the
    default action, so that a second Ctrl-C would kill a process that is already shutting down.
    """
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def handle(number: int) -> None:
        received.append(number)
        if len(received) == 1:  # a second signal must not cut short the shutdown that the first began
            log.info("signalled", signal=signal.Signals(number).name)
            act()

    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: loop.call_soon_threadsafe(handle, number))
    try:
        yield received
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

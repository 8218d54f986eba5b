"""The agent of a standalone process: a child of that process, and a member of its job with one rank.

    process ── socket pair, framed protobuf ──▶ this agent ── gRPC ──▶ replica

The process's session is the member's: its Hello has the registration, and what it says goes up as it is, so that
every error comes out there as the coordinators gave it. PROTOCOLS 5.7 has the rules:

1. The agent has a session (setsid) of its own and ignores INT, TERM, HUP, USR1 and USR2: who stops the process stops no agent.
2. It ends with the process, which it watches by a pidfd; it leaves the job first, for at most `LAST_S`.
3. The socket ended and the process lives on (it executed another program, or closed its descriptors): the member leaves.
4. A frozen process, and one that dumps core, is found as `agent.health.liveness` does. Its member leaves.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strata.agent.forwarding import Carrier
from strata.agent.health.stack_request import process_state
from strata.agent.rank_process import RankProcess, peer_of
from strata.agent.storage_wait import Say, grace_s, wait_for_storage
from strata.client.member_session import MemberSession
from strata.client.rank.standalone import SPARED
from strata.config import Credentials, HealthConfig, load
from strata.config.health import REPORT
from strata.core.timing import Timing
from strata.errors import StaleIncarnation, StrataError, Unavailable
from strata.observe import configure, get_logger
from strata.session.client_session import LEAVE_S
from strata.session.endpoints import Endpoint, parse_endpoints
from strata.session.framed import FramedLink, newest_down
from strata.session.link import Link
from strata.session.served import End, Session, serve
from strata.transport.unary import UnaryClient
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import (
    AgentStart,
    Done,
    Down,
    Hello,
    Inspect,
    Leave,
    Outcomes,
    Progress,
    RankExit,
    Reply,
    Tick,
    Up,
    Welcome,
    WorldUpdate,
)
from strata.wire.errors import pack

if TYPE_CHECKING:
    from strata.agent.health.rank_watch import Health

log = get_logger()

LAST_S: Final = 0.75
"""How long a member leaves whose process has ended: the agent ends within 1 s of it."""
UNWATCHED_S: Final = 1.0
"""How long after the first welcome the process is not watched."""
STACK_S: Final = 2.0
"""How long the process has to say where its threads are."""


class StandaloneAgent(Carrier):
    """Carries between one process and the coordinators: `served.Handler` below, `SessionObserver` above.

    `session` and `upstream` are there once the process has said Hello.
    """

    upstream: MemberSession

    def __init__(self, start: AgentStart, process: RankProcess) -> None:
        self._start = start
        self._process = process
        self._credentials = _credentials(start)
        self._timing = Timing.derive(start.detect_s)
        self._running: asyncio.Task[None] | None = None
        self._registers = False
        self._health: Health | None = None
        self._watching: asyncio.Task[None] | None = None
        self._generation = 0
        self._stack: asyncio.Future[str] | None = None
        self._lost = ""
        """Why the process counts as lost though it lives."""

    async def run(self, link: Link[Up, Down], gone: asyncio.Event) -> None:
        """Carry for the process at the other end of `link`, until it leaves, or ends, which sets `gone`."""
        ended = asyncio.create_task(gone.wait())
        serving = asyncio.create_task(serve(link, self.accept), name="process")
        await asyncio.wait((ended, serving), return_when=asyncio.FIRST_COMPLETED)
        leaving = asyncio.create_task(self.leave_job())
        await asyncio.wait((ended, leaving), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            _let_go_of_output()
            await asyncio.wait((leaving,), timeout=LAST_S)
        ended.cancel()

    async def accept(self, hello: Hello, session: Session) -> StandaloneAgent:
        """Begin to become a member as the Hello says. It is welcome once a coordinator serves it."""
        self.session = session
        self._config = replace(
            load(HealthConfig, env=os.environ), on_stall=REPORT
        )  # nobody could start it again
        endpoints = parse_endpoints(list(self._start.endpoints), self._credentials)
        self.upstream = MemberSession(
            endpoints,
            hello.member,
            self,
            rng=random.Random(),
            timing=self._timing,
            credentials=self._credentials,
        )
        self.upstream.on_request = session.send
        self._running = asyncio.create_task(self._be_member(hello.member, endpoints), name="session")
        self._running.add_done_callback(self._over)
        return self

    async def _be_member(self, member: Registration, endpoints: tuple[Endpoint, ...]) -> None:
        if member.cannot_restart:  # it trains by strata.init, which saves
            unary = UnaryClient(endpoints, random.Random(), self._credentials)
            await _storage_takes_saves(member.job, unary, self._say_storage)
        self._registers = True
        await self.upstream.run()

    def _say_storage(self, reason: str) -> None:
        """Tell the process; it has reached a coordinator, so it need not try any longer."""
        self.session.send(Down(welcome=Welcome()))
        self.on_disconnected(Unavailable(reason, hint=""))

    async def leave_job(self, reason: str = "") -> None:
        """Leave the job, if this is still its member; return once that is known, or after `LEAVE_S`."""
        if self._watching is not None:
            self._watching.cancel()
        if self._registers:
            reason = reason or self._lost or f"process {self._process.pid} ended without a farewell"
            await self.upstream.leave(reason, limit_s=LEAVE_S)
        elif self._running is not None:
            self._running.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        """Let the process have the error that ended a task which it cannot be without."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, StrataError):
            log.error("agent_failed", exc_info=error)
            error = StrataError(f"the agent of this process failed: {error!r}", hint="please report it")
        self.session.end(error)

    # -- what the coordinators say

    def on_connected(self, welcome: Welcome) -> None:
        self.session.send(Down(welcome=welcome))
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(welcome.detect_s), name="watch")
            self._watching.add_done_callback(self._over)

    async def _watch(self, detect_s: float) -> None:
        """Watch the process and its progress; a moment later, for the imports would hold up its start."""
        await asyncio.sleep(UNWATCHED_S)
        from strata.agent.health.liveness import Liveness  # noqa: PLC0415
        from strata.agent.health.rank_watch import Health  # noqa: PLC0415

        self._health = Health(self._config, self.upstream, self, detect_s=detect_s)
        liveness = Liveness(detect_s=detect_s, on_frozen=self.evict, on_core_dump=self.evict)
        liveness.watch(0, 0, self._process)
        async with liveness.watching(), self._health.watching():
            await asyncio.get_running_loop().create_future()

    def on_disconnected(self, reason: StrataError) -> None:
        self.session.send(Down(disconnected=pack(reason)))

    def on_world(self, update: WorldUpdate) -> None:
        self.session.send(Down(world=update))

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        self.session.send(Down(outcomes=Outcomes(outcomes=[outcome])))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.session.send(Down(checkpoint=checkpoint))

    # -- what the process says

    def progress(self, progress: Progress) -> None:
        for evidence in progress.evidence:
            if self._stack is not None and not self._stack.done():
                self._stack.set_result(evidence.stack)
            self.upstream.evidence(progress.generation, evidence)
        if not progress.ranks:
            return
        if self._health is None:
            self.upstream.progress(progress.generation, progress.ranks)
            return
        if progress.generation > self._generation:
            self._generation = progress.generation
            self._health.stalls.watch(self._generation)
        self._health.stalls.hear(progress.generation, progress.ranks)

    async def rank_exit(self, rank_exit: RankExit) -> Reply:
        await self.upstream.rank_exit(
            generation=rank_exit.generation,
            rank=rank_exit.rank,
            code=rank_exit.code,
            reason=rank_exit.reason,
            early=rank_exit.early,
        )
        return Reply(token=self.upstream.token, done=Done())

    async def leave(self, leave: Leave) -> None:
        await self.leave_job(leave.reason)

    def tick(self, sequence: int) -> Tick:
        return Tick(sequence=sequence, ready=True)

    def ended(self, end: End) -> None:
        pass  # `run` looks at the socket and at the process

    # -- the watch over the process (`health.Ranks`)

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """Leave the job: what the process says from now on counts no more."""
        self._lost = reason
        self.session.end(
            StaleIncarnation(f"this process was given up: {reason}", hint="start the program again")
        )

    async def stack(self, rank: int) -> str | None:
        """Return where the process's threads are, as it says; None when it does not answer."""
        self._stack = asyncio.get_running_loop().create_future()
        self.session.send(Down(inspect=Inspect(generation=self._generation, rank=rank)))
        try:
            return await asyncio.wait_for(self._stack, STACK_S) or None
        except TimeoutError:
            return None

    def process(self, rank: int) -> str:
        """Return the state of the process."""
        return process_state(self._process.pid)


async def _storage_takes_saves(job: str, unary: UnaryClient, say: Say) -> None:
    try:
        await wait_for_storage(
            unary, job=job, taken_up=False, say=say, over=log.info, limit_s=grace_s(os.environ)
        )
    finally:
        await unary.close()


def _credentials(start: AgentStart) -> Credentials:
    def path(name: str) -> Path | None:
        return Path(name) if name else None

    return Credentials(
        ca_file=path(start.ca_file),
        cert_file=path(start.cert_file),
        key_file=path(start.key_file),
        token_file=path(start.token_file),
        insecure=start.insecure,
    )


async def run(sock: socket.socket) -> None:
    """Be the agent of the process that has the other end of `sock`, until it leaves or ends."""
    _transport, link = await asyncio.get_running_loop().create_unix_connection(
        lambda: FramedLink[Up, Down](Up, newest_down), sock=sock
    )
    try:
        process = peer_of(sock)
    except StrataError as error:
        link.close(error)
        await link.gone()
        return
    with process:
        if os.getppid() != process.pid:  # it ended before it could be watched
            return
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.fileno(), gone.set)
        first, ended = asyncio.ensure_future(link.take()), asyncio.ensure_future(gone.wait())
        await asyncio.wait((first, ended), return_when=asyncio.FIRST_COMPLETED)
        if ended.done() or (start := first.result()) is None:
            return
        await StandaloneAgent(AgentStart.FromString(start), process).run(link, gone)
        if not gone.is_set():
            await link.gone()


def _let_go_of_output() -> None:
    """Close what the process's own parent may wait for the end of."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)


def main(descriptor: int) -> None:
    """Run the agent at this end of the socket pair, in a process of its own."""
    for number in SPARED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    configure(fmt="plain", level="warning")
    asyncio.new_event_loop().run_until_complete(run(socket.socket(fileno=descriptor)))
    os._exit(0)  # threads that resolve names, or write to a storage, are not waited for

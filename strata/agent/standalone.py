"""The agent of a standalone process: a child of that process, and a member of its job with one rank.

    process ── socket pair, framed protobuf ──▶ this agent ── gRPC ──▶ replica

The process's session becomes the member's session: the process's Hello contains the member's registration, and the
agent forwards all messages unchanged. So the process gets every error as the coordinators returned it. PROTOCOLS 5.7
has the rules:

1. The agent has a session (setsid) of its own and ignores INT, TERM, HUP, USR1 and USR2: a signal to the process's
   group does not stop the agent.
2. The agent watches the process by a pidfd. When the process ends, the agent leaves the job within `LAST_S`, and ends.
3. If the socket ends and the process lives on (after an exec, or with its descriptors closed), the member leaves.
4. `agent.health.liveness` detects a process that is frozen or dumps core. Its member leaves.
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
"""How long a member may take to leave after its process has ended: the agent ends within 1 s of the process."""
UNWATCHED_S: Final = 1.0
"""How long after the first welcome the watch over the process starts."""
STACK_S: Final = 2.0
"""How long the process has to answer a request for its stacks."""


class StandaloneAgent(Carrier):
    """Carries messages between one process (as a `served.Handler`) and the coordinators (as a `SessionObserver`).

    `session` and `upstream` are set once the process has sent its Hello.
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
        """Why the process counts as lost although it lives."""

    async def run(self, link: Link[Up, Down], process_ended: asyncio.Event) -> None:
        """Carry messages for the process at the other end of `link` until it leaves or `process_ended` is set."""
        ended = asyncio.create_task(process_ended.wait())
        serving = asyncio.create_task(serve(link, self.accept), name="process")
        await asyncio.wait((ended, serving), return_when=asyncio.FIRST_COMPLETED)
        leaving = asyncio.create_task(self.leave_job())
        await asyncio.wait((ended, leaving), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            _release_output()
            await asyncio.wait((leaving,), timeout=LAST_S)
        ended.cancel()

    async def accept(self, hello: Hello, session: Session) -> StandaloneAgent:
        """Start the member that the Hello registers; a coordinator's first welcome is sent on to the process."""
        self.session = session
        self._config = replace(
            load(HealthConfig, env=os.environ), on_stall=REPORT
        )  # not EVICT: no launcher could start it again
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
        self._running.add_done_callback(self._task_ended)
        return self

    async def _be_member(self, member: Registration, endpoints: tuple[Endpoint, ...]) -> None:
        if member.cannot_restart:  # this process trains with strata.init, which saves checkpoints
            unary = UnaryClient(endpoints, random.Random(), self._credentials)
            await _storage_takes_saves(member.job, unary, self._report_storage_wait)
        self._registers = True
        await self.upstream.run()

    def _report_storage_wait(self, reason: str) -> None:
        """Report the wait to the process, after a welcome that ends the process's own search for a coordinator."""
        self.session.send(Down(welcome=Welcome()))
        self.on_disconnected(Unavailable(reason, hint=""))

    async def leave_job(self, reason: str = "") -> None:
        """Leave the job if still its member; return once the departure is confirmed, or after `LEAVE_S`."""
        if self._watching is not None:
            self._watching.cancel()
        if self._registers:
            reason = reason or self._lost or f"process {self._process.pid} ended without leaving the job"
            await self.upstream.leave(reason, limit_s=LEAVE_S)
        elif self._running is not None:
            self._running.cancel()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """End the process's session with the error of an ended task on which the session depends."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, StrataError):
            log.error("agent_failed", exc_info=error)
            error = StrataError(f"the agent of this process failed: {error!r}", hint="please report it")
        self.session.end(error)

    # -- from the coordinators

    def on_connected(self, welcome: Welcome) -> None:
        self.session.send(Down(welcome=welcome))
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(welcome.detect_s), name="watch")
            self._watching.add_done_callback(self._task_ended)

    async def _watch(self, detect_s: float) -> None:
        """Watch the process and its progress, after a delay: these imports would slow down the process's start."""
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

    # -- from the process

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
        self._health.stalls.on_progress(progress.generation, progress.ranks)

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

    # -- the watch over the process (`rank_watch.Ranks`)

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """Leave the job: later messages of the process do not count."""
        self._lost = reason
        self.session.end(
            StaleIncarnation(
                f"this process was removed from the job: {reason}", hint="start the program again"
            )
        )

    async def stack(self, rank: int) -> str | None:
        """Return the stacks of the process's threads; None if it does not answer."""
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
    """Run as the agent of the process at the other end of `sock`, until that process leaves or ends."""
    _transport, link = await asyncio.get_running_loop().create_unix_connection(
        lambda: FramedLink[Up, Down](Up, newest_down), sock=sock
    )
    try:
        process = peer_of(sock)
    except StrataError as error:
        link.close(error)
        await link.wait_closed()
        return
    with process:
        if os.getppid() != process.pid:  # it ended before it could be watched
            return
        process_ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.fileno(), process_ended.set)
        first, ended = asyncio.ensure_future(link.take()), asyncio.ensure_future(process_ended.wait())
        await asyncio.wait((first, ended), return_when=asyncio.FIRST_COMPLETED)
        if ended.done() or (start := first.result()) is None:
            return
        await StandaloneAgent(AgentStart.FromString(start), process).run(link, process_ended)
        if not process_ended.is_set():
            await link.wait_closed()


def _release_output() -> None:
    """Close stdout and stderr: the parent of the ended process may wait for their end of file."""
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
    os._exit(0)  # do not wait for threads that resolve names or write to a storage

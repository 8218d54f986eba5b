"""The client side of a session, which continues over any number of connections and replicas.

A session is not bound to one connection: it ensures that the other side receives every message that still matters.
The client side keeps everything that is open (arrivals, calls, rank exits, the newest progress), and sends all of
it again to every replica that takes the session over. So a caller never notices that a replica died.

Only four events end a session: `leave`, the other side's `Ended`, a restore of the control plane, and a refusal
that every replica would repeat. A different etcd cluster behind the endpoints ends no session: etcd may have
lost its data, and an operator may restore the data.

A session runs in one event loop, on a `Link`. Only `strata.transport.channel` knows grpc. `MemberSession` and
`RankSession` differ in the Hello they send.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any, Final

from google.protobuf.message import Message

from strata import errors
from strata.core.barriers.arrivals import MAX_TIME_MS
from strata.errors import StaleIncarnation, StrataError, Unavailable
from strata.session.endpoints import Endpoint, Route
from strata.session.failover import Failover, Found
from strata.session.link import MAX_MESSAGE_BYTES, Link
from strata.session.pending_requests import OpenArrivals, OpenCalls, RoundKey
from strata.session.terms import Dial, Pace, SessionObserver, aged, another_cluster, is_final
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome
from strata.v1.common_pb2 import Token
from strata.v1.members_pb2 import DeviceStatus, RankEvidence, RankProgress
from strata.v1.session_pb2 import (
    Arrivals,
    Call,
    Done,
    Down,
    Hello,
    Leave,
    Progress,
    RankExit,
    Reply,
    Tick,
    Up,
    Welcome,
    WorldUpdate,
)
from strata.wire.errors import unpack

LEAVE_S: Final = 5.0

_REQUEST_FIELD: Final[dict[type[Message], str]] = {
    type(getattr(Call(), field.name)): field.name
    for field in Call.DESCRIPTOR.oneofs_by_name["request"].fields
}


class _Leaving(Exception):
    """Raised when the other side has confirmed that this session left; this is not an error."""


class Session:
    """A session over any endpoint of `route` that serves the session.

    `introduce` makes the Hello from the newest known token and incarnation. Run `run` as a task. Every other
    method may be called before `run` or during it, connected or not.
    """

    def __init__(
        self,
        *,
        introduce: Callable[[Token, int], Hello],
        route: Route,
        dial: Dial,
        observer: SessionObserver,
        pace: Pace | None = None,
    ) -> None:
        self._introduce = introduce
        self._route = route
        self._dial = dial
        self._observer = observer
        self._pace = pace or Pace()
        self._ids = itertools.count(1)
        self._arrivals = OpenArrivals()
        self._calls = OpenCalls()
        self._progress: dict[int, tuple[RankProgress, float]] = {}
        self._progress_generation = 0
        self._devices: tuple[DeviceStatus, ...] = ()
        self._devices_unsent = False
        self._link: Link[Down, Up] | None = None
        self._connected = asyncio.Event()
        """Set while a replica serves the session, and when the session ends; wakes the callers of `wait_connected`."""
        self._ended = asyncio.Event()
        self._flushing: set[str] = set()
        self._leaving: Leave | None = None
        self._ready_elsewhere: tuple[str, ...] = ()
        self._silence_s = 0.0
        self._failover = Failover(route, dial, self._hello, unready_s=self._pace.unready_s)
        self.error: StrataError | None = None
        """The error that ended the session permanently; None while the session goes on, or after an orderly
        leave."""
        self.last_error: StrataError | None = None
        """The error of the last failed connection, try or call attempt; None after a success."""
        self.token = Token()
        self.incarnation = 0
        self.welcome: Welcome | None = None
        self.world: WorldUpdate | None = None
        self.on_request: Callable[[Down], None] | None = None
        """Called, like the observer, with this rank's place in a newer generation or a request to inspect a rank."""

    # -- for every caller

    @property
    def connected(self) -> bool:
        """Whether a replica has welcomed the session and the stream is still open."""
        return self._connected.is_set() and not self._ended.is_set()

    async def wait_connected(self) -> None:
        """Return once connected; raise the error that ended the session."""
        self._check_open()
        await self._connected.wait()
        self._check_open()

    def arrive(self, arrival: Arrival) -> asyncio.Future[BarrierOutcome]:
        """Arrive at a round and return the future of its outcome.

        The future ends in one of four ways: with the outcome, whatever its result; with the error that refused
        this arrival; with `StaleGeneration` once a newer world is known; or with the error that ended the
        session. Cancelling the future does not withdraw the arrival. Arriving again returns the same future.
        """
        self._check_open()
        if self.world is not None and arrival.generation < self.world.world.generation:
            raise errors.StaleGeneration(
                f"barrier {arrival.name!r} is of generation {arrival.generation},"
                f" the world is at generation {self.world.world.generation}: {self.world.world.reason}"
            )
        size = self.world.world.size if self.world is not None else 0
        outcome = self._arrivals.add(arrival, self._now(), size)
        self._flush_soon("arrivals", self._pace.coalesce_s, self._flush_arrivals)
        return outcome

    async def call(self, request: Message, *, timeout_s: float | None = 30.0) -> Any:
        """Return the response to `request`, one of the messages that `Call` takes.

        The request is sent again after a reconnect, so it must be idempotent; all messages that `Call` takes
        are. Raise `Unavailable` after `timeout_s`; the request may have taken effect.
        """
        field = _REQUEST_FIELD.get(type(request))
        if field is None:
            raise errors.InvalidArgument(f"a session carries no {type(request).__name__}")
        up = Up(call=Call(id=(id_ := next(self._ids)), **{field: request}))  # type: ignore[arg-type]  # a oneof's name
        return await self._request(id_, up, field, timeout_s)

    async def rank_exit(
        self, *, generation: int, rank: int, code: int, reason: str = "", early: bool = False
    ) -> None:
        """Report that a rank's process ended; return once the report is durable.

        `early`: the process failed by itself within its first seconds, before its first step. The report is
        repeated over any number of replicas until it is durable or the session is over.
        """
        id_ = next(self._ids)
        exit_ = RankExit(generation=generation, rank=rank, code=code, reason=reason, id=id_, early=early)
        up = Up(rank_exit=exit_)
        await self._request(id_, up, f"the exit of rank {rank}", None)

    def progress(self, generation: int, ranks: Iterable[RankProgress]) -> None:
        """Report the progress of ranks; the newest report of each rank is sent soon, and again after a reconnect."""
        if generation != self._progress_generation:
            self._progress.clear()
            self._progress_generation = generation
        now = self._now()
        for one in ranks:
            age_ms = min(max(0, one.age_ms), MAX_TIME_MS)
            self._progress[one.rank] = (one, now - age_ms / 1000)
        self._flush_soon("progress", self._pace.progress_s, self._flush_progress)

    def evidence(self, generation: int, evidence: RankEvidence) -> None:
        """Send the evidence of a rank that is being inspected; the other side requests lost evidence again."""
        if self._link is not None and self.connected:
            self._link.send(Up(progress=Progress(generation=generation, evidence=[evidence])))

    def devices(self, devices: Iterable[DeviceStatus]) -> None:
        """Report the state of this member's accelerators; sent soon, and again after a reconnect."""
        self._devices = tuple(devices)
        self._devices_unsent = True
        self._flush_soon("progress", self._pace.progress_s, self._flush_progress)

    async def leave(self, reason: str = "", *, limit_s: float = LEAVE_S) -> None:
        """Send the newest progress and leave permanently; return once the other side has confirmed the leave,
        or after `limit_s`.

        `run` then returns. Calls and arrivals that are still open end with `Unavailable`.
        """
        if self._ended.is_set():
            return
        self._flush_progress()  # so that the other side knows the ranks' progress when it examines their exits
        self._leaving = Leave(reason=reason)
        if self._link is not None and self.connected:
            self._link.send(Up(leave=self._leaving))
        try:
            async with asyncio.timeout(limit_s):
                await self._ended.wait()
        except TimeoutError:
            self._finish(None)
            if self._link is not None:
                self._link.close()

    # -- the connection

    async def run(self) -> None:
        """Serve the session until `leave`; raise the error that ends the session before that."""
        began = self._now()
        try:
            while not self._ended.is_set():
                if (found := self._failover.take()) is not None:
                    await self._visit(found.endpoint, found)
                    continue
                endpoint, delay_s = self._route.next(took_s=self._now() - began)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._ended.wait()
                        break
                began = self._now()
                await self._visit(endpoint, None)
            if self.error is not None:
                raise self.error
        finally:
            self._finish(self.error)
            await self._failover.end()

    async def _visit(self, endpoint: Endpoint, found: Found | None) -> None:
        """Let `endpoint` serve the session until the connection ends, and record why the connection ended."""
        reason: StrataError
        try:
            if found is not None:
                async with found.stack:
                    await self._converse(found.link, found.welcome)
            else:
                async with AsyncExitStack() as stack:
                    await self._converse(await self._dial_within_limit(endpoint, stack))
            reason = Unavailable(f"{endpoint} ended the stream")
        except _Leaving:
            self._finish(None)
            return
        except StrataError as error:
            reason = error
            if is_final(error, welcomed=self.welcome is not None):
                self._finish(error)
        finally:
            self._link = None
            self._connected.clear()
            self._failover.lost()
            self._arrivals.disconnected()
            self._calls.disconnected()
        self.last_error = reason
        if self._ready_elsewhere:
            self._route.prefer(self._ready_elsewhere)
            self._ready_elsewhere = ()  # each of these endpoints is tried once: the old replica may recover first
        self._observer.on_disconnected(reason)

    async def _dial_within_limit(self, endpoint: Endpoint, stack: AsyncExitStack) -> Link[Down, Up]:
        limit_s = self._route.connect_s
        try:
            async with asyncio.timeout(limit_s):
                return await stack.enter_async_context(self._dial(endpoint))
        except TimeoutError:
            raise Unavailable(f"{endpoint} did not answer within {limit_s:g} s") from None

    async def _converse(self, link: Link[Down, Up], welcome: Welcome | None = None) -> None:
        """Send the Hello, unless `welcome` is given; then process messages until the stream ends."""
        self._link = link
        self._silence_s = 0.0
        self._failover.note("")
        ticker = asyncio.create_task(self._tick(link), name="session ticks")
        try:
            if welcome is None:
                link.send(Up(hello=self._hello()))
            else:
                self._take_welcome(welcome, link)
            while (down := await link.recv()) is not None:
                self._silence_s = 0.0
                self._take(down, link)
            if self._leaving is not None and self.connected:
                raise _Leaving
        finally:
            ticker.cancel()

    def _hello(self) -> Hello:
        hello = self._introduce(self.token, self.incarnation)
        hello.leaving = self._leaving is not None
        return hello

    def _take(self, down: Down, link: Link[Down, Up]) -> None:
        match down.WhichOneof("message"):
            case "welcome":
                self._take_welcome(down.welcome, link)
            case "tick":
                self._ready_elsewhere = tuple(down.tick.ready_addresses)
                self._failover.note("" if down.tick.ready else "is not ready")
            case "world":
                self._take_token(down.world.token)
                self.world = down.world
                self._arrivals.end_before(down.world.world.generation, down.world.world.reason)
                self._observer.on_world(down.world)
            case "outcomes":
                for outcome in down.outcomes.outcomes:
                    self._observer.on_outcome(outcome)
                    self._arrivals.end(outcome)
            case "arrival_refused":
                refused = down.arrival_refused
                key = RoundKey(refused.name, refused.generation, refused.round)
                self._arrivals.refuse(key, refused.ranks, unpack(refused.error))
            case "checkpoint":
                self._observer.on_checkpoint(down.checkpoint)
            case "place" | "inspect":
                if self.on_request is not None:
                    self.on_request(down)
            case "reply":
                self._take_reply(down.reply)
            case "moved":
                self._route.go_to(down.moved.addresses)
                raise Unavailable(f"the replica stops serving: {down.moved.reason}")
            case "disconnected":
                self._connected.clear()
                self.last_error = unpack(down.disconnected)
                self._observer.on_disconnected(self.last_error)
            case "ended":
                self._finish(unpack(down.ended.error))
                raise unpack(down.ended.error)
            case _:
                pass  # a newer server's message, which this version ignores

    def _take_welcome(self, welcome: Welcome, link: Link[Down, Up]) -> None:
        self._take_token(welcome.token)
        self.incarnation = welcome.incarnation
        self.welcome = welcome
        self.last_error = None
        self._route.reached()
        self._connected.set()
        self._observer.on_connected(welcome)
        if self._leaving is not None:
            link.send(Up(leave=self._leaving))
            return
        self._flush_calls()
        self._flush_arrivals()
        self._devices_unsent = bool(self._devices)
        self._flush_progress()

    def _take_reply(self, reply: Reply) -> None:
        self._take_token(reply.token)
        field = reply.WhichOneof("response")
        if field == "error":
            self._calls.answer(reply.id, unpack(reply.error))
        elif field is None:
            self._calls.answer(reply.id, Done())
        else:
            self._calls.answer(reply.id, getattr(reply, field))

    def _take_token(self, token: Token) -> None:
        """Keep the newest revision seen. A token of another cluster ends the connection; a token of a cluster
        restored from the known one ends the session.
        """
        if not token.uid:
            return
        if self.token.uid and self.token.uid != token.uid:
            raise another_cluster(self.token.uid, token.uid, str(self._route.current))
        self.token = Token(uid=token.uid, revision=max(token.revision, self.token.revision))

    # -- the clock

    async def _tick(self, link: Link[Down, Up]) -> None:
        """Send a tick every second, and start a failover when the replica is silent.

        Silence is counted in short steps, each at most twice its length. So if this process did not run for a
        while (a held GIL, a stopped process), its own stall does not count as the replica's silence.
        """
        step_s = self._pace.tick_s / 4
        before = self._now()
        for number in itertools.count():
            await asyncio.sleep(step_s)
            now = self._now()
            self._silence_s += min(now - before, 2 * step_s)
            before = now
            if not self.connected and self._silence_s >= self._pace.handshake_s:
                link.close(Unavailable(f"{self._route.current} was silent for {self._silence_s:.1f} s"))
                return
            if self.connected and self._silence_s >= self._pace.silent_s:
                self._failover.note("is silent", for_s=self._pace.unready_s)
            self._failover.look(link)
            if number % 4 == 0:
                link.send(Up(tick=Tick(sequence=number // 4)))

    # -- sending

    async def _request(self, id_: int, up: Up, label: str, timeout_s: float | None) -> Any:
        """Return the reply to `up`; a retryable error is no reply, and `up` is sent again."""
        self._check_open()
        if (size := up.ByteSize()) > MAX_MESSAGE_BYTES:
            raise errors.QuotaExceeded(f"{label} has {size} bytes, a message at most {MAX_MESSAGE_BYTES}")
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    reply = self._calls.add(id_, up)
                    self._flush_calls()
                    try:
                        return await reply
                    except StrataError as error:
                        if not error.retryable or self._ended.is_set():
                            raise
                        self.last_error = error
                    await asyncio.sleep(self._pace.retry_s)
        except TimeoutError:
            why = f": {self.last_error.message}" if self.last_error else ""
            raise Unavailable(f"no answer to {label} within {timeout_s:g} s{why}") from None
        finally:
            self._calls.drop(id_)
            self._flush_calls()  # the request's place among the sent calls is free

    def _flush_soon(self, label: str, delay_s: float, flush: Callable[[], None]) -> None:
        """Call `flush` once, after `delay_s`, however often this is called until then."""
        if label in self._flushing:
            return
        self._flushing.add(label)

        def now() -> None:
            self._flushing.discard(label)
            flush()

        if delay_s > 0:
            self._loop.call_later(delay_s, now)
        else:
            self._loop.call_soon(now)

    def _flush_arrivals(self) -> None:
        if self._link is not None and self.connected:
            from strata.wire.barriers import batches  # noqa: PLC0415  # its imports are a fifth of a start

            arrivals = self._arrivals.unsent(self._now())
            for batch in batches(arrivals):
                self._link.send(Up(arrivals=Arrivals(arrivals=batch)))

    def _flush_calls(self) -> None:
        if self._link is not None and self.connected:
            for up in self._calls.unsent():
                assert isinstance(up, Up)
                self._link.send(up)

    def _flush_progress(self) -> None:
        devices = self._devices if self._devices_unsent else ()
        if self._link is None or not self.connected or not (self._progress or devices):
            return
        self._devices_unsent = False
        now = self._now()
        ranks = [aged(one, now - since) for one, since in self._progress.values()]
        progress = Progress(generation=self._progress_generation, ranks=ranks, devices=devices)
        self._link.send(Up(progress=progress))

    # -- the end

    def _finish(self, error: StrataError | None) -> None:
        """End the session permanently, and fail everything still open. Only the first call counts.

        A member that announced its departure counts as departed, however its session ends. For example, a replica
        records the leave and dies before it confirms the leave; the next replica then refuses the session.
        """
        if self._ended.is_set():
            return
        self.error = error if self._leaving is None else None
        self._ended.set()
        self._connected.set()
        reason = error or Unavailable("the session has ended", hint="connect again")
        self._arrivals.fail(reason)
        self._calls.fail(reason)

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise self.error or StaleIncarnation(
                "the session has ended: its client was closed", hint="connect again"
            )

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, looked up once: in Python 3.11 each lookup asks the kernel for the pid."""
        return asyncio.get_running_loop()

    def _now(self) -> float:
        return self._loop.time()

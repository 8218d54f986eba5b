"""One client process of `benchmarks.barrier`: prints when it is ready, then makes rounds on request.

Each answer is one line. For every round the line has three times of the machine's monotonic clock: when this process
sent its first arrival, when it sent its last arrival, and when it received the last release.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

Times = dict[str, float]


def say(value: object) -> None:
    """Send one line to the parent."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


# -- Strata -----------------------------------------------------------------------------------


async def strata(number: int, share: int, members: int, rounds: int, endpoints: str, slots: int) -> None:
    """Keep `share` sessions of `slots` ranks each open, spread over the coordinators; arrive with all ranks."""
    import grpc.aio  # noqa: PLC0415  # the other kind needs none of it

    from strata.v1 import barriers_pb2, members_pb2, session_pb2, worlds_pb2  # noqa: PLC0415
    from strata.v1.session_pb2_grpc import SessionsStub  # noqa: PLC0415

    addresses = endpoints.split(",")
    spec = worlds_pb2.JobSpec(min_workers=members, max_workers=members)
    calls: list[Any] = []
    ranks: list[int] = []
    async with AsyncExitStack() as stack:
        for index in range(share):
            options = [("grpc.use_local_subchannel_pool", 1)]
            address = addresses[(number + index) % len(addresses)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            call: Any = SessionsStub(channel).Session()
            worker = f"w-{number}-{index}"
            registration = members_pb2.Registration(
                job="bench", worker_id=worker, boot=worker, slots=slots, spec=spec
            )
            await call.write(session_pb2.Up(hello=session_pb2.Hello(member=registration)))
            calls.append(call)
        generation = 0
        for call in calls:
            down = await call.read()
            while not down.HasField("world"):
                down = await call.read()
            ranks.append(down.world.place.first_rank)
            generation = down.world.world.generation

        async def arrive(call: Any, rank: int, round_: int) -> float:
            ranks = range(rank, rank + slots)
            arrival = barriers_pb2.Arrival(
                job="bench", name="b", generation=generation, round=round_, ranks=ranks
            )
            await call.write(session_pb2.Up(arrivals=session_pb2.Arrivals(arrivals=[arrival])))
            return time.monotonic()

        async def released(call: Any) -> None:
            while not (await call.read()).HasField("outcomes"):
                pass

        async def round_trip(round_: int) -> Times:
            first = time.monotonic()
            sent = await asyncio.gather(*(arrive(*pair, round_) for pair in zip(calls, ranks, strict=True)))
            await asyncio.gather(*map(released, calls))
            return {"first": first, "last": max(sent), "heard": time.monotonic()}

        say("ready")
        loop = asyncio.get_running_loop()
        round_ = 0
        while await loop.run_in_executor(None, sys.stdin.readline):
            times = []
            for _ in range(rounds):
                round_ += 1
                times.append(await round_trip(round_))
            say(times)


# -- Strata, through an agent -----------------------------------------------------------------


class RankSocket:
    """One rank's socket to its agent, in frames (`strata.session.framed`): blocking, as plain as TCPStore's client."""

    def __init__(self, place: dict[str, Any], local: int) -> None:
        from strata.v1 import session_pb2  # noqa: PLC0415

        self._down = session_pb2.Down
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(place["socket"])
        self._read = self._socket.makefile("rb").read
        self._send(self._frame())  # the nonce
        hello = session_pb2.RankHello(
            job="ranks",
            worker_id=place["worker"],
            generation=place["generation"],
            rank=place["first"] + local,
            local_rank=local,
        )
        self.send(session_pb2.Up(hello=session_pb2.Hello(rank=hello)))

    def send(self, message: Any) -> None:
        self._send(message.SerializeToString())

    def until_released(self) -> None:
        """Wait for a round's outcome."""
        while not self._down.FromString(self._frame()).HasField("outcomes"):
            pass

    def _send(self, frame: bytes) -> None:
        self._socket.sendall(len(frame).to_bytes(4, "big") + frame)

    def _frame(self) -> bytes:
        return self._read(int.from_bytes(self._read(4), "big"))


def ranks(number: int, share: int, members: int, rounds: int, endpoints: str) -> None:
    """Be `share` ranks of one agent, with one socket each; arrive with all ranks."""
    from strata.v1 import barriers_pb2, session_pb2  # noqa: PLC0415

    program = Path(__file__).with_name("_agent_program.py")
    arguments = (endpoints, f"w-{number}", str(share), str(members // share))
    agent = subprocess.Popen(
        [sys.executable, str(program), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert agent.stdout is not None
    place = json.loads(agent.stdout.readline())
    sockets = [RankSocket(place, local) for local in range(share)]
    say("ready")
    round_ = 0
    while sys.stdin.readline():
        times = []
        for _ in range(rounds):
            round_ += 1
            first = time.monotonic()
            for local, rank in enumerate(sockets):
                arrival = barriers_pb2.Arrival(
                    job="ranks",
                    name="b",
                    generation=place["generation"],
                    round=round_,
                    ranks=[place["first"] + local],
                )
                rank.send(session_pb2.Up(arrivals=session_pb2.Arrivals(arrivals=[arrival])))
            last = time.monotonic()
            for rank in sockets:
                rank.until_released()
            times.append({"first": first, "last": last, "heard": time.monotonic()})
        say(times)
    agent.kill()
    agent.wait()


# -- TCPStore ---------------------------------------------------------------------------------


def tcpstore(number: int, share: int, members: int, rounds: int, where: str) -> None:
    """Keep `share` connections open, each in its own thread, and meet as torchelastic does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  # as above

    port_file = Path(where)
    if number == 0:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(server.port))
        port_file.with_suffix(".new").rename(port_file)
    while not port_file.exists():
        time.sleep(0.01)
    port = int(port_file.read_text())
    stores = [
        TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60)) for _ in range(share)
    ]
    admission = threading.Barrier(share + 1)
    sent = [[0.0] * rounds for _ in stores]
    received = [[0.0] * rounds for _ in stores]
    first = [[0.0] * rounds for _ in stores]
    begun = 0

    def meet(index: int, store: TCPStore) -> None:
        while True:
            admission.wait()
            for step in range(rounds):
                key = f"{begun + step}"
                first[index][step] = time.monotonic()
                arrived = store.add(f"n{key}", 1)
                sent[index][step] = time.monotonic()
                if arrived == members:
                    store.set(f"d{key}", "1")
                store.wait([f"d{key}"])
                received[index][step] = time.monotonic()
            admission.wait()

    for index, store in enumerate(stores):
        threading.Thread(target=meet, args=(index, store), daemon=True).start()
    say("ready")
    while sys.stdin.readline():
        admission.wait()
        admission.wait()
        begun += rounds
        say(
            [
                {
                    "first": min(times[step] for times in first),
                    "last": max(times[step] for times in first),
                    "heard": max(times[step] for times in received),
                }
                for step in range(rounds)
            ]
        )


def main() -> None:
    """Run the client that the command line names."""
    kind, number, share, members, rounds, where, *slots = sys.argv[1:]
    numbers = (int(number), int(share), int(members), int(rounds))
    if kind == "tcpstore":
        tcpstore(*numbers, where)
        return
    if kind == "ranks":
        ranks(*numbers, where)
        return
    import uvloop  # noqa: PLC0415  # the others need none of it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(strata(*numbers, where, int(slots[0])))


if __name__ == "__main__":
    main()

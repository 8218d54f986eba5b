"""Upload of a checkpoint's image to S3, compared with boto3's upload of the same bytes to the same server.

    python -m benchmarks.s3_upload [--json FILE] [--megabytes 512] [--rounds 7]

The server stores nothing and shares the machine's cores with the client, so the client's work is measured. The two
uploads alternate. A round's ratio is boto3's time ÷ ours. Ours also hashes every chunk, as a save does; boto3 has its
defaults (parts of 8 MiB, ten threads). CPU time is that of all threads of this process; the kernel's part of it is
also shown. The minimum for any client is measured too: hashing the bytes once, and sending them over as many plain
sockets as our upload has. On loopback a sender's CPU time includes much of the receiver's work, so the kernel's part
depends on the machine.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.snapshot.memory import allocate
from strata.checkpoint.storage.pipeline import DEFAULT_THREADS, digests, write_image
from strata.checkpoint.storage.place import S3Place
from strata.checkpoint.storage.s3_control import S3Options
from strata.checkpoint.storage.s3_storage import S3Storage
from strata.checkpoint.storage.s3_upload import PARTS_AT_ONCE

GOAL_RATIO = 4.0
GOAL_CPU_S_PER_GB = 0.25
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Cost of one upload: seconds, CPU seconds of this process, and the kernel's part of them."""

    wall_s: float
    cpu_s: float
    kernel_s: float


def spent(act: Callable[[], object]) -> Spent:
    wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    act()
    after = resource.getrusage(resource.RUSAGE_SELF)
    kernel = after.ru_stime - before.ru_stime
    return Spent(
        wall_s=time.perf_counter() - wall,
        cpu_s=after.ru_utime - before.ru_utime + kernel,
        kernel_s=kernel,
    )


@contextmanager
def null_server() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks._null_s3"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def send(url: str, chunks: Sequence[memoryview]) -> None:
    """Send each chunk as one request, over as many plain sockets as our upload has."""
    host, _, port = url.removeprefix("http://").partition(":")

    def some(number: int) -> None:
        with socket.create_connection((host, int(port))) as connection:
            for chunk in chunks[number::PARTS_AT_ONCE]:
                head = f"PUT /bucket/bare?uploadId=u0 HTTP/1.1\r\nHost: x\r\nContent-Length: {len(chunk)}\r\n\r\n"
                connection.sendall(head.encode())
                connection.sendall(chunk)
                connection.recv(4096)

    threads = [threading.Thread(target=some, args=(number,)) for number in range(PARTS_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(megabytes: int, rounds: int) -> list[tuple[Spent, Spent, Spent]]:
    """Return (ours, boto3's, hashing and sending alone) of each round after one of warming up."""
    size = megabytes << 20
    memory = allocate(size, inherited=False)[:size]
    memory[:] = os.urandom(1 << 20) * megabytes
    image = memory.toreadonly()
    chunks = [image[start : start + CHUNK_BYTES] for start in range(0, size, CHUNK_BYTES)]
    found = []
    with null_server() as url:
        storage = S3Storage(
            S3Place(bucket="bucket", endpoint_url=url, region="us-east-1"),
            nonce=lambda: f"n{next(_numbers)}",
            now=lambda: datetime.now(UTC),
            pause=time.sleep,
            options=S3Options(),
        )
        client: Any = boto3.client("s3", endpoint_url=url, region_name="us-east-1")

        def ours() -> None:
            sink = storage.sink(f"ours-{next(_numbers)}")
            sink.begin(size)
            write_image(sink, [image], chunks)
            sink.finish()
            sink.abort()

        def theirs() -> None:
            client.upload_fileobj(io.BytesIO(image), "bucket", f"boto3-{next(_numbers)}")

        def bare() -> None:
            digests(chunks, threads=DEFAULT_THREADS)
            send(url, chunks)

        for number in range(rounds + 1):
            if number % 2:
                mine, other, least = spent(ours), spent(theirs), spent(bare)
            else:
                least, other, mine = spent(bare), spent(theirs), spent(ours)
            found.append((mine, other, least))
    return found[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none")  # noqa: S106  # nobody's
    rounds = measure(args.megabytes, max(5, args.rounds))
    gigabytes = args.megabytes / 1024
    ratios = [other.wall_s / mine.wall_s for mine, other, _ in rounds]
    ratio, spread = statistics.median(ratios), (min(ratios), max(ratios))
    cpu = statistics.median(mine.cpu_s for mine, _, _ in rounds) / gigabytes
    kernel = statistics.median(mine.kernel_s for mine, _, _ in rounds) / gigabytes
    cpu_boto3 = statistics.median(other.cpu_s for _, other, _ in rounds) / gigabytes
    cpu_least = statistics.median(least.cpu_s for _, _, least in rounds) / gigabytes
    rate = statistics.median(args.megabytes / mine.wall_s for mine, _, _ in rounds)
    result = {
        "benchmark": "s3_upload",
        "megabytes": args.megabytes,
        "rounds": len(rounds),
        "ratio": round(ratio, 2),
        "ratio_spread": [round(value, 2) for value in spread],
        "cpu_s_per_gb": round(cpu, 3),
        "kernel_s_per_gb": round(kernel, 3),
        "boto3_cpu_s_per_gb": round(cpu_boto3, 3),
        "hash_and_send_cpu_s_per_gb": round(cpu_least, 3),
        "mb_per_s": round(rate),
        "goal": f"at least {GOAL_RATIO:g} x boto3, at most {GOAL_CPU_S_PER_GB} CPU s/GB",
        "met": ratio >= GOAL_RATIO and cpu <= GOAL_CPU_S_PER_GB,
    }
    print(
        f"{args.megabytes} MB hashed and uploaded at {rate:.0f} MB/s, {ratio:.1f} x boto3"
        f" (spread {spread[0]:.1f} to {spread[1]:.1f}); {cpu:.2f} CPU s/GB, {kernel:.2f} of them the kernel's,"
        f" boto3 {cpu_boto3:.2f}, hashing and sending alone {cpu_least:.2f}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A member that registers over a raw stream and then does nothing: python member_program.py ADDRESS JOB WORKER."""

from __future__ import annotations

import sys
import threading

import grpc

from strata.v1 import members_pb2, session_pb2, worlds_pb2
from strata.v1.session_pb2_grpc import SessionsStub


def main() -> None:
    address, job, worker = sys.argv[1:]
    registration = members_pb2.Registration(
        job=job, worker_id=worker, boot=f"boot-{worker}", slots=1, spec=worlds_pb2.JobSpec()
    )
    messages = iter([session_pb2.Up(hello=session_pb2.Hello(member=registration))])
    forever = threading.Event()

    def talk() -> object:
        yield from messages
        forever.wait()

    with grpc.insecure_channel(address) as channel:
        for down in SessionsStub(channel).Session(talk()):  # type: ignore[arg-type]  # a generator is an iterator
            if down.HasField("welcome"):
                sys.stdout.write(f"incarnation {down.welcome.incarnation}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()

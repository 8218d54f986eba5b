"""Scripted coordinators for unary calls: real gRPC, each on its own threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from strata.errors import StrataError
from strata.transport.unary import METHODS
from strata.v1.common_pb2 import Token
from strata.wire.status import details as trailer
from strata.wire.status import status_of

Answer = Callable[[Any], Message]


class UnaryServer(grpc.GenericRpcHandler):
    """Answer each request as `answers` prescribes for its class, and record every request."""

    def __init__(self) -> None:
        self.answers: dict[type[Message], Answer] = {}
        self.requests: list[Any] = []
        self.came = threading.Event()
        self.uid = "uid-1"
        self.revision = 100
        self.hanging = threading.Event()
        self.hanging.set()
        self.address = ""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        (request_class,) = (r for r, m in METHODS.items() if m.path == details.method)

        def handle(request: Message, context: grpc.ServicerContext) -> Message:
            self.requests.append(request)
            self.came.set()
            self.hanging.wait(10)
            try:
                response = self.answers[request_class](request)
            except StrataError as error:
                context.set_trailing_metadata(trailer(error))
                context.abort(status_of(error), error.message)
            response.token.CopyFrom(Token(uid=self.uid, revision=self.revision))  # type: ignore[attr-defined]
            return response

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=request_class.FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )

    def requested_paths(self, kind: type[Message]) -> list[Any]:
        """Return the received requests of one kind."""
        return [request for request in self.requests if isinstance(request, kind)]


@contextmanager
def unary_server() -> Iterator[UnaryServer]:
    """Serve on a free port for the duration of the block."""
    ours = UnaryServer()
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((ours,))
    ours.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield ours
    finally:
        ours.hanging.set()
        server.stop(None).wait()

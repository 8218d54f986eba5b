"""Every method of `strata.v1` as a gRPC handler, made from the service descriptors.

The table of methods answers a unary method; the handler adds admission, error statuses and the limits of an
answer. An answer has at most `ANSWER_BYTES`: lists are paged, and the size of an item is limited when it is
written. So a larger answer is a bug, and the caller receives an error that reports this bug. Until its call has
ended, an answer counts as unsent (a *debt*, `core.access.unsent_answers`): grpc.aio calls back once the status is
sent, and the status follows the answer's last byte.

Requests are decoded here. grpc would answer undecodable bytes with UNKNOWN, which means that the call may have taken
effect. So every client would resend the same bytes for ever, and grpc would log a traceback each time. A stream
whose message cannot be decoded is ended by its link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from strata.coordinator.access.admission import Admission
from strata.coordinator.calls.pages import ANSWER_BYTES
from strata.coordinator.calls.table import NO_SESSION, SERVICES, Calls
from strata.coordinator.rpc.unsent_answers import Context, Ledger
from strata.core.access.authority import call_name
from strata.errors import InvalidArgument, StrataError
from strata.observe import get_logger
from strata.wire.status import abort

log = get_logger()

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Handlers(grpc.GenericRpcHandler):
    """The handlers of all methods, by path. `streams` are the methods that the table does not answer."""

    def __init__(
        self, calls: Calls, admission: Admission, ledger: Ledger, streams: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._calls, self._admission, self._ledger = calls, admission, ledger
        self._by_path: dict[str, Handler] = {}
        for name, service in SERVICES.items():
            for method in service.methods:
                act = streams.get(f"{name}.{method.name}")
                handler = self._unary(method) if act is None else _stream(method, act)
                self._by_path[f"/{service.full_name}/{method.name}"] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a method, or None if it is not one of Strata's."""
        return self._by_path.get(handler_call_details.method)

    def _unary(self, method: MethodDescriptor) -> Handler:
        decode, name = _decoder(method), call_name(method.name)

        async def handle(body: bytes, context: Context) -> bytes:
            try:
                return await self._answer(name, decode(body), context)
            except StrataError as error:
                return await abort(context, error)
            except Exception:
                # the caller must receive a bug as an error like any other
                log.exception("call_failed", call=name)
                return await abort(
                    context, StrataError("internal error", hint="the server's log has the details")
                )

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _answer(self, name: str, request: Any, context: Context) -> bytes:
        """Return the serialised response to a request, within the limits."""
        identity = self._admission.asks(context)
        account = self._ledger.account(context, identity)
        account.check()
        response = await self._calls.answer(name, request, NO_SESSION, identity)
        body: bytes = response.SerializeToString()
        if len(body) > ANSWER_BYTES:
            self._ledger.measures.oversized.child().add()
            log.error("answer_too_large", call=name, size_bytes=len(body), limit_bytes=ANSWER_BYTES)
            why = f"internal error: the answer has {len(body)} bytes, and at most {ANSWER_BYTES} are sent"
            raise StrataError(why, hint="please report it, with the call")
        account.check()  # other calls of this caller may have been answered in the meantime
        paid = account.owe(len(body))
        context.add_done_callback(lambda _context: paid())
        return body


def _decoder(method: MethodDescriptor) -> Callable[[bytes], Any]:
    """Return a decoder from bytes to a request; it raises `InvalidArgument` for invalid bytes."""
    request = GetMessageClass(method.input_type)

    def decode(body: bytes) -> Any:
        try:
            return request.FromString(body)
        except DecodeError as error:
            why = f"these {len(body)} bytes are no request of {method.full_name}: {error}"[:500]
        raise InvalidArgument(
            why, hint="build the client from the proto files of this release; ids are UTF-8"
        )

    return decode


def _stream(method: MethodDescriptor, act: Callable[..., Any]) -> Handler:
    """Return the handler of a stream. This handler decodes a single opening request; grpc decodes a stream of them."""
    encode = GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(
            act, GetMessageClass(method.input_type).FromString, encode
        )
    decode = _decoder(method)

    async def answers(body: bytes, context: Context) -> Any:
        try:
            request = decode(body)
        except InvalidArgument as error:
            await abort(context, error)
        async for response in act(request, context):
            yield response

    return grpc.unary_stream_rpc_method_handler(answers, None, encode)

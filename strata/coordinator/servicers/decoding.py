"""Requests that are no message: refused like any other mistake.

grpc answers them with UNKNOWN, which says that the call may have taken effect, so every client
would send the same bytes again and again; and it logs a traceback for each. So bytes are handed
through grpc as they are and decoded here. A stream that carries no message is ended by its link.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from strata.errors import InvalidArgument
from strata.wire.status import abort

OURS: Final = "/strata.v1."


class Decoding(grpc.aio.ServerInterceptor):
    """Decodes the requests of our own methods that take one."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or handler.request_streaming or not method.startswith(OURS):
            return handler
        decode, act = handler.request_deserializer, handler.unary_unary or handler.unary_stream

        async def decoded(body: bytes, context: Any) -> Any:
            try:
                return decode(body)
            except DecodeError as error:
                why = f"these {len(body)} bytes are no request of {method}: {error}"[:500]
            hint = "build the client from the proto files of this release; ids are UTF-8"
            return await abort(context, InvalidArgument(why, hint=hint))

        async def answer(body: bytes, context: Any) -> Any:
            return await act(await decoded(body, context), context)

        async def answers(body: bytes, context: Any) -> Any:
            async for response in act(await decoded(body, context), context):
                yield response

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(answers, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)

"""etcd's KV service: reading, transactions and compaction."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from grpc.aio import UnaryUnaryMultiCallable

from strata.core.kv.store import Compacted
from strata.core.kv.txn import Range, RangeResult, Txn, TxnResult
from strata.errors import InvalidArgument
from strata.etcd import codec, errors
from strata.etcd.connection import Connection
from strata.etcd.endpoint import Endpoint
from strata.etcdapi import kv_pb2

PAGE_KEYS: Final = 2_000
"""An unlimited range is read in pages of this many keys, so that each page arrives before its deadline."""


class KeyValues:
    """etcd's KV service in terms of `core.kv.txn`."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self, request: Range) -> RangeResult:
        """Return the keys of the range, all from one revision; retry for up to `read_s`."""
        if request.range_end is None or request.limit:
            return await self._page(request)
        while True:
            try:
                return await self._pages(request)
            except Compacted:
                if request.revision:
                    raise
                # the revision of the first page was compacted meanwhile; a new read takes the newest one

    async def _pages(self, request: Range) -> RangeResult:
        first = page = await self._page(replace(request, limit=PAGE_KEYS))
        revision, kvs = page.revision, list(page.kvs)
        pinned = replace(request, revision=request.revision or revision, limit=PAGE_KEYS)
        while page.more:
            page = await self._page(replace(pinned, key=kvs[-1].key + "\0"))
            kvs.extend(page.kvs)
        return RangeResult(revision=revision, kvs=tuple(kvs), count=first.count)

    async def _page(self, request: Range) -> RangeResult:
        try:
            answer = await self._connection.repeated(
                _range, codec.encode_range(request), linearizable=not request.serializable
            )
        except InvalidArgument as error:
            if errors.COMPACTED_TEXT in error.message:
                raise Compacted(error.message) from error
            raise
        return codec.decode_range(answer, answer.header.revision)

    async def read_at(self, endpoint: str, request: Range) -> RangeResult:
        """Return one page of the range from one member; sent once, with the time limit of a read.

        Unless the read is serializable, that member has then applied all revisions up to the answer's
        `revision`.
        """
        answer = await self._connection.once(
            _range,
            codec.encode_range(request),
            timeout_s=self._connection.timing.read_s,
            at=self._connection.named(endpoint),
        )
        return codec.decode_range(answer, answer.header.revision)

    async def execute(self, txn: Txn) -> TxnResult:
        """Apply one transaction; sent at most once."""
        answer = await self._connection.once(_txn, codec.encode_txn(txn), linearizable=True)
        return codec.decode_txn(answer, txn)

    async def compact(self, revision: int, *, physical_s: float | None = None) -> None:
        """Drop history before `revision`; it is not an error if that history is compacted already.

        With `physical_s` the call is made once, and returns when the space is free in the member's database;
        `Unavailable` if that takes longer. If etcd has users, only a user with the role `root` may call with
        `physical_s`: `Refused` for any other.
        """
        request = kv_pb2.CompactionRequest(revision=revision, physical=physical_s is not None)
        try:
            if physical_s is None:
                await self._connection.repeated(_compact, request)
            else:
                await self._connection.once(_compact, request, timeout_s=physical_s)
        except InvalidArgument as error:
            if errors.COMPACTED_TEXT not in error.message:
                raise


def _range(
    endpoint: Endpoint,
) -> UnaryUnaryMultiCallable[kv_pb2.RangeRequest, kv_pb2.RangeResponse]:
    return endpoint.kv.Range


def _txn(endpoint: Endpoint) -> UnaryUnaryMultiCallable[kv_pb2.TxnRequest, kv_pb2.TxnResponse]:
    return endpoint.kv.Txn


def _compact(
    endpoint: Endpoint,
) -> UnaryUnaryMultiCallable[kv_pb2.CompactionRequest, kv_pb2.CompactionResponse]:
    return endpoint.kv.Compact

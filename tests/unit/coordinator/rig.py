"""One replica's insides on the in-memory store: what the tests of this folder start from."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.keys import ClusterKeys
from strata.core.txn import Delete, Put, Txn
from strata.testing.memory_client import MemoryClient
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Network
from strata.testing.virtual_time import run

KEYS = ClusterKeys("test")

_Rig = TypeVar("_Rig")
_P = ParamSpec("_P")
_Made = ParamSpec("_Made")


def in_rig(
    made: Callable[_Made, AbstractAsyncContextManager[_Rig]], *args: _Made.args, **options: _Made.kwargs
) -> Callable[[Callable[Concatenate[_Rig, _P], Coroutine[Any, Any, None]]], Callable[_P, None]]:
    """Make an `async def` test one that runs in virtual time, in a rig of its own: its first argument."""

    def decorate(test: Callable[Concatenate[_Rig, _P], Coroutine[Any, Any, None]]) -> Callable[_P, None]:
        async def within(*given: _P.args, **named: _P.kwargs) -> None:
            async with made(*args, **options) as rig:
                await test(rig, *given, **named)

        def wrapper(*given: _P.args, **named: _P.kwargs) -> None:
            run(within(*given, **named))

        return shown_as(test, wrapper)

    return decorate


def shown_as(
    test: Callable[..., object], wrapper: Callable[_P, None], *, given: int = 1
) -> Callable[_P, None]:
    """Give `wrapper` the name of `test`, and for pytest the arguments behind the first `given` ones."""
    functools.update_wrapper(wrapper, test)
    signature = inspect.signature(test)
    parameters = list(signature.parameters.values())[given:]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect's
    return wrapper


def now() -> float:
    return asyncio.get_running_loop().time()


class Rig:
    """A store, a client of it, a mirror and an executor, running inside `rig()`."""

    def __init__(self, store: MemoryStore, client: MemoryClient) -> None:
        self.store = store
        self.client = client
        self.mirror = Mirror(client, KEYS, new_uid="uid-1")
        self.executor = Executor(client, self.mirror)

    def put(self, name: str, value: bytes = b"{}") -> int:
        """Write below the root as somebody else; return the revision."""
        return put(self.store, KEYS.root + name, value)

    def delete(self, name: str) -> int:
        return self.store.execute(Txn(success=(Delete(key=KEYS.root + name),))).revision

    def get(self, name: str) -> bytes | None:
        """Return what the view holds."""
        kv = self.mirror.view.get(KEYS.root + name)
        return kv.value if kv is not None else None


def put(store: MemoryStore, key: str, value: bytes = b"{}") -> int:
    return store.execute(Txn(success=(Put(key=key, value=value),))).revision


@asynccontextmanager
async def rig(
    store: MemoryStore | None = None, *, network: Network | None = None, name: str = "r1"
) -> AsyncIterator[Rig]:
    """Run a mirror and an executor; yield once the view is there."""
    store = store or MemoryStore()
    made = Rig(store, store.client(name, network=network))
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(made.mirror.run()), tasks.create_task(made.executor.run())]
        await made.mirror.started()
        yield made
        for task in running:
            task.cancel()

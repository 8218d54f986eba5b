"""The inside of one replica on the in-memory store, for the tests of this folder."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import Delete, Put, Txn, WatchBatch
from strata.testing.memory_client import MemoryClient
from strata.testing.memory_store import MemoryStore
from strata.testing.mvcc import Revision
from strata.testing.network import Call, Fate, Network, PromptNetwork
from strata.testing.virtual_time import run

KEYS = ClusterKeys("test")

_Rig = TypeVar("_Rig")
_P = ParamSpec("_P")
_Made = ParamSpec("_Made")


def in_rig(
    made: Callable[_Made, AbstractAsyncContextManager[_Rig]], *args: _Made.args, **options: _Made.kwargs
) -> Callable[[Callable[Concatenate[_Rig, _P], Coroutine[Any, Any, None]]], Callable[_P, None]]:
    """Make an `async def` test run in virtual time, with a new rig as its first argument."""

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
    """Give `wrapper` the name of `test`, and show pytest the test's arguments after the first `given` ones."""
    functools.update_wrapper(wrapper, test)
    signature = inspect.signature(test)
    parameters = list(signature.parameters.values())[given:]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect's
    return wrapper


async def given_up(work: Coroutine[Any, Any, object], after_s: float) -> None:
    """Start `work`, and cancel it after `after_s` seconds."""
    task = asyncio.create_task(work)
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait([task])


def now() -> float:
    return asyncio.get_running_loop().time()


class Scripted(PromptNetwork):
    """A network whose calls have scripted fates (delivered, lost, late).

    It records its calls and delays watches by `watch_s`. A call that `meets` matches, by default an execute, gets the
    next fate of `fates`. All other calls, and all calls once the list is used up, get the fate that `fate` returns.
    """

    def __init__(
        self,
        fate: Callable[[Call], Fate] = lambda _call: Fate(),
        *,
        watch_s: float | Callable[[WatchBatch], float] = 0.0,
        applied: Callable[[Call], object] = lambda _call: None,
        meets: Callable[[Call], bool] = lambda call: call.kind == "execute",
        fates: Sequence[Fate] = (),
    ) -> None:
        self.says = fate
        self.meets = meets
        self.watch_s = watch_s
        self.has_recent_transport = applied
        self.begin(*fates)

    def begin(self, *fates: Fate) -> None:
        self.fates = list(fates)
        self.calls: list[Call] = []

    @property
    def executed(self) -> int:
        return sum(call.kind == "execute" for call in self.calls)

    @property
    def reads(self) -> int:
        return sum(call.kind == "read" for call in self.calls)

    def fate(self, call: Call) -> Fate:
        self.calls.append(call)
        return self.fates.pop(0) if self.fates and self.meets(call) else self.says(call)

    def applied(self, call: Call) -> None:
        self.has_recent_transport(call)

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        return self.watch_s(batch) if callable(self.watch_s) else self.watch_s


def slow_writes(delay_s: float) -> Scripted:
    """Return a network on which every write takes `delay_s` seconds."""
    return Scripted(lambda call: Fate(delay_s=delay_s if call.kind == "execute" else 0.0))


def writes(call: Call, key: str) -> bool:
    """Tell whether a call writes a key that ends with `key`."""
    return isinstance(call.argument, Txn) and any(
        isinstance(op, Put) and op.key.endswith(key) for op in call.argument.success
    )


class Moment:
    """The first call that `matches` and takes effect.

    At this moment `act` runs, once, before any watch or caller gets the effect.
    """

    def __init__(self, matches: Callable[[Call], bool]) -> None:
        self.matches = matches
        self.came = asyncio.Event()

    def network(self, act: Callable[[], object], **options: Any) -> Scripted:
        """Return a network on which `act` runs at that moment."""

        def applied(call: Call) -> None:
            if self.matches(call) and not self.came.is_set():
                self.came.set()
                act()

        return Scripted(applied=applied, **options)


class Rig:
    """A store, a client of it, a mirror and an executor; they run inside `rig()`."""

    def __init__(self, store: MemoryStore, client: MemoryClient, network: Scripted) -> None:
        self.store = store
        self.client = client
        self.network = network
        self.mirror = Mirror(client, KEYS, new_uid="uid-1", ask_s=3600)
        self.executor = Executor(client, self.mirror)

    def put(self, name: str, value: bytes = b"{}") -> int:
        """Write below the root as another client; return the revision."""
        return put(self.store, KEYS.root + name, value)

    def delete(self, name: str) -> int:
        return self.store.execute(Txn(success=(Delete(key=KEYS.root + name),))).revision

    def get(self, name: str) -> bytes | None:
        """Return the view's value of a key below the root."""
        kv = self.mirror.view.get(KEYS.root + name)
        return kv.value if kv is not None else None


def put(store: MemoryStore, key: str, value: bytes = b"{}") -> int:
    return store.execute(Txn(success=(Put(key=key, value=value),))).revision


@asynccontextmanager
async def rig(
    store: MemoryStore | None = None, *, network: Network | None = None, name: str = "r1"
) -> AsyncIterator[Rig]:
    """Run a mirror and an executor; yield once the view is complete."""
    store = store or MemoryStore()
    scripted = Scripted()
    made = Rig(store, store.client(name, network=network or scripted), scripted)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(made.mirror.run()), tasks.create_task(made.executor.run())]
        await made.mirror.started()
        yield made
        for task in running:
            task.cancel()


class Forgetful(MemoryStore):
    """A store that can withhold its writes from its watches."""

    forgets = False

    def subscribe(self, subscriber: Callable[[Revision], None]) -> Callable[[], None]:
        return super().subscribe(lambda written: None if self.forgets else subscriber(written))

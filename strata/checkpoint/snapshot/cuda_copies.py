"""Copies of CUDA tensors to host memory that overlap with training.

All copies of a snapshot run on a separate stream, after the current stream's earlier work. The current stream
then waits for the copies, on the device: any later change of a tensor comes after its copy, and the host never
waits. The tensors that a torch optimizer of the state owns (its parameters and its own tensors) change only in
`step` of the optimizer. So the current stream waits for their copies only at the next step, and forward and backward
overlap with these copies. Buffers, which forward changes, are copied first.

An optimizer with `capturable` may be replayed as a CUDA graph, which bypasses the optimizer's hooks. So the current
stream waits immediately for the copies of that optimizer's tensors, as for tensors that no optimizer owns.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strata.checkpoint.snapshot.memory import address_of
from strata.checkpoint.snapshot.tensors import TensorSpec, torch_view

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of one tensor on a device, and its target in host memory."""

    value: Any
    spec: TensorSpec
    into: memoryview


@dataclass(slots=True)
class Pending:
    """Copies in progress; `wait` returns when all bytes are in host memory, and releases the tensors.

    If a device failed, every call of `wait` raises: the bytes never arrive.
    """

    events: list[Any] = field(default_factory=list)
    kept: list[Copy] = field(default_factory=list)
    failed: list[RuntimeError] = field(default_factory=list)

    def wait(self) -> None:
        for event in self.events:
            try:
                event.synchronize()
            except RuntimeError as error:  # not raised yet: the other devices still copy
                self.failed.append(error)
        self.events.clear()
        self.kept.clear()
        if self.failed:
            raise self.failed[0]


def is_on_device(value: object) -> bool:
    """Return whether `value` is a tensor of plain memory on a CUDA device."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.is_cuda


def optimizers_in(state: object) -> list[Any]:
    """Return a state's torch optimizers, except any whose tensors may change outside `step`."""
    torch = sys.modules.get("torch")
    return list(_optimizers(torch, state)) if torch is not None else []


def _optimizers(torch: Any, value: object) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _optimizers(torch, item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _optimizers(torch, item)
    elif isinstance(value, torch.optim.Optimizer) and not any(
        group.get("capturable") for group in value.param_groups
    ):
        yield value


def owned_by(optimizers: Sequence[Any]) -> set[int]:
    """Return the addresses of the tensors that only these optimizers' steps change."""
    owned: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned.update(parameter.data_ptr() for parameter in group["params"])
        for own in optimizer.state.values():
            owned.update(item.data_ptr() for item in own.values() if is_on_device(item))
    return owned


class CudaCopies:
    """The streams on which one writer copies, one for each device."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def start(self, copies: Sequence[Copy], optimizers: Sequence[Any]) -> Pending:
        """Begin to copy; the tensors may be used immediately, and changed on the current streams.

        If a device fails, its error is raised after all begun copies have ended, so that the caller may reuse the
        host memory.
        """
        begun: list[Any] = []
        try:
            return self._start(copies, optimizers, begun)
        except BaseException as error:
            for stream in begun:
                try:
                    stream.synchronize()
                except RuntimeError as lost:  # this device failed, so its stream copies nothing any more
                    error.add_note(f"and a stream that was copying: {lost}")
            raise

    def _start(self, copies: Sequence[Copy], optimizers: Sequence[Any], begun: list[Any]) -> Pending:
        torch = sys.modules["torch"]
        owned = owned_by(optimizers)
        pending = Pending(kept=list(copies))
        for device in sorted({copy.value.device for copy in copies}, key=lambda device: device.index or 0):
            here = [copy for copy in copies if copy.value.device == device]
            later = [copy for copy in here if copy.value.data_ptr() in owned]
            now = [copy for copy in here if copy.value.data_ptr() not in owned]
            stream = self._streams.get(device) or torch.cuda.Stream(device=device)
            self._streams[device] = stream
            begun.append(stream)
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream), torch.no_grad():
                self._copy(torch, now)
                current.wait_event(stream.record_event())
                self._copy(torch, later)
                done = stream.record_event()
            pending.events.append(done)
            if later:
                for optimizer in optimizers:
                    _wait_at_next_step(torch, optimizer, device, done)
        return pending

    @staticmethod
    def _copy(torch: Any, copies: Sequence[Copy]) -> None:
        for copy in copies:
            torch_view(torch, copy.spec, copy.into).copy_(copy.value.detach(), non_blocking=True)


def _wait_at_next_step(torch: Any, optimizer: Any, device: Any, done: Any) -> None:
    """Make the stream that runs the optimizer's next step wait for the copies, once."""

    def hook(*_: object) -> None:
        torch.cuda.current_stream(device).wait_event(done)
        handle.remove()

    handle = optimizer.register_step_pre_hook(hook)


def pin(block: memoryview) -> Callable[[], None] | None:
    """Register memory with CUDA, so that copies to it need no host thread; return a function that unregisters it.

    Return None if CUDA refuses: then the copies are slower, but still correct.
    """
    runtime = sys.modules["torch"].cuda.cudart()
    address = address_of(block)
    code = runtime.cudaHostRegister(address, len(block), 0)
    if int(code) != 0:
        log.warning(
            "CUDA registers no %d bytes of memory (error %d): saves block longer", len(block), int(code)
        )
        return None

    def undo() -> None:
        with contextlib.suppress(RuntimeError):  # the process is exiting, and CUDA has shut down before
            runtime.cudaHostUnregister(address)

    return undo

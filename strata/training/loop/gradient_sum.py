"""`GradientSum`: adds up the gradients of all virtual ranks, in their order, on all ranks.

    each rank, for each of its virtual ranks:  a gradient           all_to_all: of every virtual rank, one slice a rank
    each rank adds up its slice of all gradients, in order          all_gather: the slices of the sum

Cost: a rank keeps V / W gradients until the step's end (V virtual ranks, W ranks), and sends (V / W + 1) times the
gradients' bytes a step, where DistributedDataParallel sends 2 times, while the backward pass still runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from strata.errors import ConfigError, InvalidArgument

BUCKET_ELEMENTS: Final = 8 << 20
"""Gradients of about so many elements are exchanged at once."""


class GradientSum:
    """The gradients of one rank; `block_sizes` has each rank's number of virtual ranks.

    `parameters` returns the optimizer's parameters. They may change from step to step, on all ranks alike.
    """

    def __init__(
        self, parameters: Callable[[], Sequence[Any]], *, block_sizes: Sequence[int], rank: int
    ) -> None:
        self._all = parameters
        self._parameters: list[Any] = []
        """The parameters of the step under way."""
        self._sizes = block_sizes
        self._rank = rank
        self._kept: list[list[Any]] = []
        """For each micro-batch its gradients, None for a parameter without one."""

    @property
    def _distributed(self) -> Any:
        return sys.modules["torch"].distributed

    def broadcast(self, tensors: Sequence[Any]) -> None:
        """Give all ranks rank 0's values."""
        if len(self._sizes) > 1:
            for tensor in tensors:
                self._distributed.broadcast(tensor.detach(), src=0)

    def keep(self) -> None:
        """Take the gradients of the micro-batch that has just ended; the parameters have none afterwards."""
        parameters = list(self._all())
        if not self._kept:
            self._parameters = parameters
        if len(parameters) != len(self._parameters):
            raise InvalidArgument(
                "the optimizer got other parameters in the middle of a step",
                hint="add parameters between two steps",
            )
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ConfigError("virtual ranks cannot add up sparse gradients", hint="use sparse=False")
        self._kept.append([parameter.grad for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    def drop(self) -> None:
        """Forget the gradients of a step that is not completed."""
        self._kept.clear()
        for parameter in self._all():
            parameter.grad = None

    def reduce(self) -> None:
        """Give every parameter the sum of its gradients over all virtual ranks; then keep none."""
        torch: Any = sys.modules["torch"]
        kept, self._kept = self._kept, []
        assert len(kept) == self._sizes[self._rank], f"{len(kept)} micro-batches of {self._sizes[self._rank]}"
        with torch.no_grad():
            used = self._used(torch, kept)
            for numbers in self._buckets(used):
                self._reduce(torch, kept, numbers)

    def _used(self, torch: Any, kept: list[list[Any]]) -> list[bool]:
        """Return for each parameter whether any micro-batch of any rank has a gradient for it."""
        here = [any(gradients[n] is not None for gradients in kept) for n in range(len(self._parameters))]
        if len(self._sizes) == 1 or not here:
            return here
        flags = torch.tensor(here, dtype=torch.int32, device=self._parameters[0].device)
        self._distributed.all_reduce(flags, op=self._distributed.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def _buckets(self, used: list[bool]) -> Iterator[list[int]]:
        """Yield the numbers of parameters that are exchanged together: of one type and device, in order."""
        bucket: list[int] = []
        elements = 0
        for number, parameter in enumerate(self._parameters):
            if not used[number]:
                continue
            first = self._parameters[bucket[0]] if bucket else parameter
            same = (first.dtype, first.device) == (parameter.dtype, parameter.device)
            if bucket and (not same or elements >= BUCKET_ELEMENTS):
                yield bucket
                bucket, elements = [], 0
            bucket.append(number)
            elements += parameter.numel()
        if bucket:
            yield bucket

    def _reduce(self, torch: Any, kept: list[list[Any]], numbers: list[int]) -> None:
        parameters = [self._parameters[number] for number in numbers]
        world, length = len(self._sizes), sum(p.numel() for p in parameters)
        part = -(-length // world)
        own = parameters[0].new_zeros((len(kept), world * part))
        for row, gradients in zip(own, kept, strict=True):
            at = 0
            for number, parameter in zip(numbers, parameters, strict=True):
                if gradients[number] is not None:
                    row[at : at + parameter.numel()] = gradients[number].reshape(-1)
                at += parameter.numel()
                gradients[number] = None
        total = self._sum(torch, own, part)
        at = 0
        for parameter in parameters:
            count = parameter.numel()
            parameter.grad = total[at : at + count].reshape(parameter.shape).clone()
            at += count

    def _sum(self, torch: Any, own: Any, part: int) -> Any:
        """Return the sum over all virtual ranks of the rows, of which `own` are this rank's."""
        world = len(self._sizes)
        if world == 1:
            return _in_order(own)
        # one slice of every row for each rank; in return, this rank's slice of every virtual rank's row
        sent = own.reshape(len(own), world, part).transpose(0, 1).reshape(-1)
        received = sent.new_empty(sum(self._sizes) * part)
        self._distributed.all_to_all_single(
            received,
            sent,
            output_split_sizes=[size * part for size in self._sizes],
            input_split_sizes=[len(own) * part] * world,
        )
        mine = _in_order(received.reshape(-1, part))
        whole = [torch.empty_like(mine) for _ in range(world)]
        self._distributed.all_gather(whole, mine)
        return torch.cat(whole)


def _in_order(rows: Any) -> Any:
    """Return the sum of the rows, added up one after another."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total

"""Virtual ranks: the same bits in a world of any size.

A step of a training with V virtual ranks is V micro-batches, whatever the world. Each rank computes the micro-batches of
a contiguous block of virtual ranks, one after another, and keeps their gradients apart. Before the optimizer steps, all
ranks add the V gradients up in the order of the virtual ranks (`GradientSum`). A floating-point sum depends on its order,
and this order is the same in every world. Before each micro-batch all random generators are seeded by its place in the
epoch, so that dropout, say, does not depend on the rank that computes the micro-batch.

    V = 6, world of 3:  rank 0: 0 1   rank 1: 2 3   rank 2: 4 5        world of 2:  rank 0: 0 1 2   rank 1: 3 4 5
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from strata.checkpoint.snapshot import rng
from strata.data.facts import DEFAULT
from strata.data.order import mix, shares
from strata.data.place import DataPlace
from strata.data.sampler import ElasticSampler, Piece
from strata.errors import ConfigError, InvalidArgument
from strata.training.loop.elastic_feed import ElasticFeed
from strata.training.loop.gradient_sum import GradientSum
from strata.training.loop.ordinary_feed import Fed
from strata.training.save.state import Position, is_parallel

_END: Final = 1 << 62
"""Added to the place of a step's beginning: the seed of the time after the step."""


def check_virtual(virtual: object, *, model: object, mesh: object) -> None:
    """Raise unless `virtual_ranks` is a number that fits the other arguments of `strata.init`."""
    if isinstance(virtual, bool) or not isinstance(virtual, int) or virtual < 0:
        raise InvalidArgument(
            f"virtual_ranks is {virtual!r}, not a number of ranks", hint="0: no virtual ranks"
        )
    if not virtual:
        return
    if mesh is not None:
        raise ConfigError("virtual ranks and a mesh exclude each other", hint="leave one of them out")
    for one in model if isinstance(model, list | tuple) else [model]:
        if is_parallel(one):
            raise ConfigError(
                "virtual ranks add up the gradients themselves, and so does DistributedDataParallel",
                hint="give strata.init the module without the wrapper, and call it in the loop",
            )


def block(place: DataPlace, virtual: int) -> range:
    """Return the virtual ranks of the rank at `place`; `ConfigError` if it would have none."""
    if virtual < place.size:
        raise ConfigError(
            f"{virtual} virtual ranks leave none for {place.size - virtual} of {place.size} ranks",
            hint=f"train with at most {virtual} ranks, or with more virtual ranks",
        )
    parts = shares(virtual, place.size)
    first = sum(parts[: place.rank])
    return range(first, first + parts[place.rank])


class VirtualFeed(ElasticFeed):
    """Steps of an `ElasticSampler` as the micro-batches of one rank's virtual ranks."""

    def __init__(
        self,
        sampler: ElasticSampler,
        place: DataPlace,
        *,
        virtual: int,
        made_of: tuple[Any, Any] | None,
        per_rank: int,
        dataset: str = DEFAULT,
    ) -> None:
        super().__init__(sampler, place.rank, place.size, made_of=made_of, per_rank=per_rank, dataset=dataset)
        self._virtual = virtual
        self._block = block(place, virtual)

    def pieces(self, done: int) -> Iterator[Piece]:
        each = (self.sampler.pieces(number, self._virtual, done=done) for number in self._block)
        for step in zip(*each, strict=True):
            for piece in step:
                yield replace(
                    piece,
                    last=piece is step[-1],
                    weight=(piece.end - piece.begin) / piece.step_samples,
                )

    def batches(
        self, epoch: int, pieces: Iterable[Piece], drawn: Iterator[Any]
    ) -> Iterator[tuple[Any, Piece]]:
        base = mix(mix(self.sampler.seed) + epoch)
        for piece in pieces:
            rng.seed(mix(base + piece.begin) >> 1)
            yield next(drawn), piece

    def epoch(self, position: Position) -> Iterator[Fed]:
        base, done = mix(mix(self.sampler.seed) + position.epoch), position.epoch_samples
        for fed in super().epoch(position):
            if fed.last:
                # the position counts the same batches on all ranks
                yield replace(fed, batches=self._virtual, seed_after=mix(base + _END + done) >> 1)
                done += fed.samples
            else:
                yield fed

    def size(self) -> int | None:
        raise ConfigError(
            "virtual ranks need the loop of run.steps, because each batch's loss has a weight there",
            hint="leave virtual_ranks out, or train in a loop of your own",
        )

    def facts(self, position: Position) -> dict[str, Any]:
        return {**super().facts(position), "virtual_ranks": self._virtual}


class RealRanks:
    """No virtual ranks: the program's gradients are left alone."""

    def takes(self, fed: Fed) -> None:
        """The loop body of a batch begins."""

    def returned(self, fed: Fed) -> None:
        """The loop body of a batch has ended, or the program has left it after the optimizer's step."""

    def sum_gradients(self, fed: Fed | None) -> None:
        """Make the gradients those of the whole step, in the body of its last batch."""

    def refuse_closure(self) -> None:
        """Raise if the optimizer may not compute gradients by a closure."""

    def begin(self) -> None:
        """The first batch is about to be handed out."""


class VirtualRanks(RealRanks):
    """Keeps the gradients of this rank's micro-batches, and adds up those of all ranks before the optimizer steps."""

    def __init__(self, state: Mapping[str, Any], place: DataPlace, virtual: int) -> None:
        models = state.get("model")
        self._models: list[Any] = models if isinstance(models, list) else [models]
        optimizers = state.get("optim")
        if models is None or optimizers is None or isinstance(optimizers, list):
            raise ConfigError(
                "virtual ranks need the model and one torch optimizer", hint="strata.init(model=…, optim=…)"
            )
        _check(self._models)
        block_sizes = shares(virtual, place.size)
        self._is_single = block_sizes[place.rank] == 1
        self._sum = GradientSum(
            lambda: [p for group in optimizers.param_groups for p in group["params"]],
            block_sizes=block_sizes,
            rank=place.rank,
        )
        self._begun = False
        self._summed: Fed | None = None
        """The last batch whose step has been summed."""

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._sum.broadcast(
                [t for model in self._models for t in (*model.parameters(), *model.buffers())]
            )

    def refuse_closure(self) -> None:
        raise InvalidArgument(
            "opt.step(closure) computes gradients that no other rank has",
            hint="with virtual ranks call backward in the loop, and opt.step() without a closure",
        )

    def takes(self, fed: Fed) -> None:
        if fed.batches == 1 or self._is_single:
            self._sum.drop()  # of a step that the program left

    def returned(self, fed: Fed) -> None:
        if not fed.last:
            self._sum.keep()
        elif fed.seed_after is not None:
            rng.seed(fed.seed_after)

    def sum_gradients(self, fed: Fed | None) -> None:
        if fed is None or not fed.last:
            raise InvalidArgument(
                "the optimizer steps before the step's last micro-batch",
                hint="call opt.step() only if run.last_of_step",
            )
        if self._summed is not fed:
            self._sum.keep()
            self._sum.reduce()
            self._summed = fed


def _check(models: Iterable[Any]) -> None:
    """Raise `ConfigError` for a model whose state or gradients would depend on the world's size."""
    for model in models:
        for name, module in model.named_modules():
            if getattr(module, "track_running_stats", False) and hasattr(module, "running_mean"):
                raise ConfigError(
                    f"{name or 'the model'} ({type(module).__name__}) keeps statistics of each rank's batches",
                    hint="with virtual ranks use GroupNorm or LayerNorm, or track_running_stats=False",
                )
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh"):
                raise ConfigError(
                    f"{name} is a DTensor: virtual ranks add up gradients of whole parameters",
                    hint="train without FSDP or tensor parallelism, or without virtual ranks",
                )

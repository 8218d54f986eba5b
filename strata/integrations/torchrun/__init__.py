"""The entry point of `torchrun --rdzv-backend=strata`.

torch loads every entry point of the group `torchrun.handlers` whenever its rendezvous is imported, even in programs
that do not use Strata. So this module imports neither grpc nor torch; the function that makes the handler does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes a handler; torch's registry requires the same function each time."""
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of one agent, without connecting; `ConfigError` if the launch cannot work."""
    from strata.integrations.torchrun.handler import StrataRendezvous  # noqa: PLC0415  # light until used

    return StrataRendezvous.create(parameters)

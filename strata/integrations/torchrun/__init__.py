"""`torchrun --rdzv-backend=strata`: the entry point, and nothing else.

torch loads every entry point of the group `torchrun.handlers` whenever its rendezvous is imported,
also in programs that never heard of Strata. So this module imports neither grpc nor torch; that is
left to the function that makes the handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a handler, as torch's registry wants it: always the same function."""
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of one agent; `ConfigError` when the launch cannot work. Connects nothing."""
    from strata.integrations.torchrun.handler import StrataRendezvous  # noqa: PLC0415  # light until used

    return StrataRendezvous.create(parameters)

"""The arguments of `StrataWriter` and `StrataReader`, and the storage root that both open.

Under `strata run`, or with a client, the coordinators keep the checkpoint catalog. Elsewhere DCP's own collectives
coordinate the ranks: rank 0 keeps the catalog, and the marker in storage commits a checkpoint.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint import filesystem

from strata.client.checkpoints.config import CheckpointManagerConfig
from strata.client.checkpoints.port import SessionPort, check_port
from strata.client.checkpoints.root import OpenRoot
from strata.client.rank.process_environment import session_of_rank
from strata.errors import ConfigError, InvalidArgument
from strata.integrations.dcp.relay import BorrowedPort

_STEP: Final = re.compile(
    r"(?:[A-Za-z._=-]*[A-Za-z][._=-]|(?:[A-Za-z._=-]*[._=-])?(?:step|checkpoint|epoch))?([0-9]+)\Z"
)

DCP_VERSION: Final[str | None] = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""The version that torch's own writer puts into DCP's metadata; None if this torch writes no version."""
BORROWED_RETRY_S: Final = 0.2
"""How often a process without pushed updates polls whether its save is committed."""


def session_of(client: SessionPort | None) -> SessionPort | None:
    """Return `client` if given, else under `strata run` this rank's session, else None."""
    if client is None and os.environ.get("STRATA_SOCKET"):
        client = session_of_rank()
    if client is not None:
        check_port(client)
    return client


def opened(config: CheckpointManagerConfig, port: SessionPort | None, *, ranks: int = 1) -> OpenRoot:
    """Open the storage root for one rank of `ranks`."""
    if config.replica_path is not None:
        raise ConfigError("a second storage is for CheckpointManager", hint="leave replica_path out")
    retry_s = BORROWED_RETRY_S if isinstance(port, BorrowedPort) else None
    return OpenRoot(config, port, ranks=ranks, retry_s=retry_s)


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the step that DCP's `checkpoint_id` names: "120", or a path ending in one, such as runs/checkpoint-120.

    Words may precede the number, each with a separator: step-120, iter_0000120. Only step, checkpoint and epoch may
    touch the number, as in global_step120. `InvalidArgument` for any other name: resnet50, model-v2, a name with two
    numbers, or with anything after the number.
    """
    named = _STEP.match(Path(checkpoint_id).name)
    if named is None:
        raise InvalidArgument(
            f"checkpoint_id is {str(checkpoint_id)!r}, which names no step",
            hint='give the step, as in "120", "checkpoint-120" or "global_step120": a name that ends in one number,'
            " apart from its words",
        )
    return int(named[1])

"""Where a writer or a reader works: a storage root, and the catalog of what is in it.

Under `strata run`, or with a client, that is the coordinators'. Elsewhere DCP's own collectives
coordinate the ranks: rank 0 keeps the catalog, and the marker in storage is what commits.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from strata.checkpoint import root
from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.local_catalog import LocalCatalog
from strata.checkpoint.opening import open_storage
from strata.checkpoint.sink import Storage
from strata.client.checkpoint_catalog import CoordinatedCatalog
from strata.client.checkpoint_config import CheckpointManagerConfig
from strata.client.checkpoint_port import PORT_MEMBERS, SessionPort
from strata.core.records import CheckpointState
from strata.errors import CheckpointNotFound, ConfigError, InvalidArgument

_STEP: Final = re.compile(
    r"(?:[A-Za-z._=-]*[A-Za-z][._=-]|(?:[A-Za-z._=-]*[._=-])?(?:step|checkpoint|epoch))?([0-9]+)\Z"
)

BORROWED_ASK_AGAIN_S: Final = 0.2
"""How often a process that is pushed nothing asks whether its save is committed."""


@dataclass(slots=True)
class Room:
    """A storage root and its catalog, for one rank."""

    storage: Storage
    catalog: CoordinatedCatalog | LocalCatalog

    @property
    def coordinated(self) -> bool:
        return isinstance(self.catalog, CoordinatedCatalog)

    def find(self, step: int | None) -> CheckpointMetadata:
        """Return the committed checkpoint of `step`, or where a restore begins."""
        if step is None:
            point = self.catalog.restore_point()
            if point is None:
                raise CheckpointNotFound(f"{self.storage.uri} has no checkpoint to begin from")
            return point
        found = [c for c in self.catalog.all() if c.step == step and c.state is CheckpointState.COMMITTED]
        if not found:
            raise CheckpointNotFound(f"no checkpoint of step {step} is committed in {self.storage.uri}")
        return found[-1]

    def close(self) -> None:
        if isinstance(self.catalog, CoordinatedCatalog):
            self.catalog.close()
        else:
            self.catalog.go_back()


def configured(
    storage_path: str | Path | None, config: CheckpointManagerConfig | None, settings: dict[str, Any]
) -> CheckpointManagerConfig:
    """Return what a writer or a reader was told, as a `CheckpointManager` would take it."""
    if storage_path is not None:
        settings = {**settings, "storage_path": storage_path}
    try:
        return replace(config or CheckpointManagerConfig(), **settings)
    except TypeError as error:
        raise ConfigError(str(error)) from None


def session_of(client: SessionPort | None) -> SessionPort | None:
    """Return the session to work with: the one given, under `strata run` this rank's, else none."""
    if client is None and os.environ.get("STRATA_SOCKET"):
        from strata.client.joining import connect  # noqa: PLC0415  # imports grpc

        client = connect()
    missing = [name for name in PORT_MEMBERS if client is not None and not hasattr(client, name)]
    if missing:
        raise ConfigError(
            f"client is a {type(client).__name__}, which has no {missing[0]!r}",
            hint="pass what strata.connect() returned",
        )
    return client


def open_room(
    config: CheckpointManagerConfig, port: SessionPort | None, *, ranks: int, writing: bool
) -> Room:
    """Return the room of one rank of `ranks`; a root that is written to is claimed."""
    if config.replica_path is not None:
        raise ConfigError("a second storage is for CheckpointManager", hint="leave replica_path out")
    storage = open_storage(config.place(), nonce=_random_id)
    if port is None:
        if writing or root.owner_of(storage) is not None:
            root.claim(storage, root.STANDALONE)
        catalog = LocalCatalog(
            storage, new_id=_random_id, now_unix_ms=lambda: time.time_ns() // 1_000_000, world_size=ranks
        )
        return Room(storage, catalog)
    if not port.uid:
        raise ConfigError("the session does not know its cluster yet", hint="connect it first")
    root.claim(storage, root.COORDINATED)
    root.claim(storage, f"{root.COORDINATED}:{port.uid}/{port.job}", folder=port.job)
    return Room(
        storage,
        CoordinatedCatalog(
            port,
            root_uri=storage.uri,
            new_id=_random_id,
            save_wait_s=config.save_wait_s,
            ask_again_s=BORROWED_ASK_AGAIN_S,
        ),
    )


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the step that DCP's `checkpoint_id` names: "120", or a path that ends so, as in runs/checkpoint-120.

    Words may stand before the number, each apart: step-120, iter_0000120. Only step, checkpoint and epoch may touch
    it, as in global_step120. `InvalidArgument` for any other: resnet50, model-v2, a name with two numbers or with
    anything behind.
    """
    named = _STEP.match(Path(checkpoint_id).name)
    if named is None:
        raise InvalidArgument(
            f"checkpoint_id is {str(checkpoint_id)!r}, which names no step",
            hint='give the step, as in "120", "checkpoint-120" or "global_step120": a name that ends in one number,'
            " apart from its words",
        )
    return int(named[1])


def _random_id() -> str:
    return uuid.uuid4().hex

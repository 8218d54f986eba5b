"""A storage root opened for one rank: its storages, its catalog, and the rank's part in maintenance.

`CheckpointManager` and the storage classes for torch's DCP use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.storage import root
from strata.client.checkpoints.config import CheckpointManagerConfig
from strata.client.checkpoints.retention import retain
from strata.client.checkpoints.tiers import Tiers
from strata.client.rank.process_environment import now_unix_ms, random_id

if TYPE_CHECKING:
    from strata.client.checkpoints.catalog import CoordinatedCatalog
    from strata.client.checkpoints.port import SessionPort
    from strata.client.checkpoints.upkeep import Upkeep


class OpenRoot:
    """An open storage root. With a session, the coordinators keep the catalog. Without a session, this process
    keeps the catalog for `ranks` ranks.

    Raise `ConfigError` if the root belongs to the other mode. `retry_s` is the interval at which waiting
    callers request a record, for sessions without pushes.
    """

    def __init__(
        self,
        config: CheckpointManagerConfig,
        client: SessionPort | None,
        *,
        ranks: int = 1,
        retry_s: float | None = None,
    ) -> None:
        self.config: Final = config
        self.tiers: Final = Tiers(config, nonce=random_id)
        self.storage: Final = self.tiers.storage
        self.root_ids: dict[str, str] = {}
        """The ids of the job's folders, by the URIs of their roots. Hosts that share a root read the same id."""
        self.upkeep: Upkeep | None = None
        self.catalog: CoordinatedCatalog | LocalCatalog
        if client is not None:
            self.catalog = self._coordinate(client, retry_s)
        else:
            self.tiers.claim_again(root.STANDALONE)
            self.catalog = LocalCatalog(
                self.storage, new_id=random_id, now_unix_ms=now_unix_ms, world_size=ranks
            )

    def _coordinate(self, client: SessionPort, retry_s: float | None) -> CoordinatedCatalog:
        from strata.client.checkpoints.catalog import (  # noqa: PLC0415  # imports protobuf
            RETRY_S,
            CoordinatedCatalog,
        )
        from strata.client.checkpoints.port import check_port  # noqa: PLC0415  # as above
        from strata.client.checkpoints.upkeep import Upkeep  # noqa: PLC0415  # as above

        check_port(client)
        self.tiers.claim(root.COORDINATED)
        owner = root.job_owner(client.uid, client.job)
        self.root_ids = self.tiers.claim(owner, folder=client.job)
        catalog = CoordinatedCatalog(
            client,
            root_uri=self.storage.uri,
            new_id=random_id,
            save_wait_s=self.config.save_wait_s,
            retry_s=RETRY_S if retry_s is None else retry_s,
        )
        self.upkeep = Upkeep(catalog, self.storage, self.config)
        return catalog

    def claim(self) -> None:
        """Claim the root for processes without coordinators; `ConfigError` if it has another owner."""
        if isinstance(self.catalog, LocalCatalog):
            self.tiers.claim(root.STANDALONE)

    def collect_garbage(self) -> None:
        """After a commit, remove the checkpoints that no rule keeps; under coordinators, only rank 0 removes them."""
        if isinstance(self.catalog, LocalCatalog):
            retain(self.catalog, self.storage, self.config.keep, now_unix_ms=now_unix_ms())
        elif self.upkeep is not None and self.catalog.rank == 0:
            self.upkeep.after_commit()

    def close(self, *, saving: bool = False) -> None:
        """End all maintenance. Idempotent.

        Unless a save is still in flight (`saving`), other processes may now remove this process's unfinished saves.
        """
        self.release()
        if self.upkeep is not None:
            self.upkeep.close()
        if isinstance(self.catalog, LocalCatalog) and not saving:
            self.catalog.go_back()

    def release(self) -> None:
        """Stop observing, without waiting."""
        if self.upkeep is not None:
            self.upkeep.release()
        if not isinstance(self.catalog, LocalCatalog):
            self.catalog.close()

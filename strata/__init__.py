"""Strata: a highly available control plane for distributed model training.

    import strata
    with strata.connect() as client:             # this process's rank, in a world
        client.barrier("ready")

Names are imported when they are first used, so importing this package is cheap and does not import grpc. A standalone
process must import this package before grpc: gRPC reads `GRPC_ENABLE_FORK_SUPPORT` once, at its import. If the
variable is not 0 at that moment, forked DataLoader workers of a process with a session crash.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

if "grpc" not in sys.modules:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# If grpc is imported already, setting the variable has no effect: `strata.session.fork` reports it before it uses grpc.

_HOME = {
    "AsyncCheckpointWriter": "checkpoint.save.writer",
    "CheckpointAck": "checkpoint.catalog.protocol",
    "CheckpointInfo": "client.checkpoints.manager",
    "CheckpointManager": "client.checkpoints.manager",
    "CheckpointManagerConfig": "client.checkpoints.manager",
    "CheckpointMetadata": "client.checkpoints.manager",
    "CheckpointType": "core.kv.records",
    "CoordinatorClient": "client.api.coordinator",
    "DatasetRegistry": "client.api.datasets",
    "RankClient": "client.rank.rank_client",
    "RecoveryResponse": "v1.recovery_pb2",
    "ShardManager": "client.api.shards",
    "TrainingOrchestrator": "training.orchestrator",
    "TrainingConfig": "config.training",
    "TrainingWorld": "training.world",
    "ElasticSampler": "data.sampler",
    "Run": "training.loop.run",
    "connect": "client.rank.connect",
    "deterministic": "training.determinism",
    "init": "training.init",
    **dict.fromkeys(
        (
            "BarrierBroken",
            "BarrierTimeout",
            "CheckpointAborted",
            "CheckpointCorrupt",
            "CheckpointError",
            "CheckpointNotFound",
            "ClusterReplaced",
            "ClusterRestored",
            "ConfigError",
            "Conflict",
            "InvalidArgument",
            "JobDone",
            "JobFailed",
            "NotFound",
            "NotLeader",
            "OutcomeUnknown",
            "PermissionDenied",
            "Preempted",
            "QuotaExceeded",
            "Refused",
            "StaleGeneration",
            "StaleIncarnation",
            "StorageError",
            "StrataError",
            "Unauthenticated",
            "Unavailable",
        ),
        "errors",
    ),
}
"""The module of each public name. `__init__.pyi` is the same list for type checkers."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = import_module("importlib.metadata").version("strata-control")
        return globals()[name]
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

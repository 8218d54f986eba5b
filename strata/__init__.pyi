# What `__init__.py` imports when it is first used, for type checkers.

from strata.checkpoint.catalog.protocol import CheckpointAck as CheckpointAck
from strata.checkpoint.save.writer import AsyncCheckpointWriter as AsyncCheckpointWriter
from strata.client.api.coordinator import CoordinatorClient as CoordinatorClient
from strata.client.api.datasets import DatasetRegistry as DatasetRegistry
from strata.client.api.shards import ShardManager as ShardManager
from strata.client.checkpoints.manager import CheckpointInfo as CheckpointInfo
from strata.client.checkpoints.manager import CheckpointManager as CheckpointManager
from strata.client.checkpoints.manager import CheckpointManagerConfig as CheckpointManagerConfig
from strata.client.checkpoints.manager import CheckpointMetadata as CheckpointMetadata
from strata.client.rank.connect import connect as connect
from strata.client.rank.rank_client import RankClient as RankClient
from strata.config.training import TrainingConfig as TrainingConfig
from strata.core.kv.records import CheckpointType as CheckpointType
from strata.data.sampler import ElasticSampler as ElasticSampler
from strata.errors import BarrierBroken as BarrierBroken
from strata.errors import BarrierTimeout as BarrierTimeout
from strata.errors import CheckpointAborted as CheckpointAborted
from strata.errors import CheckpointCorrupt as CheckpointCorrupt
from strata.errors import CheckpointError as CheckpointError
from strata.errors import CheckpointNotFound as CheckpointNotFound
from strata.errors import ClusterReplaced as ClusterReplaced
from strata.errors import ConfigError as ConfigError
from strata.errors import Conflict as Conflict
from strata.errors import InvalidArgument as InvalidArgument
from strata.errors import JobDone as JobDone
from strata.errors import JobFailed as JobFailed
from strata.errors import NotFound as NotFound
from strata.errors import NotLeader as NotLeader
from strata.errors import OutcomeUnknown as OutcomeUnknown
from strata.errors import PermissionDenied as PermissionDenied
from strata.errors import Preempted as Preempted
from strata.errors import QuotaExceeded as QuotaExceeded
from strata.errors import Refused as Refused
from strata.errors import StaleGeneration as StaleGeneration
from strata.errors import StaleIncarnation as StaleIncarnation
from strata.errors import StorageError as StorageError
from strata.errors import StrataError as StrataError
from strata.errors import Unauthenticated as Unauthenticated
from strata.errors import Unavailable as Unavailable
from strata.training.init import init as init
from strata.training.loop.run import Run as Run
from strata.training.orchestrator import TrainingOrchestrator as TrainingOrchestrator
from strata.training.world import TrainingWorld as TrainingWorld
from strata.v1.recovery_pb2 import RecoveryResponse as RecoveryResponse

__version__: str

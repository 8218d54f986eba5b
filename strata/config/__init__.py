"""Configuration: flag > environment `STRATA_*` > TOML file > default, validated when it is loaded."""

from strata.config.client import ClientConfig, LibraryConfig
from strata.config.coordinator import CoordinatorConfig, EtcdConfig, LogConfig, is_loopback, split_address
from strata.config.credentials import Credentials
from strata.config.health import HealthConfig
from strata.config.loading import Setting, load, read_file, setting, settings
from strata.config.run import RunConfig
from strata.config.training import TrainingConfig

__all__ = [
    "ClientConfig",
    "CoordinatorConfig",
    "Credentials",
    "EtcdConfig",
    "HealthConfig",
    "LibraryConfig",
    "LogConfig",
    "RunConfig",
    "Setting",
    "TrainingConfig",
    "is_loopback",
    "load",
    "read_file",
    "setting",
    "settings",
    "split_address",
]

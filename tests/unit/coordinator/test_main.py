"""The name a replica goes by."""

from __future__ import annotations

import socket

import pytest

from strata.config import CoordinatorConfig
from strata.coordinator.main import _name
from strata.core.authority import Identity, Role
from strata.errors import ConfigError


def test_it_is_made_of_host_and_port() -> None:
    assert _name(CoordinatorConfig(), None) == f"{socket.gethostname()}-50051"
    assert _name(CoordinatorConfig(replica="east-1"), None) == "east-1"


def test_it_is_that_of_its_certificate() -> None:
    mine = Identity(cluster="default", role=Role.COORDINATOR, id="east-1")
    assert _name(CoordinatorConfig(), mine) == "east-1"
    assert _name(CoordinatorConfig(listen="127.0.0.1:0"), mine) == "east-1"


@pytest.mark.parametrize(
    "config",
    [
        CoordinatorConfig(listen="127.0.0.1:0"),
        CoordinatorConfig(replica="no/name"),
        CoordinatorConfig(cluster="no name"),
    ],
)
def test_what_cannot_be_a_name_is_a_mistake_of_the_configuration(config: CoordinatorConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        _name(config, None)
    assert caught.value.hint

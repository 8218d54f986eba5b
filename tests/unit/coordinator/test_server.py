"""How a replica dials its peers."""

from __future__ import annotations

import pytest

from strata.config import CoordinatorConfig
from strata.coordinator.server import Dialer
from strata.core.timing import Timing
from strata.errors import ConfigError


@pytest.mark.parametrize("address", ["10.9.8.7:50051", "host2:50051", "[fd00::1]:50051"])
async def test_a_peer_elsewhere_is_not_spoken_to_in_plaintext(address: str) -> None:
    """It would be shown our token, and believed whoever it is."""
    dial = Dialer(CoordinatorConfig(), Timing.derive(5.0))
    with pytest.raises(ConfigError, match="would be spoken to in plaintext"):
        async with dial(address):
            pass

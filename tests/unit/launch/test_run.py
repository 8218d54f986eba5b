"""The small decisions of `strata run` before it is a member."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from strata.client import Endpoint, parse_endpoints
from strata.config import RunConfig
from strata.errors import ConfigError, InvalidArgument, StrataError
from strata.launch import run


@pytest.mark.parametrize(
    ("endpoint", "address"), [("127.0.0.1", "127.0.0.1"), ("http://[::1]:50051", "::1"), ("127.0.0.2:7", "")]
)
def test_ranks_are_reached_where_the_route_to_the_coordinators_begins(endpoint: str, address: str) -> None:
    found = run._address_towards(parse_endpoints(endpoint)[0])
    assert found == address or (not address and found.startswith("127."))


@pytest.mark.parametrize("endpoint", [Endpoint(host="no-such-host.invalid", port=1), Endpoint(path="/run/s")])
def test_without_a_route_the_host_s_name_has_to_do(endpoint: Endpoint) -> None:
    assert run._address_towards(endpoint) == socket.gethostname()


async def test_a_program_that_is_not_there_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n")
    for command in ("no-such-program", str(script)):
        with pytest.raises(ConfigError, match="no program"):
            await run.run_supervisor(RunConfig(), [command])


@pytest.mark.parametrize(
    "config",
    [RunConfig(endpoints=("a:b",)), RunConfig(job="../x"), RunConfig(worker_id="two words")],
    ids=["endpoints", "job", "worker"],
)
async def test_names_that_no_cluster_knows_are_refused(config: RunConfig) -> None:
    with pytest.raises(StrataError) as refused:
        await run.run_supervisor(config, ["true"])
    assert isinstance(refused.value, ConfigError | InvalidArgument)

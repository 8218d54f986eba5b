"""The network of the namespace backend: the effect of each rule on a real connection between two hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from strata.processes.children import Child
from strata_chaos import backends
from strata_chaos.backends import netns
from strata_chaos.backends.base import Host, Rule
from tests.conftest import Need

PORT = 9999
SERVER = f"""
import socket, sys
listening = socket.create_server(("0.0.0.0", {PORT}))
print("serving", flush=True)
while True:
    listening.accept()[0].close()
"""
CLIENT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.5)
except TimeoutError:
    print("silence")
except ConnectionRefusedError:
    print("refused")
else:
    print("reached")
"""


class Pair:
    """Two hosts, each with a server, and the network between them."""

    def __init__(self, one: Host, two: Host) -> None:
        self.one, self.two = one, two
        self.network = netns.IptablesNetwork([one, two])

    def reach(self, host: Host, other: Host) -> str:
        """Return the result of a connection from one host to the other: "reached", "silence" or "refused"."""
        command = [*host.enter, sys.executable, "-c", CLIENT, other.address, str(PORT)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def both(self) -> tuple[str, str]:
        return self.reach(self.one, self.two), self.reach(self.two, self.one)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    need: Need = request.getfixturevalue("module_need")
    why_not = backends.ALL["netns"].available()
    need("netns", not why_not, why_not)
    with netns._guarded() as prefix:
        one, two = netns._build(prefix, netns._free_subnet(), ["coordinator-1", "coordinator-2"])
        servers = []
        for host in (one, two):
            child = Child.start([*host.enter, sys.executable, "-c", SERVER], stdout=subprocess.DEVNULL)
            servers.append(child)
        it = Pair(one, two)
        while it.both() != ("reached", "reached"):
            assert all(child.poll() is None for child in servers)
        yield it
        for child in servers:
            child.kill()
            child.join()


@pytest.fixture(scope="module")
def module_need() -> Need:
    from tests.conftest import need  # noqa: PLC0415  # the fixture `need` has function scope

    return need


def rule(host: Host, peer: Host, *, inbound: bool, reject: bool = False) -> Rule:
    return Rule(host=host.name, peer=peer.address, inbound=inbound, reject=reject)


def test_a_cut_drops_packets_silently_and_counts_them(pair: Pair) -> None:
    pair.network.cut("f1", [rule(pair.one, pair.two, inbound=way) for way in (True, False)])
    assert pair.network.packets("f1") == {pair.one.name: 0}

    assert pair.both() == ("silence", "silence")
    assert pair.network.packets("f1")[pair.one.name] >= 2

    pair.network.mend("f1")
    assert pair.both() == ("reached", "reached")
    assert pair.network.packets("f1") == {}


def test_rejected_packets_read_as_connection_refused(pair: Pair) -> None:
    """The fault `reject-pair` uses the same rules."""
    hosts = ((pair.one, pair.two), (pair.two, pair.one))
    pair.network.cut("f2", [rule(host, peer, inbound=False, reject=True) for host, peer in hosts])

    assert pair.both() == ("refused", "refused")
    assert all(pair.network.packets("f2").values())

    pair.network.mend("f2")
    assert pair.both() == ("reached", "reached")


def test_two_cuts_do_not_mend_each_other(pair: Pair) -> None:
    for key in ("f3", "f4"):
        pair.network.cut(key, [rule(pair.two, pair.one, inbound=True)])

    pair.network.mend("f3")
    assert pair.reach(pair.one, pair.two) == "silence"

    pair.network.mend("f4")
    pair.network.mend("f4")
    assert pair.reach(pair.one, pair.two) == "reached"


def test_the_observer_still_reaches_hosts_that_a_cut_separates(pair: Pair) -> None:
    """The observer and health checks use an address that no rule names, so a cut does not affect them."""
    pair.network.cut("f5", [rule(pair.one, pair.two, inbound=way) for way in (True, False)])

    here = Host(name="here", address="")
    assert pair.reach(here, pair.one) == "reached"

    pair.network.mend("f5")

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata_chaos import backends, faults
from strata_chaos.backends.base import Rule
from strata_chaos.backends.netns import _match
from strata_chaos.faults import Fault

PAGE = Path("docs/chaos/README.md")


@pytest.mark.parametrize("fault", faults.ALL.values(), ids=lambda fault: fault.name)
def test_a_fault_has_a_name_a_summary_and_a_backend(fault: Fault) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", fault.name)
    assert fault.summary
    assert any(not fault.available(backend) for backend in backends.ALL), "it can be had somewhere"


def test_every_process_has_a_kill_and_a_freeze_fault() -> None:
    whom = {"leader", "follower", "all-replicas", "rank", "member", "agent"}
    whom |= {"etcd-leader", "etcd-follower", "etcd-majority"}

    assert {f"{how}-{who}" for how in ("kill", "freeze") for who in whom} <= set(faults.ALL)


def test_the_page_has_every_fault_with_its_summary() -> None:
    table = dict(re.findall(r"^\| `([a-z-]+)` \| ([a-z, ]+) \| .*\|$", PAGE.read_text(), re.MULTILINE))

    where = {
        name: ", ".join(backend for backend in backends.ALL if not fault.available(backend))
        for name, fault in faults.ALL.items()
    }
    assert {name: table.get(name) for name in where} == where
    for fault in faults.ALL.values():
        assert fault.summary in PAGE.read_text(), fault.name


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule(host="a", peer="10.0.0.2", inbound=True), "-s 10.0.0.2 -j DROP"),
        (Rule(host="a", peer="10.0.0.2", inbound=False), "-d 10.0.0.2 -j DROP"),
        (
            Rule(host="a", peer="10.0.0.2", inbound=False, reject=True),
            "-d 10.0.0.2 -p tcp -j REJECT --reject-with tcp-reset",
        ),
        (
            Rule(host="a", peer="10.0.0.2", inbound=True, port=2379),
            "-s 10.0.0.2 -p tcp --dport 2379 -j DROP",
        ),
    ],
)
def test_network_rules_become_iptables_arguments(rule: Rule, words: str) -> None:
    assert " ".join(_match(rule)) == words

"""The printed commands that repair etcd: their order, their options, and no password in them."""

from __future__ import annotations

from pathlib import Path

from strata.cli.etcd.remedies import Connection, corrupt_remedy, no_space_remedy, replacement_command

ETCD = Connection(endpoints=("a:2379", "b:2379"))


def test_the_nospace_remedy_defragments_and_then_disarms() -> None:
    assert no_space_remedy(ETCD, voters=2) == (
        "strata etcd defrag --compact --etcd a:2379,b:2379",
        "strata etcd alarm --disarm --etcd a:2379,b:2379",
    )


def test_the_remedy_for_a_single_member_cluster_uses_stall_all() -> None:
    assert "--stall-all" in no_space_remedy(ETCD, voters=1)[0]


def test_a_corrupt_member_is_replaced_and_then_its_alarm_disarmed() -> None:
    assert corrupt_remedy(ETCD, ["etcd-2"]) == (
        "strata etcd replace-member etcd-2 --etcd a:2379,b:2379",
        "strata etcd alarm --disarm --etcd a:2379,b:2379",
    )


def test_the_options_are_those_that_were_given() -> None:
    connection = Connection(
        endpoints=("https://[::1]:2379",), config=Path("/etc/my strata.toml"), insecure=True
    )
    assert replacement_command(connection, "etcd-1") == (
        "strata etcd replace-member etcd-1 --etcd 'https://[::1]:2379' --config '/etc/my strata.toml' --insecure"
    )

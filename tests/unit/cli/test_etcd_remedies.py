"""The commands that mend a full etcd: their order, their flags, and no password in them."""

from __future__ import annotations

from pathlib import Path

from strata.cli.etcd_remedies import quota_remedy
from strata.config import EtcdConfig

MEMBERS = ("a:2379", "[::1]:2380")


def test_compact_then_defragment_each_member_then_disarm() -> None:
    both = "'--endpoints=http://a:2379,http://[::1]:2380'"
    assert quota_remedy(EtcdConfig(), MEMBERS, revision=42) == (
        f"etcdctl {both} compact --physical 42",
        "etcdctl --endpoints=http://a:2379 --command-timeout=60s defrag",
        "etcdctl '--endpoints=http://[::1]:2380' --command-timeout=60s defrag",
        f"etcdctl {both} alarm disarm",
    )


def test_the_flags_are_those_of_the_configuration(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("s3cret")
    password.chmod(0o600)
    config = EtcdConfig(
        ca_file=Path("/etc/my ca.crt"),
        cert_file=Path("/etc/c.crt"),
        key_file=Path("/etc/c.key"),
        username="root",
        password_file=password,
    )
    for command in quota_remedy(config, MEMBERS[:1], revision=7):
        assert command.startswith(
            "etcdctl --endpoints=https://a:2379 '--cacert=/etc/my ca.crt' --cert=/etc/c.crt"
            " --key=/etc/c.key --user=root "
        )
        assert "s3cret" not in command

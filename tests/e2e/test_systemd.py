"""deploy/etcd's units under a real systemd in a container: started, killed, frozen, misconfigured, stopped."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testcontainers.core.container import DockerContainer
from testcontainers.core.image import DockerImage

from tests.conftest import Need
from tests.e2e.conftest import DEPLOY
from tests.e2e.engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 90.0
ETCD = tuple(f"strata-etcd@etcd-{i}" for i in (1, 2, 3))
COORDINATORS = tuple(f"strata-coordinator@coordinator-{i}" for i in (1, 2, 3))

# User namespaces are off because an unprivileged container does not grant them; the timeouts are shorter.
COORDINATOR_DROP_IN = "[Service]\nPrivateUsers=no\nWatchdogSec=3s\nTimeoutAbortSec=1s\n"
BACKUP_DROP_IN = "[Service]\nPrivateUsers=no\n"
ETCD_DROP_IN = "[Service]\nPrivateUsers=no\n"


class Host:
    """A container that runs systemd, prepared by the README's steps for all three instances."""

    def __init__(self, engine: Engine, image: str, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.container = (
            DockerContainer(image, name=f"strata-test-{secrets.token_hex(4)}", env={"container": "docker"})
            .with_volume_mapping("/sys/fs/cgroup", "/sys/fs/cgroup", "rw")
            .with_tmpfs_mount("/run")
            .with_tmpfs_mount("/tmp")
            .with_kwargs(
                entrypoint="/lib/systemd/systemd",
                user="0:0",
                network="none",
                cap_add=["SYS_ADMIN", "SYS_NICE"],
                security_opt=["seccomp=unconfined", "apparmor=unconfined"],
                cgroupns="host",
            )
        )

    def start(self) -> None:
        """Start systemd."""
        self.container.start()
        self.sh("until systemctl is-system-running --wait; do :; done")

    def install(self) -> None:
        """Do the README's steps for a host, with three instances on one loopback."""
        etc = self.folder / "strata"
        localhost = ("--host", "localhost") * 3
        self.engine.script(str(DEPLOY / "make-certs"), "--out", str(etc / "tls"), *localhost)
        units = DEPLOY / "systemd"
        for name in ("etcd.env", "coordinator.env"):
            (etc / name).write_text(on_loopback((units / name).read_text()))
        for kind in ("etcd", "coordinator"):
            text = (units / f"{kind}-1.env").read_text()
            for i in (1, 2, 3):
                (etc / f"{kind}-{i}.env").write_text(on_loopback(text.replace("host1", f"host{i}"), own=i))
        copy = self.container.copy_into_container
        copy(etc, "/etc")
        for program in (DEPLOY / "build" / "etcd").iterdir():
            copy(program, f"/usr/local/bin/{program.name}", 0o755)
        copy(units / "strata.sysusers", "/usr/lib/sysusers.d/strata.conf")
        copy(units / "strata.tmpfiles", "/usr/lib/tmpfiles.d/strata.conf")
        for kind, drop_in in (("etcd", ETCD_DROP_IN), ("coordinator", COORDINATOR_DROP_IN)):
            unit = f"strata-{kind}@.service"
            copy(units / unit, f"/etc/systemd/system/{unit}")
            copy(drop_in.encode(), f"/etc/systemd/system/{unit}.d/container.conf")
        self.sh("chown -R root:root /etc/strata")
        self.sh("systemd-sysusers && systemd-tmpfiles --create strata.conf && systemctl daemon-reload")

    def sh(self, script: str) -> str:
        """Run a script in the container; it must succeed."""
        done = self.container.exec(["timeout", f"{LIMIT_S:g}", "sh", "-ec", script])
        printed = done.output.decode()
        assert done.exit_code == 0, f"{script} exited with {done.exit_code}:\n{printed[-6000:]}"
        return printed

    def property(self, unit: str, name: str) -> str:
        return self.sh(f"systemctl show --value --property {name} {unit}").strip()

    def wait(self, unit: str, name: str, wanted: str) -> None:
        """Return once a unit's property matches; fail with the unit's log."""
        deadline = time.monotonic() + LIMIT_S
        while not re.fullmatch(wanted, found := self.property(unit, name)):
            if time.monotonic() > deadline:
                log = self.sh(f"journalctl --no-pager --lines 40 --unit {unit}")
                raise AssertionError(f"{unit}: {name} is {found}, not {wanted}:\n{log}")


def on_loopback(text: str, *, own: int = 0) -> str:
    """Return a host's configuration for all three on one loopback: instance i has ports 1i379, 5005i…"""
    text = re.sub(r"host([123]):2(\d\d\d)", r"localhost:1\1\2", text)
    text = re.sub(r"(?:0\.0\.0\.0|127\.0\.0\.1):2(\d\d\d)", rf"127.0.0.1:1{own}\1", text)
    text = re.sub(r"host([123]):50051", r"localhost:5005\1", text)
    return text.replace("0.0.0.0:50051", f"127.0.0.1:5005{own}").replace(
        "127.0.0.1:8080", f"127.0.0.1:808{own}"
    )


@pytest.fixture
def host(engine: Engine, build_context: str, tmp_path: Path, need: Need) -> Iterator[Host]:
    tag = f"strata-test-host:{secrets.token_hex(4)}"
    arguments = {"BASE_IMAGE": build_context}
    with DockerImage(DEPLOY, tag=tag, buildargs=arguments, target="coordinator"):
        found = engine.client.containers.run(
            tag,
            ["-c", "ls /lib/systemd/systemd || true"],
            entrypoint="sh",
            network_mode="none",
            remove=True,
        )
        need(
            "systemd",
            bool(found),
            "a base image with systemd, as make-base makes with it",
        )
        made = Host(engine, tag, tmp_path)
        try:
            made.start()
            made.install()
            yield made
        finally:
            made.container.stop()


def test_systemd_starts_monitors_restarts_and_stops_the_units(host: Host) -> None:
    host.sh(f"systemctl start --no-block {' '.join(ETCD)}")
    host.sh(f"systemctl start {' '.join(COORDINATORS)}")  # returns once all of them serve
    for unit in (*ETCD, *COORDINATORS):
        host.wait(unit, "ActiveState", "active")
    assert host.property(COORDINATORS[0], "StatusText") == "serves"
    credentials = " ".join(
        f"STRATA_TLS_{what.upper()}_FILE=/etc/strata/tls/operator/{what}.pem"
        for what in ("cert", "key", "ca")
    )
    shown = host.sh(f"{credentials} strata status -e localhost:50051,localhost:50052,localhost:50053")
    assert shown.count("yes") == 6, shown

    check_backup(host)

    killed, frozen, misled = COORDINATORS
    restarts = int(host.property(killed, "NRestarts"))
    host.sh(f"systemctl kill --signal SIGKILL {killed}")
    host.wait(killed, "NRestarts", str(restarts + 1))
    host.wait(killed, "StatusText", "serves")

    restarts = int(host.property(frozen, "NRestarts"))
    host.sh(f"kill -STOP {host.property(frozen, 'MainPID')}")
    host.wait(frozen, "NRestarts", str(restarts + 1))
    host.wait(frozen, "StatusText", "serves")
    assert "Watchdog timeout" in host.sh(f"journalctl --no-pager --unit {frozen}")

    host.sh(f"systemctl stop {misled}")
    assert host.property(misled, "Result") == "success"
    assert host.property(misled, "ExecMainStatus") == "0"
    host.sh("sed -i s/STRATA_LISTEN=.*/STRATA_LISTEN=nowhere/ /etc/strata/coordinator-3.env")
    host.sh(f"systemctl reset-failed {misled} || true; systemctl start {misled} || true")
    host.wait(misled, "ActiveState", "failed")
    assert host.property(misled, "ExecMainStatus") == "2", "a mistake is not tried again"
    assert host.property(misled, "NRestarts") == "0"


def check_backup(host: Host) -> None:
    """After the README's commands, the timer waits for its next hour, and the first backup has been made."""
    units = DEPLOY / "systemd"
    host.container.copy_into_container(units / "backup.env", "/etc/strata/backup.env", 0o600)
    for name in ("strata-backup.service", "strata-backup.timer"):
        host.container.copy_into_container(units / name, f"/etc/systemd/system/{name}")
    drop_in = "/etc/systemd/system/strata-backup.service.d/container.conf"
    host.container.copy_into_container(BACKUP_DROP_IN.encode(), drop_in)
    host.sh("systemctl daemon-reload && systemctl enable --now strata-backup.timer")
    assert host.property("strata-backup.timer", "ActiveState") == "active"
    assert host.property("strata-backup.timer", "NextElapseUSecRealtime")
    host.sh("systemctl start strata-backup || journalctl --no-pager -u strata-backup -n 20")
    assert host.property("strata-backup", "Result") == "success"
    listed = host.sh("/opt/strata/bin/strata controlplane backups /var/lib/strata-backup")
    assert "default" in listed, listed

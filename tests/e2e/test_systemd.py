"""deploy/etcd's units under a real systemd, in a container: started, killed, frozen, misled, stopped."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Need
from tests.e2e.conftest import DEPLOY
from tests.e2e.engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 90.0
ETCD = tuple(f"strata-etcd@etcd-{i}" for i in (1, 2, 3))
COORDINATORS = tuple(f"strata-coordinator@coordinator-{i}" for i in (1, 2, 3))

# What an unprivileged container does not grant (user namespaces), and less patience.
COORDINATOR_DROP_IN = "[Service]\nPrivateUsers=no\nWatchdogSec=3s\nTimeoutAbortSec=1s\n"
ETCD_DROP_IN = "[Service]\nPrivateUsers=no\n"


class Host:
    """A container that runs systemd, on which the README's steps were taken for all three instances."""

    def __init__(self, engine: Engine, image: str, folder: Path) -> None:
        self.engine = engine
        self.image = image
        self.folder = folder
        self.name = f"strata-test-{secrets.token_hex(4)}"

    def start(self) -> None:
        """Start systemd."""
        self.engine.docker(
            *("run", "--detach", "--name", self.name, "--user", "0:0", "--network", "none"),
            *("--cap-add", "SYS_ADMIN", "--cap-add", "SYS_NICE", "--security-opt", "seccomp=unconfined"),
            *("--security-opt", "apparmor=unconfined", "--tmpfs", "/run", "--tmpfs", "/tmp"),
            *(
                "--cgroupns",
                "host",
                "--volume",
                "/sys/fs/cgroup:/sys/fs/cgroup:rw",
                "--env",
                "container=docker",
            ),
            *("--entrypoint", "/lib/systemd/systemd", self.image),
        )
        deadline = time.monotonic() + LIMIT_S
        while "running" not in self.engine.docker(
            "ps", "--filter", f"name={self.name}", "--format", "{{.State}}"
        ):
            assert time.monotonic() < deadline, self.engine.docker("logs", self.name)
        self.sh("until systemctl is-system-running --wait; do :; done")

    def install(self) -> None:
        """What the README says to do on a host, with three instances on one loopback."""
        etc = self.folder / "etc"
        localhost = ("--host", "localhost") * 3
        self.engine.run(str(DEPLOY / "make-certs"), "--out", str(etc / "tls"), *localhost)
        units = DEPLOY / "systemd"
        for name in ("etcd.env", "coordinator.env"):
            (etc / name).write_text(on_loopback((units / name).read_text()))
        for kind in ("etcd", "coordinator"):
            text = (units / f"{kind}-1.env").read_text()
            for i in (1, 2, 3):
                (etc / f"{kind}-{i}.env").write_text(on_loopback(text.replace("host1", f"host{i}"), own=i))
        self.copy(f"{etc}/.", "/etc/strata/")
        self.copy(str(DEPLOY / "build" / "etcd") + "/.", "/usr/local/bin/")
        self.copy(str(units / "strata.sysusers"), "/usr/lib/sysusers.d/strata.conf")
        self.copy(str(units / "strata.tmpfiles"), "/usr/lib/tmpfiles.d/strata.conf")
        for kind, drop_in in (("etcd", ETCD_DROP_IN), ("coordinator", COORDINATOR_DROP_IN)):
            unit = f"strata-{kind}@.service"
            self.copy(str(units / unit), f"/etc/systemd/system/{unit}")
            (self.folder / "container.conf").write_text(drop_in)
            self.sh(f"mkdir -p /etc/systemd/system/{unit}.d")
            self.copy(str(self.folder / "container.conf"), f"/etc/systemd/system/{unit}.d/container.conf")
        self.sh("systemd-sysusers && systemd-tmpfiles --create strata.conf && systemctl daemon-reload")

    def copy(self, source: str, target: str) -> None:
        self.engine.docker("cp", source, f"{self.name}:{target}")

    def sh(self, script: str) -> str:
        """Run a script in it, to success."""
        return self.engine.docker("exec", self.name, "sh", "-ec", script, limit_s=LIMIT_S)

    def property(self, unit: str, name: str) -> str:
        return self.sh(f"systemctl show --value --property {name} {unit}").strip()

    def wait(self, unit: str, name: str, wanted: str) -> None:
        """Return once a unit's property matches; fail with its log."""
        deadline = time.monotonic() + LIMIT_S
        while not re.fullmatch(wanted, found := self.property(unit, name)):
            if time.monotonic() > deadline:
                log = self.sh(f"journalctl --no-pager --lines 40 --unit {unit}")
                raise AssertionError(f"{unit}: {name} is {found}, not {wanted}:\n{log}")

    def end(self) -> None:
        self.engine.docker("rm", "--force", "--volumes", self.name)


def on_loopback(text: str, *, own: int = 0) -> str:
    """A host's configuration with all three on one loopback: instance i has ports 1i379, 5005i…"""
    text = re.sub(r"host([123]):2(\d\d\d)", r"localhost:1\1\2", text)
    text = re.sub(r"(?:0\.0\.0\.0|127\.0\.0\.1):2(\d\d\d)", rf"127.0.0.1:1{own}\1", text)
    text = re.sub(r"host([123]):50051", r"localhost:5005\1", text)
    return text.replace("0.0.0.0:50051", f"127.0.0.1:5005{own}").replace(
        "127.0.0.1:8080", f"127.0.0.1:808{own}"
    )


@pytest.fixture
def host(engine: Engine, build_context: str, tmp_path: Path, need: Need) -> Iterator[Host]:
    image = f"strata-test-host:{secrets.token_hex(4)}"
    arguments = ("--build-arg", f"BASE_IMAGE={build_context}", "--target", "coordinator", "--tag", image)
    engine.run("docker", "build", *arguments, str(DEPLOY), env={"DOCKER_BUILDKIT": "0"})
    # what the engine itself has to say stands beside it: an engine without IPv4 forwarding warns
    seen = engine.docker(
        *("run", "--rm", "--network", "none", "--entrypoint", "sh", image),
        *("-c", "ls /lib/systemd/systemd || true"),
    )
    made = Host(engine, image, tmp_path)
    try:
        need(
            "systemd",
            "/lib/systemd/systemd" in seen.splitlines(),
            "a base image with systemd, as make-base makes with it",
        )
        made.start()
        made.install()
        yield made
    finally:
        made.end()
        engine.docker("image", "rm", "--force", image)


def test_systemd_starts_watches_restarts_and_stops_them(host: Host) -> None:
    host.sh(f"systemctl start --no-block {' '.join(ETCD)}")
    host.sh(f"systemctl start {' '.join(COORDINATORS)}")  # returns when all of them serve
    for unit in (*ETCD, *COORDINATORS):
        host.wait(unit, "ActiveState", "active")
    assert host.property(COORDINATORS[0], "StatusText") == "serves"
    credentials = " ".join(
        f"STRATA_TLS_{what.upper()}_FILE=/etc/strata/tls/operator/{what}.pem"
        for what in ("cert", "key", "ca")
    )
    shown = host.sh(f"{credentials} strata status -e localhost:50051,localhost:50052,localhost:50053")
    assert shown.count("yes") == 6, shown

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

"""A container engine for tests: the one that runs, or one of the test's own that leaves no trace.

Its own `dockerd` keeps everything below one folder of the clone, and changes nothing of the machine's
network: no bridge of its own, no packet filter, no forwarding. Containers of one network reach each
other, published ports are reached through dockerd's proxy, and nothing reaches out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strata.launch.children import Child
from tests.processes import Record, Talker

START_S = 60.0
SOCKET_MAX = 107
"""Bytes that a Unix socket's path may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How to speak to it: the environment of every command, and how Compose is called."""

    env: Mapping[str, str]
    compose_command: tuple[str, ...]

    def docker(self, *words: str, limit_s: float = 60.0) -> str:
        """Return what a docker command prints; `CalledProcessError` shows what went wrong."""
        return self.run("docker", *words, limit_s=limit_s)

    def run(self, *words: str, env: Mapping[str, str] | None = None, limit_s: float = 600.0) -> str:
        """Run any program against this engine, and return what it prints on both streams."""
        done = subprocess.run(
            words,
            env={**self.env, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(words)} exited with {done.returncode}:\n{done.stdout[-6000:]}")
        return done.stdout


def answers(env: Mapping[str, str]) -> bool:
    """Tell whether an engine is reached."""
    done = subprocess.run(["docker", "version"], env=env, capture_output=True, check=False, timeout=60)
    return done.returncode == 0


def compose_command(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return how Compose is called here, as docker's plugin or on its own; empty when there is none."""
    plugin = subprocess.run(["docker", "compose", "version"], env=env, capture_output=True, check=False)
    if plugin.returncode == 0:
        return ("docker", "compose")
    return ("docker-compose",) if shutil.which("docker-compose") else ()


class OwnEngine:
    """A dockerd of this run's own. `stop` ends it with everything in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: Child | None = None
        self.socket = folder / "docker.sock"
        deepest = folder / "run" / "containerd" / "containerd.sock.ttrpc"
        if len(os.fsencode(deepest)) > SOCKET_MAX:
            raise AssertionError(f"{deepest} is too long for a socket: run the tests in a shorter path")

    @staticmethod
    def possible() -> bool:
        """Tell whether this machine and user can run one."""
        return os.geteuid() == 0 and shutil.which("dockerd") is not None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._folder.mkdir(parents=True)
        log = self._folder / "dockerd.log"
        self._child = Child.start(
            [
                "dockerd",
                f"--host=unix://{self.socket}",
                f"--data-root={self._folder / 'data'}",
                f"--exec-root={self._folder / 'run'}",
                f"--pidfile={self._folder / 'dockerd.pid'}",
                "--bridge=none",
                "--iptables=false",
                "--ip6tables=false",
                "--ip-forward=false",
                "--ip-masq=false",
            ],
            name="dockerd",
            log=log,
        )
        deadline = time.monotonic() + START_S
        while not answers({**os.environ, "DOCKER_HOST": f"unix://{self.socket}"}):
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"dockerd {self._child.describe()}:\n{log.read_text()[-4000:]}")

    def stop(self) -> None:
        """End it, which unmounts what it had mounted, and remove all its data."""
        if self._child is not None:
            self._child.stop(grace_s=60.0)
        shutil.rmtree(self._folder)


def follow_health(engine: Engine, project: str, record: Record) -> Talker:
    """Record what happens to the project's containers: events of kind "container"."""
    form = (
        '{"event":"container","what":"{{.Action}}","service":'
        '"{{index .Actor.Attributes "com.docker.compose.service"}}"}'
    )
    label = f"label=com.docker.compose.project={project}"
    command = ["docker", "events", "--filter", "type=container", "--filter", label, "--format", form]
    return Talker(command, name="docker-events", record=record, env=engine.env)

"""A container engine for tests: the running one, or one of the test's own that leaves no trace.

The client is testcontainers, which removes a test's objects at the end of the test. Its reaper is not used, because
the reaper needs an image from a registry.

The test's own `dockerd` keeps its data below one folder of the clone, and does not change the machine's network: it
adds no bridge, no packet filter and no forwarding. Containers of one network reach each other. Published ports are
reached through dockerd's proxy. No container reaches the outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors
from docker.models.containers import Container
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed
from testcontainers.core.docker_client import DockerClient

from strata.processes.children import Child
from tests.processes import Record

START_S = 60.0
POLL_S = 0.2
SOCKET_MAX = 107
"""The longest path of a Unix socket, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The client of the engine that this process's environment names, and the program that runs Compose."""

    client: docker.DockerClient
    compose: str
    """testcontainers' `docker_command_path`: `COMPOSE compose up` starts a project."""

    def script(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command against this engine; return its output on both streams."""
        done = subprocess.run(
            words,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=600.0,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(words)} exited with {done.returncode}:\n{done.stdout[-6000:]}")
        return done.stdout

    @contextmanager
    def following(self, label: str, record: Record) -> Iterator[None]:
        """Record the events of the containers with `label` as events of kind "container"."""
        stream = self.client.events(decode=True, filters={"type": "container", "label": label})

        def listen() -> None:
            for event in stream:
                service = event["Actor"]["Attributes"]["com.docker.compose.service"]
                record.add({"event": "container", "what": event["Action"], "service": service})

        listener = threading.Thread(target=listen, name="docker-events", daemon=True)
        listener.start()
        try:
            yield
        finally:
            stream.close()
            listener.join()


def reached() -> docker.DockerClient | None:
    """Return a client of the engine that the environment names, or None if the engine does not answer."""
    try:
        client = DockerClient().client
        client.ping()
    except docker.errors.DockerException:
        return None
    return client


def compose_program(folder: Path) -> str:
    """Return testcontainers' `docker_command_path` on this machine, or "" without Compose.

    Debian's Compose is a separate program, but testcontainers calls a plugin, `docker compose`. So a script in `folder`
    drops the word `compose`.
    """
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return "docker"
    if (found := shutil.which("docker-compose")) is None:
        return ""
    script = folder / "compose"
    script.write_text(f'#!/bin/sh\nshift\nexec {found} "$@"\n')
    script.chmod(0o755)
    return str(script)


def logs(container: Container) -> str:
    """Return the last lines of a container's output."""
    return str(container.logs(tail=60).decode(errors="replace"))


class OwnEngine:
    """A dockerd of this run's own; `stop` ends it with everything in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: Child | None = None
        self.socket = folder / "docker.sock"
        deepest = folder / "run" / "containerd" / "containerd.sock.ttrpc"
        if len(os.fsencode(deepest)) > SOCKET_MAX:
            raise AssertionError(f"{deepest} is too long for a socket: run the tests in a shorter path")

    @staticmethod
    def possible() -> bool:
        """Return whether this user can run a dockerd on this machine."""
        return os.geteuid() == 0 and shutil.which("dockerd") is not None

    def start(self) -> docker.DockerClient:
        """Start dockerd; return a client once it answers. By then `DOCKER_HOST` must name its socket."""
        self._folder.mkdir(parents=True)
        log = self._folder / "dockerd.log"
        child = self._child = Child.start(
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
        answers = Retrying(
            retry=retry_if_result(lambda client: client is None and child.poll() is None),
            stop=stop_after_delay(START_S),
            wait=wait_fixed(POLL_S),
            retry_error_callback=lambda _: None,
        )
        if (client := answers(reached)) is None:
            raise AssertionError(f"dockerd {child.describe()}:\n{log.read_text()[-4000:]}")
        return client

    def stop(self) -> None:
        """Stop dockerd, which unmounts its mounts, and remove all its data."""
        if self._child is not None:
            self._child.stop(grace_s=60.0)
        shutil.rmtree(self._folder)

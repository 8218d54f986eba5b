"""The netns backend: a network namespace for every coordinator, etcd member and host of workers, on one bridge.

    this machine ── veth ── hub: bridge ──┬── coordinator-1   198.18.n.21
      198.18.n.1                          ├── etcd-1          198.18.n.11
                                          └── host-1          198.18.n.101

The bridge has its own namespace, so the machine's firewall and forwarding rules do not affect it. A run creates
nothing outside its namespaces, and the `sweeper` removes them. 198.18.0.0/15 is reserved for network tests (RFC
2544).

iptables inside a host's namespace drops or rejects packets. Each fault has one chain, whose counters give the number
of packets that matched.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from strata.errors import ConfigError, StrataError
from strata_chaos.backends import sweeper
from strata_chaos.backends.base import Host, Rule, Say, Site
from strata_chaos.backends.start import part_names, start
from strata_chaos.scenario import Topology

_TOOLS: Final = ("ip", "nsenter", "iptables")
_SUBNETS: Final = [f"198.{second}.{third}" for second in (18, 19) for third in range(256)]
_FIRST: Final = {"etcd": 11, "coordinator": 21, "host": 101}


class NetnsBackend:
    """The `Backend` in which every host has a network that faults can cut."""

    name: Final = "netns"
    summary: Final = "each part in a network namespace of its own, on one bridge"

    def available(self) -> str:
        if os.geteuid() != 0:
            return "it needs root"
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            return f"no {', '.join(missing)} on PATH (packages iproute2, util-linux, iptables)"
        probe = f"{sweeper.prefix_of(os.getpid())}probe"
        try:
            _run("ip", "netns", "add", probe)
            _run(*_enter(probe), "iptables", "-w", "-A", "INPUT", "-j", "DROP")
        except StrataError as error:
            return error.message
        finally:
            sweeper.sweep(probe)
        return ""

    @contextmanager
    def running(
        self, topology: Topology, folder: Path, *, workers: int, members: Sequence[str], say: Say
    ) -> Iterator[Site]:
        if removed := sweeper.sweep_abandoned():
            say(f"removed {len(removed)} namespaces that a killed run had left")
        with _guarded() as prefix:
            subnet = _free_subnet()
            hosts = _build(prefix, subnet, part_names(topology, workers=workers))
            say(f"{len(hosts)} network namespaces on {subnet}.0/24")
            network = IptablesNetwork(hosts)
            site = start(topology, folder, hosts=hosts, network=network, members=members, say=say)
            try:
                yield site
            finally:
                site.cluster.kill()


class IptablesNetwork:
    """The `Network` of the namespaces. Each key has one iptables chain on every host that its rules affect."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._enter = {host.name: host.enter for host in hosts}
        self._chains: dict[str, list[str]] = {}

    def cut(self, key: str, rules: Sequence[Rule]) -> None:
        on: list[str] = list(dict.fromkeys(rule.host for rule in rules))
        self._chains[key] = on
        for host in on:
            self._iptables(host, "-N", key)
            for rule in rules:
                if rule.host == host:
                    self._iptables(host, "-A", key, *_match(rule))
            for hook in ("INPUT", "OUTPUT"):
                self._iptables(host, "-I", hook, "-j", key)

    def packets(self, key: str) -> dict[str, int]:
        return {host: self._count(host, key) for host in self._chains.get(key, [])}

    def mend(self, key: str) -> None:
        for host in self._chains.pop(key, []):
            for hook in ("INPUT", "OUTPUT"):
                with suppress(StrataError):  # an interrupted `cut` may not have added this rule
                    self._iptables(host, "-D", hook, "-j", key)
            for verb in ("-F", "-X"):
                with suppress(StrataError):  # or may not have created this chain
                    self._iptables(host, verb, key)

    def _count(self, host: str, key: str) -> int:
        lines = self._iptables(host, "-nvxL", key).splitlines()[2:]
        return sum(int(line.split()[0]) for line in lines)

    def _iptables(self, host: str, *words: str) -> str:
        return _run(*self._enter[host], "iptables", "-w", *words)


def _match(rule: Rule) -> list[str]:
    words = ["-s" if rule.inbound else "-d", rule.peer]
    if rule.reject or rule.port:
        words += ["-p", "tcp"]
    if rule.port:
        words += ["--dport", str(rule.port)]
    return [*words, "-j", *(["REJECT", "--reject-with", "tcp-reset"] if rule.reject else ["DROP"])]


@contextmanager
def _guarded() -> Iterator[str]:
    """Yield the prefix of this process's namespaces. Afterwards remove them, even if the process is killed."""
    pid = os.getpid()
    prefix = sweeper.prefix_of(pid)
    # The guardian gets its own session: a signal to this process group or terminal must not end the guardian.
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", sweeper.__file__, str(pid), prefix],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield prefix
    finally:
        sweeper.sweep(prefix)
        guardian.kill()
        guardian.wait()


def _build(prefix: str, subnet: str, names: Sequence[str]) -> tuple[Host, ...]:
    """Make the bridge and a namespace for each name; return them as hosts."""
    hub, ours = f"{prefix}hub", sweeper.link_of(prefix)
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge", "up")
    _run("ip", "link", "add", ours, "type", "veth", "peer", "name", "port0", "netns", hub)
    _run("ip", "-n", hub, "link", "set", "port0", "master", "bridge", "up")
    _run("ip", "address", "add", f"{subnet}.1/24", "dev", ours)
    _run("ip", "link", "set", ours, "up")
    numbers = {kind: itertools.count(first) for kind, first in _FIRST.items()}
    hosts = []
    for number, name in enumerate(names, 1):
        namespace, port = f"{prefix}{name}", f"port{number}"
        address = f"{subnet}.{next(numbers[name.partition('-')[0]])}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        hosts.append(Host(name=name, address=address, enter=_enter(namespace)))
    return tuple(hosts)


def _enter(namespace: str) -> tuple[str, ...]:
    return ("nsenter", f"--net={sweeper.FOLDER / namespace}")


def _free_subnet() -> str:
    taken = _run("ip", "-4", "route", "show", "table", "all")
    for subnet in _SUBNETS[os.getpid() % len(_SUBNETS) :] + _SUBNETS:
        if f"{subnet}." not in taken:
            return subnet
    raise ConfigError("every subnet of 198.18.0.0/15 is in use on this machine")


def _run(*command: str) -> str:
    """Run a command and return its output; the `ConfigError` of a failure quotes the command's last line."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ConfigError(
            f"`{' '.join(command)}`: {output[-1] if output else f'exit code {done.returncode}'}"
        )
    return done.stdout

"""Commands about etcd that `strata doctor` prints: a full one takes writes again, a backup is made.

Those for a full etcd have an order, for each needs the one before: compaction drops old revisions, defragmentation gives
their room back, one member at a time because it serves nobody meanwhile, and only then is there a
point in disarming the alarm. A password is never part of them: etcdctl asks for it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from strata.config import CoordinatorConfig, EtcdConfig


def quota_remedy(config: EtcdConfig, members: Sequence[str], *, revision: int) -> tuple[str, ...]:
    """Return the shell commands that mend the alarm NOSPACE of `members` (`host:port`).

    `revision` is the newest one: what is older is history, which Strata's replicas read again if
    they are behind.
    """
    return (
        _etcdctl(config, members, "compact", "--physical", str(revision)),
        *(_etcdctl(config, (member,), "--command-timeout=60s", "defrag") for member in members),
        _etcdctl(config, members, "alarm", "disarm"),
    )


def _etcdctl(config: EtcdConfig, members: Sequence[str], *words: str) -> str:
    has_tls = config.ca_file is not None or config.cert_file is not None
    scheme = "https" if has_tls else "http"
    flags = [f"--endpoints={','.join(f'{scheme}://{member}' for member in members)}"]
    for name, value in (
        ("cacert", config.ca_file),
        ("cert", config.cert_file),
        ("key", config.key_file),
        ("user", config.username),
    ):
        if value:
            flags.append(f"--{name}={value}")
    return shlex.join(["etcdctl", *flags, *words])


def backup_command(config: CoordinatorConfig, place: str) -> str:
    """Return the command that backs up the control plane to `place`.

    Certificates and users of etcd are settings of a file or the environment, where this command finds them.
    """
    words = ["strata", "controlplane", "backup", "--to", place, "--etcd", ",".join(config.etcd.endpoints)]
    if config.cluster != CoordinatorConfig().cluster:
        words += ["--cluster", config.cluster]
    if config.credentials.insecure:
        words.append("--insecure")
    return shlex.join(words)

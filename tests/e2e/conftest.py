"""A container engine and a base image, for the whole run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, Need
from tests.e2e.engine import Engine, OwnEngine, compose_program, reached

DEPLOY = ROOT / "deploy" / "etcd"


@pytest.fixture(scope="session")
def engine(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine that the environment names, if it answers; otherwise an engine of this run."""
    hint = "apt-get install docker.io docker-compose"
    need("docker", shutil.which("docker") is not None, hint)
    folder = tmp_path_factory.mktemp("docker")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
        # the user's own configuration may name credentials and contexts
        plugins = Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "cli-plugins"
        environment.setenv("DOCKER_CONFIG", str(folder))
        if plugins.is_dir():
            shutil.copytree(plugins, folder / "cli-plugins")
        compose = compose_program(folder)
        need("docker", bool(compose), hint)
        if compose != "docker":
            environment.setenv("DOCKER_BUILDKIT", "0")  # Debian's Compose cannot build with BuildKit
        if (client := reached()) is not None:
            yield Engine(client=client, compose=compose)
            return
        need("docker", OwnEngine.possible(), f"start an engine, or as root: {hint}")
        own = OwnEngine(ROOT / ".strata" / f"docker-{os.getpid()}")
        environment.setenv("DOCKER_HOST", f"unix://{own.socket}")
        try:
            yield Engine(client=own.start(), compose=compose)
        finally:
            own.stop()


@pytest.fixture(scope="session")
def base_image(engine: Engine, need: Need) -> Iterator[str]:
    """The base of the images: STRATA_TEST_BASE_IMAGE, or an image made from this machine's package archive."""
    if given := os.environ.get("STRATA_TEST_BASE_IMAGE"):
        yield given
        return
    possible = os.geteuid() == 0 and shutil.which("mmdebstrap") is not None
    need("docker", possible, "set STRATA_TEST_BASE_IMAGE, or as root: apt-get install mmdebstrap")
    tag = f"strata-test-base:{os.getpid()}"
    engine.script(
        str(DEPLOY / "make-base"), tag, "systemd", "systemd-sysv"
    )  # the test of the systemd units needs these
    yield tag
    engine.client.images.remove(tag, force=True)


@pytest.fixture(scope="session")
def build_context(engine: Engine, base_image: str, etcd_bin: Path) -> str:
    """The base image, once all files for the images on top of it are gathered."""
    assert etcd_bin.is_dir()
    engine.script(str(DEPLOY / "build-context"), env={"BASE_IMAGE": base_image})
    return base_image

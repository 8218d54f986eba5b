"""The next start removes the folder of a killed owner, but not folders of live owners or foreign folders."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.agent import run_folder as module
from strata.agent.run_folder import EMPTY_S, OWNER, run_folder, sweep

OWNER_PROGRAM = """
import sys, time
from strata.agent.run_folder import run_folder
with run_folder() as folder:
    (folder / "ranks.sock").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test and of the processes that it starts."""
    found = tmp_path / "tmp"
    found.mkdir()
    monkeypatch.setenv("TMPDIR", str(found))
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


class Owner:
    """A process that owns a run folder."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())
        assert self.folder.is_dir()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owners() -> Iterator[list[Owner]]:
    made: list[Owner] = []
    yield made
    for owner in made:
        owner.kill()


def test_a_run_folder_is_removed_with_its_owner(place: Path) -> None:
    with run_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "trace").write_text("x")
    assert list(place.iterdir()) == []


def test_a_start_removes_folders_of_killed_owners_but_not_of_live_ones(
    place: Path, owners: list[Owner]
) -> None:
    owners += [Owner(), Owner()]
    killed, neighbour = owners
    killed.kill()
    assert killed.folder.is_dir()
    with run_folder() as mine:
        assert set(place.iterdir()) == {neighbour.folder, mine}
        assert (neighbour.folder / "ranks.sock").exists()
    assert list(place.iterdir()) == [neighbour.folder]
    neighbour.kill()
    assert sweep(place) == [neighbour.folder]


def left(place: Path, name: str, *, host: str | None = None) -> Path:
    """Make a folder as a killed owner leaves it behind."""
    folder = place / name
    folder.mkdir(mode=0o700)
    (folder / OWNER).write_text(socket.gethostname() if host is None else host)
    (folder / "trace").write_text("x")
    return folder


def test_a_sweep_leaves_foreign_files_and_folders(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = left(tmp_path, "elsewhere")
    (place / "strata-symlink0").symlink_to(elsewhere, target_is_directory=True)
    left(place, "strata-similar")
    left(place, "strata-abcdefgh9")
    left(place, "other-abcdefgh")
    left(place, "strata-farhost_", host="another-host")
    (place / "strata-nolock__").mkdir(mode=0o700)
    (place / "strata-nolock__" / "data").write_text("somebody's")
    (place / "strata-afile___").write_text("x")
    linked = place / "strata-linked__"
    linked.mkdir(mode=0o700)
    (linked / OWNER).symlink_to(elsewhere / OWNER)
    fifo = place / "strata-fifo____"
    fifo.mkdir(mode=0o700)
    os.mkfifo(fifo / OWNER)
    before = set(place.iterdir())
    assert sweep(place) == []
    assert set(place.iterdir()) == before
    assert (elsewhere / "trace").exists()

    ours = left(place, "strata-abcdefgh")
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert sweep(place) == [], "a folder of another user"
    assert sweep(place) == [ours]


def test_an_empty_run_folder_is_removed_after_a_minute(place: Path) -> None:
    """The owner was killed before it locked a file in the folder."""
    young, old, foreign = (place / name for name in ("strata-young___", "strata-old_____", "strata-foreign_"))
    for folder in (young, old, foreign):
        folder.mkdir(mode=0o700)
    foreign.chmod(0o755)
    for folder in (old, foreign):
        made_s = folder.stat().st_mtime - EMPTY_S - 1
        os.utime(folder, (made_s, made_s))
    assert sweep(place) == [old]
    assert {young, foreign} <= set(place.iterdir())


def test_a_sweeper_between_the_steps_of_an_owner_costs_it_one_attempt(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = module._locked
    swept: list[Path] = []

    def late(lock: int, folder: Path) -> bool:
        if not swept:  # the owner has created the folder and the file, and does not hold the lock yet
            swept.append(folder)
            assert sweep_in_another_thread(place) == [folder]
        return locked(lock, folder)

    def sweep_in_another_thread(where: Path) -> list[Path]:
        monkeypatch.setattr(module, "_locked", locked)
        found: list[Path] = []
        thread = threading.Thread(target=lambda: found.extend(sweep(where)))
        thread.start()
        thread.join()
        return found

    monkeypatch.setattr(module, "_locked", late)
    with run_folder() as folder:
        assert folder not in swept
        assert sweep(place) == []
        assert folder.is_dir()


def test_many_owners_and_sweepers_at_once_lose_no_folder_in_use(place: Path) -> None:
    lost: list[Path] = []

    def own() -> None:
        for _ in range(40):
            with run_folder() as folder:
                (folder / "data").write_text("x")
                sweep(place)
                if not (folder / "data").exists():
                    lost.append(folder)

    threads = [threading.Thread(target=own) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert list(place.iterdir()) == []

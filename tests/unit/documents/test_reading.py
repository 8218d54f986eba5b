from __future__ import annotations

import threading
from pathlib import Path

import pytest

from strata.documents.reading import NotADocument, open_regular, read_config, read_regular
from strata.errors import ConfigError
from tests.unit.documents.hostile import put_shape


@pytest.mark.timeout(10)
@pytest.mark.parametrize("shape", ["fifo", "zero", "loop", "socket", "sparse"])
def test_only_a_regular_file_of_bounded_size_is_read(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "x"
    put_shape(path, shape)
    with pytest.raises(NotADocument):
        read_regular(path, most_bytes=1 << 20)
    with pytest.raises(ConfigError, match=f"cannot read tls.ca_file {path}: ") as caught:
        read_config(path, "tls.ca_file")
    assert caught.value.hint


def test_folders_and_missing_files_raise_the_operating_systems_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "no")
    with pytest.raises(NotADocument):
        open_regular(Path("a\0b"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(IsADirectoryError):
            open_regular(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "no descriptor is left"


def test_as_many_bytes_as_allowed_are_read_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 10_000)
    assert read_regular(path, most_bytes=10_000) == b"a" * 10_000
    with pytest.raises(NotADocument, match="has 10000 bytes, and at most 9999 are read"):
        read_regular(path, most_bytes=9_999)
    assert read_regular(Path("/proc/self/status"), most_bytes=1 << 20).startswith(b"Name:"), "of no size"
    with pytest.raises(NotADocument, match="more than the 5 bytes"):
        read_regular(Path("/proc/self/status"), most_bytes=5)


def test_a_file_that_grows_while_it_is_read_does_not_pass_the_limit(tmp_path: Path) -> None:
    path, stop = tmp_path / "x", threading.Event()
    path.write_bytes(b"a")

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not stop.is_set() and file.tell() < 64 << 20:
                file.write(b"a" * 100_000)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(1000):
            try:
                assert len(read_regular(path, most_bytes=3 << 20)) <= 3 << 20
            except NotADocument:
                break
        else:
            pytest.fail("it grew past the limit, and was read")
    finally:
        stop.set()
        writer.join()


def test_a_private_file_is_refused_when_others_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x")
    path.chmod(0o640)
    assert read_config(path) == b"x"
    with pytest.raises(ConfigError, match="can be read by others: its mode is 0640") as caught:
        read_config(path, "auth.token_file", private=True)
    assert f"chmod 600 {path}" in caught.value.hint

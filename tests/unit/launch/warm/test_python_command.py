"""Recognising commands that run Python, with the arguments parsed as Python does."""

from __future__ import annotations

import pytest

from strata.launch.warm.python_command import python_command


@pytest.mark.parametrize(
    ("line", "flags", "target", "arguments"),
    [
        ("python train.py", (), ("train.py",), ()),
        ("/opt/venv/bin/python3.11 train.py --lr 3", (), ("train.py",), ("--lr", "3")),
        ("python3 -u -O train.py -u", ("-u", "-O"), ("train.py",), ("-u",)),
        ("python -uO -X dev -W error train.py", ("-uO", "-X", "dev", "-W", "error"), ("train.py",), ()),
        ("python -Xdev -uWerror t.py", ("-Xdev", "-uWerror"), ("t.py",), ()),
        ("python -m pkg.train --lr 3", (), ("-m", "pkg.train"), ("--lr", "3")),
        ("python -mpkg a", (), ("-m", "pkg"), ("a",)),
        ("python -um pkg a", ("-u",), ("-m", "pkg"), ("a",)),
        ("python --check-hash-based-pycs never t.py", ("--check-hash-based-pycs", "never"), ("t.py",), ()),
    ],
)
def test_python_command_lines_are_parsed_as_python_does(
    line: str, flags: tuple[str, ...], target: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    found = python_command(line.split())
    assert found is not None
    assert (found.flags, found.target, found.arguments) == (flags, target, arguments)
    assert line.startswith(found.program)


@pytest.mark.parametrize(
    "line",
    [
        "sh train.sh",
        "./train.py",
        "python2 t.py",
        "pythonic t.py",
        "python",
        "python -c pass",
        "python -uc pass",
        "python -",
        "python -i t.py",
        "python -x t.py",
        "python --version",
        "python -m",
        "python -W",
        "torchrun t.py",
    ],
)
def test_a_command_that_cannot_be_prestarted_is_not_recognised(line: str) -> None:
    assert python_command(line.split()) is None

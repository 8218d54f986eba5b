from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from strata.errors import ConfigError
from strata_chaos import faults, scenario
from strata_chaos.cli.app import app
from strata_chaos.cli.run import _seeds

PAGE = Path("docs/chaos/README.md").read_text()
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_has_help_an_example_and_is_on_the_page(name: str) -> None:
    assert f"Example: strata-chaos {name}" in COMMANDS[name].help
    assert f"strata-chaos {name}" in PAGE


def test_options_in_the_pages_examples_exist() -> None:
    (block,) = re.findall(r"```sh\n(strata-chaos .*?)```", PAGE, re.DOTALL)
    for line in block.splitlines():
        _program, name, *words = shlex.split(line)
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_a_plan_is_printed_and_nothing_runs(tmp_path: Path) -> None:
    words = (
        "run",
        "--scenario",
        "mixed",
        "--backend",
        "netns",
        "--seed",
        "4",
        "--out",
        str(tmp_path),
        "--plan",
    )

    output = shown(*words)

    assert output == shown(*words)
    assert re.match(r"seed 4\n +\d+\.\d s  [a-z-]+, held ", output)
    (body,) = json.loads(shown(*words, "--json"))
    assert body["seed"] == 4
    assert len(body["plan"]) == len(output.splitlines()) - 1
    assert not list(tmp_path.iterdir())


def test_rounds_run_consecutive_seeds() -> None:
    words = ("run", "--scenario", "mixed", "--backend", "process", "--plan")

    assert shown(*words, "--seed", "4", "--rounds", "3") == shown(*words, "--seeds", "4-6")


def test_list_shows_all_scenarios_faults_and_backends() -> None:
    output, body = shown("list"), json.loads(shown("list", "--json"))

    for name in [path.stem for path in scenario.shipped()] + list(faults.ALL):
        assert re.search(rf"^{name} ", output, re.MULTILINE), name
    assert {found["name"] for found in body["faults"]} == set(faults.ALL)
    assert {found["name"] for found in body["backends"]} == {"process", "netns"}
    (kill,) = [found for found in body["faults"] if found["name"] == "isolate-leader"]
    assert kill["available"]["netns"] is True
    assert "--backend netns" in kill["available"]["process"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["nan", "inf", "-5", "0.5", "1e12"])
def test_a_duration_that_makes_no_sense_is_refused_at_once(text: str) -> None:
    result = CliRunner().invoke(app, ["run", "--plan", "--duration", text])

    assert isinstance(result.exception, ConfigError)
    assert "--duration" in result.exception.message


@pytest.mark.parametrize(("text", "seeds"), [("3", [3]), ("1-4", [1, 2, 3, 4]), ("2,5-6", [2, 5, 6])])
def test_seeds_are_parsed_from_lists_and_ranges(text: str, seeds: list[int]) -> None:
    assert _seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1-", "4-2", "1,,2", "1-1000000000000"])
def test_an_invalid_seed_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        _seeds(text)

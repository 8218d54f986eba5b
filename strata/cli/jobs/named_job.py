"""The job of a `strata jobs` command: the argument, `--job`, the environment or the file names the job.

Most of these commands change a job, so the user must name the job: no command uses the job `default` unless the
user names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from strata.cli.console.completion import complete_jobs
from strata.cli.console.credentials import connecting
from strata.errors import InvalidArgument

C = TypeVar("C", bound=Callable[..., Any])

Name = Annotated[
    str,
    typer.Option(
        "--job",
        "-j",
        help="The job's name, instead of the argument. (STRATA_JOB)",
        autocompletion=complete_jobs,
    ),
]
_Argument = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="The job's name, as for --job.", autocompletion=complete_jobs),
]


def on_job(command: C) -> C:
    """Give a command that takes `name: Name` the job's name, and the options of `connecting`.

    The argument or `--job` names the job, else the environment or the file. If the command takes a list of `workers`,
    the first of these arguments is the job, unless the command line has `--job`.
    """
    connected: Any = connecting(_with_option(command))
    taken = inspect.signature(connected)
    has_workers = "workers" in taken.parameters

    def with_job(**given: Any) -> Any:
        argument = None if has_workers else given.pop("argument")
        if has_workers and given["job"] is None:
            argument, *given["workers"] = given["workers"]
            if not given["workers"]:
                raise InvalidArgument(
                    f"no worker is named, only {argument}",
                    hint="name the job and the members: JOB WORKER, or WORKER --job JOB",
                )
        return connected(**given | {"job": one_name(argument, given["job"])})

    first = inspect.Parameter("argument", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Argument)
    rest = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in taken.parameters.values()]
    return _as_command(with_job, connected, rest if has_workers else [first, *rest])  # type: ignore[no-any-return]


def one_name(argument: str | None, option: str | None) -> str | None:
    """Return the job that the command line names; raise `InvalidArgument` if two are named."""
    if argument is not None and option not in {None, argument}:
        raise InvalidArgument(
            f"the argument names the job {argument}, and --job names {option}",
            hint="name one job, by the argument or by --job",
        )
    return argument or option


def _with_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with the parameter `job`, which environment and file may set, instead of `name`."""
    taken = inspect.signature(command, eval_str=True)

    def named(*, job: str, **given: Any) -> Any:
        if not job:
            raise InvalidArgument("no job is named", hint="add its name, or --job NAME, or set STRATA_JOB")
        return command(name=job, **given)

    parameters = [
        p.replace(name="job" if p.name == "name" else p.name, kind=inspect.Parameter.KEYWORD_ONLY)
        for p in taken.parameters.values()
    ]
    by_default = [p.replace(default="") if p.name == "job" else p for p in parameters]
    return _as_command(named, command, by_default)  # type: ignore[no-any-return]


def _as_command(wrapper: Any, command: Callable[..., Any], parameters: list[inspect.Parameter]) -> Any:
    """Return `wrapper` with the command's name and help, and with `parameters`."""
    functools.update_wrapper(wrapper, command)
    wrapper.__signature__ = inspect.Signature(parameters)
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    del wrapper.__wrapped__  # typer would read the wrapped command's type hints
    return wrapper

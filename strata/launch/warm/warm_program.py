"""A warm process: it does a script's large imports, and becomes the script when it receives its environment.

`strata.launch.warm.warm_pool` runs this file as a script, by path, with the interpreter and the flags of the
rank's own command:

    python FLAGS warm_program.py FD MODULES SCRIPT|-m MODULE ARGUMENTS...

It imports MODULES (separated by commas) and waits on the socket FD for one line, the environment as a JSON object.
Then it runs the script as `__main__`, as Python itself does: argv, path, flags, exit codes and tracebacks are the
same. The only difference is that some modules are already imported. It uses the standard library only, to run with
any Python that a command may name.

With "-" in place of FD it becomes the script immediately. If a traceback ends the script, its last lines are left in
a file beside STRATA_STACKS. The agent takes the reason of the failure from that file.
"""

import importlib
import json
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

HELLO = b"+"
AT_ONCE = "-"
"""In place of the socket's number: the environment is complete already, so there is nothing to wait for."""
LAST_LINES = 3
EXIT_MESSAGE_SUFFIX = ".traceback"
"""Suffix, after the name in STRATA_STACKS, of the file with the traceback's last lines."""


def first_path(target: list[str]) -> str:
    """Return the first entry that Python puts on its path for this command."""
    if target[0] == "-m":
        return os.getcwd()  # noqa: PTH109  # as Python computes it; importing pathlib takes time
    return os.path.dirname(os.path.realpath(target[0]))  # noqa: PTH120


def import_early(modules: list[str]) -> None:
    """Import the modules that the script will import anyway."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001, S112  # the script's own import will raise the error
            continue


def wait_for_place(link: socket.socket) -> None:
    """Receive the environment, which comes as one line, and put it in place of this process's own."""
    with link, link.makefile("rb") as lines:
        line = lines.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError
    environment = json.loads(line)
    coerced = os.environ.get(
        "LC_CTYPE"
    )  # PEP 538: set by Python itself; the received environment may lack it
    os.environ.clear()
    if coerced is not None:
        os.environ["LC_CTYPE"] = coerced
    os.environ.update(environment)
    log = os.environ.get("STRATA_RANK_LOG")
    if log:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)


def answer_stack_dumps() -> None:
    """Write the threads' stacks into STRATA_STACKS on SIGUSR2, as `strata.client.rank.stack_dump` would."""
    import faulthandler  # noqa: PLC0415
    import signal  # noqa: PLC0415

    name = os.environ.get("STRATA_STACKS")
    if name:
        file = open(name + ".part", "ab")  # noqa: SIM115, PTH123  # open as long as the process lives
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
        _files.append(file)
        os.rename(name + ".part", name)  # noqa: PTH104


_files: list[Any] = []
_exit_message: list[str] = []


def fresh_main() -> types.ModuleType:
    """Put a new `__main__` in place of this program's."""
    module = types.ModuleType("__main__")
    facts: dict[str, Any] = {"__builtins__": __builtins__}
    if sys.version_info < (3, 14):  # later versions have lazy annotations
        facts["__annotations__"] = {}
    module.__dict__.update(facts)
    sys.modules["__main__"] = module
    return module


def run_script(script: str) -> None:
    """Run a file in a fresh `__main__`."""
    from importlib.machinery import SourceFileLoader  # noqa: PLC0415

    path = os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118  # not normalised: neither does Python
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        sys.exit(2)
    main = fresh_main().__dict__
    main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(compile(source, path, "exec", dont_inherit=True), main)  # noqa: S102  # the purpose of this program


def run_module(name: str) -> None:
    """Run a module as `python -m` does."""
    import runpy  # noqa: PLC0415

    fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what the interpreter itself calls


def hide_this_file(show: Callable[..., Any]) -> Callable[..., Any]:
    """Return an excepthook that shows a traceback without the frames of this file."""
    this_file = __file__  # from Python 3.14 on, `__main__` has no `__file__` any more when the hook is called

    def hook(kind: Any, error: Any, trace: Any) -> Any:
        while trace is not None and trace.tb_frame.f_code.co_filename == this_file:
            trace = trace.tb_next
        sys.last_traceback = trace
        keep_last_lines(kind, error, trace)
        return show(kind, error.with_traceback(trace), trace)

    return hook


def keep_last_lines(kind: Any, error: Any, trace: Any) -> None:
    """Write the end of a traceback to a file for the agent, without the lines that only point at a column."""
    if not _exit_message or issubclass(kind, KeyboardInterrupt):
        return  # at a KeyboardInterrupt, an import here would keep Python from ending by the signal
    import traceback  # noqa: PLC0415

    try:
        lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
        kept = [line.strip() for line in lines if line.strip(" ^~")]
        with open(_exit_message[0], "w", errors="replace") as file:  # noqa: PTH123
            file.write("\n".join(kept[-LAST_LINES:]))
    except Exception:  # noqa: BLE001, S110  # the traceback itself matters more, and is shown
        pass


def be_warm(descriptor: int, modules: list[str]) -> None:
    """Import the modules, and return once the environment of a rank is in place."""
    link = socket.socket(fileno=descriptor)
    os.set_inheritable(link.fileno(), False)
    try:
        link.sendall(HELLO)
        import_early(modules)
        wait_for_place(link)
    except ConnectionError:
        os._exit(0)  # the agent closed the socket: this process is not needed
    answer_stack_dumps()


def main(words: list[str]) -> None:
    """Be a warm process first, if a socket is given, then become the script."""
    descriptor, modules, *target = words
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path[0] = first_path(target)
    if descriptor != AT_ONCE:
        be_warm(int(descriptor), [name for name in modules.split(",") if name])
    if "STRATA_STACKS" in os.environ:
        _exit_message.append(os.environ["STRATA_STACKS"] + EXIT_MESSAGE_SUFFIX)
    if hasattr(sys, "orig_argv"):
        at = len(sys.orig_argv) - len(sys.argv)
        sys.orig_argv[at : at + 3] = []
    try:
        if target[0] == "-m":
            sys.argv[:] = ["-m", *target[2:]]
            run_module(target[1])
        else:
            sys.argv[:] = target
            run_script(target[0])
    except BaseException:
        # Python itself ends the process, as for any script; only its traceback must begin with the script
        sys.excepthook = hide_this_file(sys.excepthook)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])

"""A warm process runs a script as Python does: the same output, the same exit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from strata.launch.console import Console
from strata.launch.rank_output import RankOutputs
from strata.launch.warm.script_imports import libraries_of
from strata.launch.warm.starting import ColdStarter, Starter
from strata.launch.warm.warm_pool import WarmStarter, uses_init
from strata.processes.children import Child

LIMIT_S = 20.0

FACTS = """
import os, pickle, sys, threading
class Thing: pass
main = sys.modules["__main__"]
print(sys.argv, sys.path, sys.flags, sys.orig_argv, os.getcwd())
print(__name__, __file__, __spec__ and __spec__.name, __package__, __doc__, type(__loader__).__name__)
print(sorted(k for k in globals() if k not in {"main", "os", "pickle", "sys", "threading", "Thing"}))
print(main.__dict__ is globals(), pickle.loads(pickle.dumps(Thing())).__class__ is Thing)
print(sorted(os.environ.items()), threading.current_thread().name)
print(signal := __import__("signal").getsignal(2), __import__("signal").getsignal(15))
"""
ENDS = {
    "nothing": "",
    "exit code": "import sys; sys.exit(7)",
    "message": "import sys; sys.exit('so it is')",
    "hard exit": "import os; os._exit(9)",
    "error": "def f():\n    raise ValueError('deep')\nf()\n",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('above') from e\n",
    "own hook": "import sys\nsys.excepthook = lambda k, e, t: print('hook', k, t.tb_lineno)\nraise KeyError(1)\n",
    "syntax": "def broken(:\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "at exit": "import atexit\natexit.register(print, 'last words')\nraise SystemExit\n",
    "thread": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()\n",
    "spawned": "import multiprocessing as m\ndef f(): print('child', __name__, flush=True)\n"
    "if __name__ == '__main__':\n    p = m.get_context('spawn').Process(target=f); p.start(); p.join()\n",
}


def ended(starter: Starter, log: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Start the command with its output in `log`; return its exit code and output."""
    saved = os.dup(1), os.dup(2)
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            starter.prepare(1)
            if isinstance(starter, WarmStarter):
                sent_hello(starter)
            started = starter.start(environment, name="rank 0")
    finally:
        for number, copy in enumerate(saved, 1):
            os.dup2(copy, number)
            os.close(copy)
    assert started.warm == isinstance(starter, WarmStarter)
    return started.child.join(LIMIT_S), log.read_text()


def sent_hello(starter: WarmStarter) -> Child:
    """Return the warm process, once it has sent its first byte."""
    (spare,) = starter._spares
    spare.link.setblocking(True)
    spare.link.settimeout(LIMIT_S)
    spare.link.recv(1, 2)  # MSG_PEEK
    spare.link.setblocking(False)
    return spare.child


def warm(*command: str, modules: tuple[str, ...] = ()) -> WarmStarter:
    starter = WarmStarter.of(command, modules=modules, inherited=os.environ)
    assert starter is not None
    return starter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def both(
    folder: Path, *command: str, python: str = sys.executable
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Return the exit code and output of the command, from a cold start and from a warm process."""
    line = (python, *command)
    environment = {**os.environ, "RANK": "3", "ODD": "\udcff=\n", "STRATA_STACKS": ""}
    cold = ended(ColdStarter(line), folder / "cold.log", environment)
    return cold, ended(warm(*line), folder / "warm.log", environment)


@pytest.mark.parametrize("way", ["script", "folder", "link", "module", "package", "flags"])
def test_a_warm_script_sees_the_same_settings_as_under_python(folder: Path, way: str) -> None:
    package = folder / "pkg"
    package.mkdir()
    for name in ("train.py", "pkg/__init__.py", "pkg/train.py", "pkg/__main__.py"):
        (folder / name).write_text(FACTS if name != "pkg/__init__.py" else "")
    (folder / "link.py").symlink_to(package / "train.py")
    words = {
        "script": ("train.py", "--lr", "3"),
        "folder": ("./pkg/../pkg/train.py",),
        "link": ("link.py", ""),
        "module": ("-m", "pkg.train", "-m", "x"),
        "package": ("-m", "pkg"),
        "flags": ("-uOO", "-P", "-X", "utf8", "-Werror", "train.py"),
    }[way]
    cold, from_warm = both(folder, *words)
    assert cold[0] == 0, cold
    assert from_warm == cold


@pytest.mark.parametrize("script", ENDS.values(), ids=ENDS)
def test_a_script_ends_as_in_a_cold_process(folder: Path, script: str) -> None:
    (folder / "train.py").write_text(script)
    cold, from_warm = both(folder, "train.py")
    assert from_warm == cold


@pytest.mark.parametrize("words", [("-m", "no_such_module"), ("-m", "failing")])
def test_a_failing_module_fails_as_under_python(folder: Path, words: tuple[str, ...]) -> None:
    (folder / "failing.py").write_text("1 / 0\n")
    cold, from_warm = both(folder, *words)
    assert cold[0] == 1
    assert from_warm == cold


def test_the_imports_of_a_script_run_before_its_start(folder: Path) -> None:
    (folder / "costly.py").write_text("import os; print('RANK' in os.environ, flush=True)\n")
    (folder / "train.py").write_text("print('now'); import costly\n")
    starter = warm(sys.executable, "train.py", modules=("costly", "no_such_module"))
    assert ended(starter, folder / "log", {**os.environ, "RANK": "0"}) == (0, "False\nnow\n")


def test_without_a_spare_process_a_rank_starts_cold(folder: Path) -> None:
    (folder / "train.py").write_text("print('ran')\n")
    starter = warm(sys.executable, "train.py")
    starter.prepare(1)
    sent_hello(starter).kill()
    sent_hello(starter).join(LIMIT_S)
    started = starter.start(os.environ, name="rank 0")
    assert (started.child.join(LIMIT_S), started.warm) == (0, False)
    assert not starter._spares


def test_a_program_that_is_not_python_is_started_cold_without_delay(folder: Path) -> None:
    (folder / "python").write_text('#!/bin/sh\ntest "$1" = train.py && exit 5\nexec sleep 1000\n')
    (folder / "python").chmod(0o755)
    (folder / "train.py").write_text("")
    starter = warm(str(folder / "python"), "train.py")
    starter.prepare(1)
    (spare,) = starter._spares
    assert starter.start(os.environ, name="rank 0").child.join(LIMIT_S) == 5
    assert spare.child.join(LIMIT_S) == -signal.SIGKILL


def test_a_waiting_warm_process_ends_with_its_owner(folder: Path) -> None:
    (folder / "train.py").write_text("print('never')\n")
    starter = warm(sys.executable, "train.py")
    starter.prepare(2)
    children = [spare.child for spare in starter._spares]
    starter._spares[0].link.close()
    assert children[0].join(LIMIT_S) == 0, "the other end of its line is gone"
    starter.close()
    assert children[1].join(LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    "command", [("sh", "-c", "true"), (sys.executable, "-c", "pass"), (sys.executable, "gone.py")]
)
def test_other_commands_get_no_warm_starter(command: tuple[str, ...]) -> None:
    assert WarmStarter.of(command, modules=(), inherited={}) is None


def test_modules_that_torch_imports_with_the_first_optimizer_are_preloaded(folder: Path) -> None:
    (folder / "train.py").write_text("from torch import nn\n")
    starter = warm(sys.executable, "train.py")
    assert starter._work[0].split(",") == ["torch", "torch._dynamo"]
    (folder / "train.py").write_text("import numpy\n")
    assert warm(sys.executable, "train.py")._work[0] == "numpy"


def test_libraries_are_found_in_a_script_and_its_own_modules(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import os, torch.distributed as dist\nfrom model.net import Net\nfrom . import x\nimport gone, local\n"
        "def later():\n    import numpy\n"
    )
    (folder / "model").mkdir()
    (folder / "model/__init__.py").write_text("")
    (folder / "model/net.py").write_text("from torch.nn import Linear\nimport train\n")
    (folder / "local.py").write_text("import torch (\n")
    found = libraries_of(folder / "train.py", folder)
    assert (found.modules, found.left_out) == (["torch.distributed", "torch.nn"], []), (
        "a function may import after strata.init"
    )
    assert libraries_of(folder / "gone.py", folder).modules == []


@pytest.mark.parametrize(
    ("text", "supports_graceful_stop"),
    [
        ("import strata\nrun = strata.init(model=net)\n", True),
        ("import strata as st\ndef main():\n    st.init()\n", True),
        ("from strata import TrainingOrchestrator\n", True),
        ("import strata\nstrata.TrainingOrchestrator().train(main)\n", True),
        ("import helper\n", True),
        ("import strata\nclient = strata.connect()\nlogging.init()\n", False),
        ("import wandb\nwandb.init()\n", False),
        ("import strata (\n", False),
    ],
)
def test_whether_a_script_uses_init_is_read_from_it_and_its_files(
    folder: Path, text: str, supports_graceful_stop: bool
) -> None:
    (folder / "helper.py").write_text("from strata import init\n")
    (folder / "train.py").write_text(text)
    assert uses_init((sys.executable, "train.py", "--epochs", "3")) is supports_graceful_stop


def test_a_program_that_cannot_be_inspected_counts_as_not_using_init() -> None:
    assert not uses_init(("sh", "-c", "python train.py"))
    assert not uses_init(("python", "-c", "import strata; strata.init()"))


@pytest.mark.parametrize(
    "prepares",
    [
        "os.environ['OMP_NUM_THREADS'] = '4'",
        "os.environ |= {'A': 'b'}",
        "del environ['A']",
        "os.environ.setdefault('A', 'b')",
        "environ.update(A='b')",
        "os.putenv('A', 'b')",
        "dotenv.load_dotenv()",
        "sys.path.insert(0, 'lib')",
        "sys.path = ['lib'] + sys.path",
        "os.sched_setaffinity(0, {1})",
    ],
)
def test_imports_after_a_preparation_are_not_preloaded(folder: Path, prepares: str) -> None:
    (folder / "model.py").write_text("import torch\n")
    (folder / "train.py").write_text(f"import numpy, os, sys\n{prepares}\nimport model\nimport jax\n")
    found = libraries_of(folder / "train.py", folder)
    assert found.modules == ["numpy"]
    assert found.left_out == ["train.py, line 2, must come before model"]


@pytest.mark.parametrize(
    "harmless",
    [
        "x = os.environ['A']",
        "os.environ.get('A')",
        "sys.path.append('lib')",
        "path = 'a'",
        "p.path.join('a')",
    ],
)
def test_harmless_statements_leave_no_import_out(folder: Path, harmless: str) -> None:
    (folder / "train.py").write_text(f"import os, sys\n{harmless}\nimport torch\n")
    found = libraries_of(folder / "train.py", folder)
    assert (found.modules, found.left_out) == (["torch"], [])


async def test_output_of_a_warm_process_before_it_is_a_rank_is_labelled_warm(folder: Path) -> None:
    (folder / "chatty.py").write_text("import sys\nprint('imported', file=sys.stderr)")
    (folder / "train.py").write_text("import chatty\nprint('trains')")
    ends = os.pipe(), os.pipe()
    outputs = RankOutputs(*(Console(theirs, {}) for _, theirs in ends))
    command = (sys.executable, "train.py")
    inherited = {**os.environ, "PYTHONPATH": str(folder)}
    starter = WarmStarter.of(command, modules=("chatty",), inherited=inherited, outputs=outputs)
    assert starter is not None
    starter.prepare(1)
    sent_hello(starter)
    assert os.read(ends[1][0], 4096) == b"[warm] imported\n"
    started = starter.start(inherited, name="rank 2")
    assert started.warm
    assert started.output is not None
    started.output.begin(2, None)
    assert await started.child.join_async(LIMIT_S) == 0
    await started.output.passed_on()
    assert os.read(ends[0][0], 4096) == b"[rank 2] trains\n"
    for end in (*ends[0], *ends[1]):
        os.close(end)

"""The large libraries a script will import, and whether it uses `strata.init`, found without running the script."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LIBRARIES = frozenset(
    {"PIL", "accelerate", "datasets", "diffusers", "einops", "equinox", "flax", "grpc", "jax", "lightning"}
    | {"numpy", "optax", "orbax", "pandas", "peft", "pyarrow", "pytorch_lightning", "safetensors", "scipy"}
    | {"sklearn", "strata", "timm", "tokenizers", "torch", "torchaudio", "torchdata", "torchvision"}
    | {"transformers"}
)
"""Libraries that take seconds to import, and whose import does not depend on the place of a rank."""
_MOST_FILES = 100


_WRITERS = frozenset({"putenv", "unsetenv", "load_dotenv", "sched_setaffinity"})
_METHODS = {"environ": frozenset({"setdefault", "update", "pop", "clear"}), "path": frozenset({"insert"})}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_INIT = frozenset({"init", "TrainingOrchestrator"})
"""Names of `strata` whose use means that a script's ranks support graceful stop."""


@dataclass(slots=True)
class Libraries:
    """The result of a search: `modules`, in the order of their imports, and the reasons why others were left out.

    `supports_graceful_stop`: a file uses `strata.init`, so ranks stop by themselves when requested.
    """

    modules: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Sentences, one for each line of a file that changes what a later import in the same file may read."""
    supports_graceful_stop: bool = False


def libraries_of(script: Path, root: Path) -> Libraries:
    """Return the modules of `LIBRARIES` that `script`, or a file of its own below `root`, imports when it is loaded.

    Imports inside of functions are left out: they may run after `strata.init`, which makes a process group if torch is
    imported. A rank in a warm process would then make a group, and a rank in an ordinary process would not.
    Imports after a line that sets an environment variable (OMP_NUM_THREADS, say) or changes the module search path
    are left out, since an early import would not see that change. A file that cannot be read or parsed adds nothing:
    running it will show the error.
    """
    found = Libraries()
    seen: set[Path] = set()
    ahead = [script]
    while ahead and len(seen) < _MOST_FILES:
        file = ahead.pop(0)
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        found.supports_graceful_stop = found.supports_graceful_stop or _uses_init(tree)
        for name in _imported(tree, file, found.left_out):
            if name.partition(".")[0] not in LIBRARIES:
                ahead += _local(name, root)
            elif name not in found.modules:
                found.modules.append(name)
    return found


def _uses_init(tree: ast.Module) -> bool:
    """Tell whether a file uses `strata.init`, or the class behind it, under any name."""
    aliases = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "strata"}
        if _names(node) == ["strata"] and isinstance(node, ast.ImportFrom):
            aliases |= {"" for alias in node.names if alias.name in _INIT}
    if "" in aliases:
        return True
    return any(
        isinstance(node, ast.Attribute) and node.attr in _INIT and _last_name(node.value) in aliases
        for node in ast.walk(tree)
    )


def _imported(tree: ast.Module, file: Path, left_out: list[str]) -> Iterator[str]:
    """Yield the modules a file imports, in line order, up to the first line that changes what a later import
    may read.
    """
    prepared = 0
    within = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, _FUNCTIONS)
        for node in ast.walk(function)
    }
    for node in sorted(ast.walk(tree), key=lambda n: (getattr(n, "lineno", 0), getattr(n, "col_offset", 0))):
        names = _names(node) if id(node) not in within else []
        if names and prepared:
            left_out.append(f"{file.name}, line {prepared}, must come before {names[0]}")
            return
        yield from names
        prepared = prepared or (getattr(node, "lineno", 0) if _prepares(node) else 0)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _prepares(node: ast.AST) -> bool:
    """Tell whether an expression changes what a later import may read: the environment, `sys.path`."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _last_name(node.value) in _METHODS
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return node.attr in _METHODS
    if not isinstance(node, ast.Call):
        return False
    if _last_name(node.func) in _WRITERS:
        return True
    called = node.func
    return isinstance(called, ast.Attribute) and called.attr in _METHODS.get(_last_name(called.value), ())


def _last_name(node: ast.AST) -> str:
    """Return the last name of an expression: `environ` for `os.environ` and for `environ`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _local(name: str, root: Path) -> Iterator[Path]:
    base = root.joinpath(*name.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            yield candidate

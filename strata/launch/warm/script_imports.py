"""Which large libraries a script is going to import, and whether it uses `strata.init`: found without running it."""

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
"""Those that cost seconds, and that nothing of a place must be known for while they are imported."""
_MOST_FILES = 100


_WRITERS = frozenset({"putenv", "unsetenv", "load_dotenv", "sched_setaffinity"})
_METHODS = {"environ": frozenset({"setdefault", "update", "pop", "clear"}), "path": frozenset({"insert"})}


_INIT = frozenset({"init", "TrainingOrchestrator"})
"""What of `strata` makes a script's ranks heed notices."""


@dataclass(slots=True)
class Libraries:
    """What was found: `modules`, in the order of their imports, and what some were left out for.

    `heeds`: some file uses `strata.init`, so that ranks stop by themselves when they are asked to.
    """

    modules: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Sentences: where a file prepares something that imports after it may look at."""
    supports_graceful_stop: bool = False


def libraries_of(script: Path, root: Path) -> Libraries:
    """Return the modules of `LIBRARIES` that `script`, or a file of its own below `root`, imports.

    What a file imports after it has set an environment variable (OMP_NUM_THREADS, say) or changed
    where modules are found is left out: done early, that import would not see it. A file that cannot
    be read or parsed adds nothing: running it will tell.
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
    """Tell whether a file names `strata.init`, or the class behind it, under whatever name it imports it."""
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
    """Yield what a file imports, in the order of its lines, up to one that prepares for others."""
    prepared = 0
    for node in sorted(ast.walk(tree), key=lambda n: (getattr(n, "lineno", 0), getattr(n, "col_offset", 0))):
        names = _names(node)
        if names and prepared:
            left_out.append(f"{file.name}, line {prepared}, is to come before {names[0]}")
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
    """Tell whether an expression changes what a later import may find: the environment, `sys.path`."""
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
    """Return `environ` for `os.environ` as for `environ`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _local(name: str, root: Path) -> Iterator[Path]:
    base = root.joinpath(*name.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            yield candidate

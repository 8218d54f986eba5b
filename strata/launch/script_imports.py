"""Which large libraries a script is going to import, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = frozenset(
    {"PIL", "accelerate", "datasets", "diffusers", "einops", "equinox", "flax", "grpc", "jax", "lightning"}
    | {"numpy", "optax", "orbax", "pandas", "peft", "pyarrow", "pytorch_lightning", "safetensors", "scipy"}
    | {"sklearn", "strata", "timm", "tokenizers", "torch", "torchaudio", "torchdata", "torchvision"}
    | {"transformers"}
)
"""Those that cost seconds, and that nothing of a place must be known for while they are imported."""
_MOST_FILES = 100


def libraries_of(script: Path, root: Path) -> list[str]:
    """Return the modules of `LIBRARIES` that `script`, or a file of its own below `root`, imports.

    In the order found. A file that cannot be read or parsed adds nothing: running it will tell.
    """
    found: dict[str, None] = {}
    seen: set[Path] = set()
    ahead = [script]
    while ahead and len(seen) < _MOST_FILES:
        file = ahead.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for name in _imported(file):
            if name.partition(".")[0] in LIBRARIES:
                found[name] = None
            else:
                ahead += _local(name, root)
    return list(found)


def _imported(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _local(name: str, root: Path) -> Iterator[Path]:
    base = root.joinpath(*name.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            yield candidate

"""Rules for the tree that no linter checks, applied to the files that git tracks.

- a hand-written .py or .proto file has at most 500 lines: split a longer one;
- no file names the host of a package registry or a path of one machine: a clone gets both from its environment;
- a folder has at most 18 files: split a larger one;
- no identifier has a retired word: docs/glossary.md has the field's word for it;
- a unit test of the coordinator, the core, the client or checkpoints uses no private name of Strata: the test
  checks a module's promises, so that the implementation can change.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 500
MAX_FILES = 18
GENERATED = ("strata/v1/", "strata/etcdapi/")
FLAT = frozenset({"benchmarks", "docs", "docs/adr", "docs/images/dashboard", "tests/planted", "tests/ranks"})
"""Folders without a file limit, because other files name the files in them (benchmarks, pictures, patches, …)."""
RETIRED = frozenset(
    [
        "ailment",
        "ailments",
        "asked",
        "chore",
        "chores",
        "chronicle",
        "condemned",
        "door",
        "doors",
        "doubt",
        "doubts",
        "entomb",
        "fruitless",
        "gone",
        "government",
        "heard",
        "heeds",
        "house",
        "hurry",
        "keeper",
        "lone",
        "lookout",
        "papers",
        "patchwork",
        "patience",
        "said",
        "shelf",
        "supervisor",
        "told",
        "trouble",
        "troubles",
        "untold",
    ]
)
"""Words that the field does not use. No identifier may have them; see docs/glossary.md."""
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
BANNED = {
    "a registry's host": re.compile(
        r"\b(?:files\.pythonhosted|(?:test\.)?pypi|(?:deb|ftp|security|snapshot)\.debian"
        r"|(?:archive|security|ports)\.ubuntu|registry\.npmjs|download\.pytorch|proxy\.golang)\.\w+"
    ),
    "a path of one machine": re.compile(r"(?<![\w.$}])/(?:work|root|opt/wheels|opt/pypi)(?:/|\b)"),
    "the steering folder, which a clone does not have": re.compile(r"\.\./shared\b"),
}
PUBLIC_ONLY = tuple(f"tests/unit/{part}/" for part in ("checkpoint", "client", "coordinator", "core"))
NOT_YET = frozenset(
    f"tests/unit/client/{name}.py"
    for name in ("fake_rank", "rank/test_connect", "rank/test_rank_client", "rank/test_rank_ending")
)
"""These tests use the internals of the rank's client. They will be removed when that client is replaced."""
OF_LIBRARIES = frozenset(
    {"_current_frames", "_exit", "_metadata", "_rebuild_tensor_v2", "_sleep", "_utils", "_version"}
)
"""Private names of Python and of torch that have no public counterpart."""
BY_NAME = frozenset({"delattr", "getattr", "hasattr", "setattr"})


def crowded(names: list[str]) -> Iterator[str]:
    """Yield a problem for each folder with too many files."""
    folders = Counter(str(Path(name).parent) for name in names)
    for folder, count in sorted(folders.items()):
        if count > MAX_FILES and folder not in FLAT and not f"{folder}/".startswith(GENERATED):
            yield f"{folder}: {count} files, at most {MAX_FILES}"


def retired(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each identifier that is defined with a retired word."""
    for node in ast.walk(ast.parse(text)):
        named: list[str] = []
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                named = [name]
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                named = [name]
            case ast.alias(asname=str(name)):
                named = [name]
            case _:
                continue
        for name in named:
            if not RETIRED.isdisjoint(part.lower() for part in PARTS.findall(name)):
                yield node.lineno, name


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    return sorted(name for name in listed.stdout.decode().split("\0") if name and Path(name).is_file())


def problems(name: str) -> Iterator[str]:
    try:
        text = Path(name).read_text()
    except UnicodeDecodeError:
        return  # a picture or an archive
    lines = text.splitlines()
    hand_written = name.endswith((".py", ".proto")) and not name.startswith(GENERATED)
    if hand_written and len(lines) > MAX_LINES:
        yield f"{name}: {len(lines)} lines, at most {MAX_LINES}"
    for number, line in enumerate(lines, 1):
        for what, pattern in BANNED.items():
            if pattern.search(line) and name != "scripts/check_tree.py":
                yield f"{name}:{number}: names {what}"
    if name.endswith(".py") and hand_written:
        for part in Path(name).with_suffix("").parts:
            if not RETIRED.isdisjoint(part.split("_")):
                yield f"{name}: has a retired word in its path"
        for number, identifier in retired(text):
            yield f"{name}:{number}: {identifier} has a retired word: docs/glossary.md has the field's"
    if name.endswith(".py") and name.startswith(PUBLIC_ONLY) and name not in NOT_YET:
        for number, private in private_names(text):
            yield f"{name}:{number}: names {private}, which is private"


def private_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private import, and of each private attribute except of `self` and `cls`."""
    for node in ast.walk(ast.parse(text)):
        named: list[str] = []
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=attribute):
                named = [attribute]
            case ast.Import(names=names):
                named = [each.name for each in names]
            case ast.ImportFrom(module=module, names=names):
                named = [module or "", *(each.name for each in names)]
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in BY_NAME:
                values = [each.value for each in node.args if isinstance(each, ast.Constant)]
                named = [value for value in values if isinstance(value, str)]
            case _:
                continue
        for part in (part for each in named for part in each.split(".")):
            if part.startswith("_") and not part.startswith("__") and part not in OF_LIBRARIES:
                yield node.lineno, part


def main() -> int:
    names = tracked()
    found = [*crowded(names), *(problem for name in names for problem in problems(name))]
    for problem in found:
        print(problem)
    print(f"tree rules: {len(names)} files, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""The OpenAPI document of `/api/v1`, generated from the resources in `model`.

`READS` has a row for each path. Descriptions are the docstrings of the classes and of their fields. `scripts/gen-api`
writes the document to `openapi.json`, from which `web/` generates its types.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.dashboard.api import model

FILE: Final = Path(__file__).with_name("openapi.json")
REFERENCE: Final = "#/components/schemas/{name}"
ACTIONS: Final = ("pin", "unpin", "tag", "untag", "delete", "fork")
TEXT: Final = {"type": "string"}
COUNT: Final = {"type": "integer", "minimum": 0}

READS: Final[dict[str, tuple[type, dict[str, dict[str, Any]]]]] = {
    "/me": (model.Me, {}),
    "/cluster": (model.Cluster, {}),
    "/events": (model.Events, {}),
    "/jobs": (model.Jobs, {"phase": TEXT, "q": TEXT, "page_token": TEXT}),
    "/jobs/{job}": (model.Job, {}),
    "/jobs/{job}/ranks": (model.Ranks, {}),
    "/jobs/{job}/ranks/{rank}": (model.Rank, {}),
    "/jobs/{job}/devices": (model.Devices, {}),
    "/jobs/{job}/heatmap": (model.Heatmap, {}),
    "/jobs/{job}/history": (
        model.History,
        {"interval_ms": {"type": "integer", "enum": [1000, 15000]}, "since_unix_ms": COUNT},
    ),
    "/jobs/{job}/barriers": (model.Barriers, {}),
    "/jobs/{job}/datasets": (model.Datasets, {}),
    "/jobs/{job}/checkpoints": (model.Checkpoints, {"page_token": TEXT}),
    "/jobs/{job}/generations": (model.Generations, {}),
    "/jobs/{job}/events": (model.Events, {}),
}
"""For each path the type that GET returns, and the query's parameters."""


def document() -> dict[str, Any]:
    """Return the OpenAPI document of this version of Strata."""
    classes = [each for each in vars(model).values() if dataclasses.is_dataclass(each)]
    _, schemas = msgspec.json.schema_components(classes, schema_hook=_any_body, ref_template=REFERENCE)
    for name, schema in schemas.items():
        _describe(name, schema)
    paths: dict[str, Any] = {f"/api/v1{path}": {"get": _read(path, *READS[path])} for path in READS}
    paths["/api/v1/stream"] = {"get": _stream()}
    paths["/api/v1/jobs/{job}/checkpoints/{step}/{action}"] = {"post": _action()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Strata", "version": "1", "description": "Read API and stream of a replica."},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _any_body(_type: type) -> dict[str, Any]:
    """Return the schema of `Change.body`, whose type depends on the watched path."""
    return {"type": "object"}


def _describe(name: str, schema: dict[str, Any]) -> None:
    """Add the docstrings of the class and its fields, and mark each field of an answer as required.

    A replica sends every field. Versions of msgspec and Python differ in the indentation that they keep.
    """
    if "description" in schema:
        schema["description"] = inspect.cleandoc(schema["description"])
    if name != "CheckpointAction":
        schema["required"] = list(schema["properties"])
    source = inspect.getsource(getattr(model, name))
    fields = ast.parse(source).body[0]
    assert isinstance(fields, ast.ClassDef)
    for before, after in zip(fields.body, fields.body[1:], strict=False):
        match before, after:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                schema["properties"][field]["description"] = inspect.cleandoc(text)


def _read(path: str, result: type, query: dict[str, dict[str, Any]]) -> dict[str, Any]:
    parameters = [*_in_path(path), *({"name": name, "in": "query", "schema": query[name]} for name in query)]
    return {"operationId": _operation("get", path), "parameters": parameters, "responses": _answers(result)}


def _stream() -> dict[str, Any]:
    return {
        "operationId": "stream",
        "description": (
            "Server-sent events. Event `change` has a Change as its data; its id is a revision. A comment comes at"
            " least every second. The server may end a stream at any time."
        ),
        "parameters": [
            {
                "name": "watch",
                "in": "query",
                "required": True,
                "description": "A path below /api/v1, with its query, as /jobs/gpt/ranks.",
                "schema": {"type": "array", "items": TEXT},
            },
            {"name": "Last-Event-ID", "in": "header", "schema": TEXT},
        ],
        "responses": _answers(model.Change, "text/event-stream"),
    }


def _action() -> dict[str, Any]:
    path = "/jobs/{job}/checkpoints/{step}/{action}"
    header = {"name": "X-Strata-Action", "in": "header", "required": True, "schema": {"const": "1"}}
    body = {"application/json": {"schema": {"$ref": REFERENCE.format(name="CheckpointAction")}}}
    return {
        "operationId": "actOnCheckpoint",
        "parameters": [*_in_path(path), header],
        "requestBody": {"required": True, "content": body},
        "responses": _answers(
            model.Checkpoint, or_null="The checkpoint after the action; null if its record was deleted."
        ),
    }


def _answers(result: type, media: str = "application/json", *, or_null: str = "") -> dict[str, Any]:
    def answer(name: str, text: str, kind: str) -> dict[str, Any]:
        return {"description": text, "content": {kind: {"schema": {"$ref": REFERENCE.format(name=name)}}}}

    found = answer(result.__name__, or_null or inspect.getdoc(result) or result.__name__, media)
    if or_null:
        content = found["content"][media]
        content["schema"] = {"anyOf": [content["schema"], {"type": "null"}]}
    return {
        "200": found,
        "default": answer("Problem", inspect.getdoc(model.Problem) or "", "application/json"),
    }


def _in_path(path: str) -> Iterator[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "job": TEXT,
        "rank": COUNT,
        "step": COUNT,
        "action": {"type": "string", "enum": list(ACTIONS)},
    }
    for name in re.findall(r"{(\w+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": kinds[name]}


def _operation(verb: str, path: str) -> str:
    words = [word.strip("{}") for word in path.split("/") if word]
    return verb + "".join(word.capitalize() for word in words)


def main(arguments: list[str]) -> int:
    """Write the document; with `--check` return 1 if the existing file is not current."""
    text = json.dumps(document(), indent=1) + "\n"
    current = FILE.exists() and FILE.read_text() == text
    if arguments == ["--check"]:
        if not current:
            print(f"gen-api: {FILE.name} is not current: run scripts/gen-api and commit the result")  # noqa: T201
        return 0 if current else 1
    if not current:
        FILE.write_text(text)
        print(f"gen-api: wrote {FILE.name}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

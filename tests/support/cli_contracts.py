"""Checks of ``--json`` output against the schemas of ``json-schema``."""

from __future__ import annotations

from typing import Any

import msgspec

from persisting.cli import app
from persisting.cli.json_contract import CONTRACT, schema_of

assert all(app.cli.commands.values()), "importing the commands registers their output"

_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def decoded(command: str, text: str) -> Any:
    """Decode what a command printed and check its schema; lines become a list."""
    promised, schema = CONTRACT[command], schema_of(command)
    parts = text.splitlines() if promised.lines else [text]
    for part in parts:
        fits(msgspec.json.decode(part), schema, schema.get("$defs", {}), command)
    values = [msgspec.json.decode(part, type=promised.type, strict=True) for part in parts]
    return values if promised.lines else values[0]


def fits(value: Any, schema: dict[str, Any], known: dict[str, Any], where: str) -> None:
    """Fail if a value does not match a schema; keys that the schema does not name are errors."""
    if "$ref" in schema:
        schema = known[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        problems = []
        for one in schema["anyOf"]:
            try:
                return fits(value, one, known, where)
            except AssertionError as exc:
                problems.append(exc)
        raise AssertionError(f"{where}: {problems}")
    if "type" in schema:
        kind = _KINDS[schema["type"]]
        assert isinstance(value, kind), f"{where}: {value!r} is not of type {schema['type']}"
        assert kind is bool or not isinstance(value, bool), f"{where}: {value!r}"
    if isinstance(value, dict) and "properties" in schema:
        assert set(value) <= set(schema["properties"]), f"{where}: {set(value)}"
        assert set(schema.get("required", [])) <= set(value), f"{where}: {set(value)}"
        for name, item in value.items():
            fits(item, schema["properties"][name], known, f"{where}.{name}")
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        for name, item in value.items():
            fits(item, schema["additionalProperties"], known, f"{where}.{name}")
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, item in enumerate(value):
            fits(item, schema["items"], known, f"{where}[{number}]")
    return None

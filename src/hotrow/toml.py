"""Writes TOML. The standard library reads it and does not write it; settings need only a small part."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(data: Mapping[str, Any]) -> str:
    """Strings, numbers, booleans, lists and tables as TOML text that reads back as the same data."""
    return "\n".join(_section(data, ())).strip("\n") + "\n"


def _section(data: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(k)} = {_value(v)}" for k, v in data.items() if not isinstance(v, Mapping)]
    if path and (lines or not data):
        lines = ["", f"[{'.'.join(_key(p) for p in path)}]", *lines]
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines += _section(value, (*path, key))
    return lines


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    raise TypeError(f"TOML has no value for {value!r}.")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    """As JSON writes it, and DEL escaped too, which only TOML asks for."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

"""What the standard library, which reads TOML, leaves open: writing it, and overriding one value of it."""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from hotrow.errors import SettingsError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(data: Mapping[str, Any]) -> str:
    """Strings, numbers, booleans, lists and tables as TOML text that reads back as the same data."""
    return "\n".join(_section(data, ())).strip("\n") + "\n"


def override_setting(data: dict[str, Any], override: str) -> None:
    """Puts one "key=value" into `data`; what stood at that key is replaced."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f'--set {override}: write it as key=value, as in "train.epochs=2".')
    *sections, last = _key_path(key.strip(), override)
    at = data
    for name in sections:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise SettingsError(f'--set {override}: "{name}" is a value, it has no settings below it.')
    at[last] = _parsed(text.strip(), override)


def _key_path(key: str, override: str) -> list[str]:
    try:
        below: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise SettingsError(f'--set {override}: "{key}" is not the name of a setting.') from None
    path = []
    while isinstance(below, dict):
        (name, below), *_ = below.items()
        path.append(name)
    return path


def _parsed(text: str, override: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if not text or text[0] in "[{\"'":
            raise SettingsError(f"--set {override}: {text or 'nothing'} is not a TOML value.") from None
        return text  # a bare word, as a shell leaves it of model.name="din"


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

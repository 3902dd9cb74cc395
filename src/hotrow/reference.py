"""docs/settings.md from the settings models themselves, so that the page says what the code takes.

python -m hotrow.reference > docs/settings.md

Every model is written where it is first used; where it is used again the page leads back there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from hotrow.data.schema import Schema
from hotrow.data.synth import SynthSettings
from hotrow.plan.topology import Topology
from hotrow.run import Run

HEAD = """# Settings

Made by `python -m hotrow.reference` from the models that check them. An unknown name is refused with the nearest
right one, and every value is checked before anything starts. "needed" is what has no default.

| file | what it is |
| --- | --- |
| [run file](#the-run-file) | what `hotrow train` runs |
| [schema](#the-schema) | what the columns of a log mean, for `hotrow prepare --schema` |
| [cluster file](#the-cluster-file) | the ranks and links there are, for `hotrow plan --topology` |
| [synth](#settings-of-synth) | what `hotrow synth --set` takes |

Any setting of a run file can be given on the command line too, as in `--set train.epochs=2`.
"""

_PAGES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The run file", "TOML. `[tables]` holds what all tables share, `[tables.NAME]` what one has of its own.", Run),
    ("The schema", "TOML or JSON.", Schema),
    ("The cluster file", "TOML; `hotrow topology --out cluster.toml` measures one.", Topology),
    ("Settings of synth", "`hotrow synth LOG --set NAME=VALUE`.", SynthSettings),
)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for part in _PAGES for line in _Writer(part[2]).lines(part[0], part[1]))]) + "\n"


class _Writer:
    """Writes one file's settings, models depth first; `_written` is where each model stands."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._schema = model.model_json_schema()
        self._models: Mapping[str, Any] = self._schema.get("$defs", {})
        self._written: dict[str, str] = {}

    def lines(self, title: str, said: str) -> Iterator[str]:
        yield from (f"## {title}", "", said, "")
        sections = {name: p for name, p in self._schema["properties"].items() if self._below(p)}
        plain = {name: p for name, p in self._schema["properties"].items() if name not in sections}
        if plain:
            yield from self._table(plain, self._schema.get("required", ()))
        for name, prop in sections.items():
            yield from self._section(name, prop)

    def _section(self, path: str, prop: Mapping[str, Any]) -> Iterator[str]:
        """A setting that has settings below it: one model, or one of several by name."""
        below = self._below(prop)
        known = tuple(sorted(below.values()))
        if str(known) in self._written:
            if "." not in path:
                yield from (f"### {_shown(path, prop)}", "", _sentence(prop.get("description", "")))
                yield from (f"The same settings as {self._where(path, prop)}.", "")
            return
        self._written[str(known)] = path
        yield from (f"### {_shown(path, prop)}", "")
        if prop.get("description"):
            yield from (f"{_sentence(prop['description'])}", "")
        for name, model in below.items():
            chosen = "const" in self._fields(model).get("name", {})
            yield from self._model(path, name if chosen else "", model)
        for model in below.values():
            for name, inner in self._fields(model).items():
                if self._below(inner):
                    yield from self._section(f"{path}.{name}", inner)
            extra = self._models[model].get("additionalProperties")
            if isinstance(extra, Mapping):
                yield from self._section(f"{path}.NAME", extra)

    def _model(self, path: str, name: str, model: str) -> Iterator[str]:
        said = _joined(self._models[model].get("description", ""))
        fields = {n: p for n, p in self._fields(model).items() if n != "name" or "const" not in p}
        lead = f'**`name = "{name}"`** ' if name else ""
        if lead or said:
            yield from (f"{lead}{said}".rstrip(), "")
        if fields:
            yield from self._table(fields, self._models[model].get("required", ()), path)

    def _table(self, fields: Mapping[str, Any], required: Any, path: str = "") -> Iterator[str]:
        yield from ("| setting | takes | default | meaning |", "| --- | --- | --- | --- |")
        for name, prop in fields.items():
            otherwise = "if not given" in prop.get("description", "")  # then that says what it is
            default = "needed" if name in required and not otherwise else _default(prop)
            where = self._where(f"{path}.{name}" if path else name, prop)
            yield f"| `{name}` | {where or _takes(prop)} | {default} | {_cell(prop.get('description', ''))} |"
        yield ""

    def _where(self, path: str, prop: Mapping[str, Any]) -> str:
        """A link to where the models of a setting stand."""
        below = self._below(prop)
        if not below:
            return ""
        at = self._written.get(str(tuple(sorted(below.values()))), path)
        head = _shown(at, prop)
        return f"[{head.replace('`', '')}](#{slug(head)})"

    def _fields(self, model: str) -> Mapping[str, Any]:
        fields: Mapping[str, Any] = self._models[model].get("properties", {})
        return fields

    def _below(self, prop: Mapping[str, Any]) -> dict[str, str]:
        """The models that a setting may be, by the name that chooses them."""
        found: dict[str, str] = {}
        for name, ref in prop.get("discriminator", {}).get("mapping", {}).items():
            found[name] = ref.rsplit("/", 1)[1]
        if found:
            return found
        if "$ref" in prop:
            model = prop["$ref"].rsplit("/", 1)[1]
            return {self._fields(model).get("name", {}).get("const", model): model} if model in self._models else {}
        for key in ("anyOf", "oneOf"):
            for option in prop.get(key, ()):
                found |= self._below(option)
        for key in ("items", "additionalProperties"):
            if isinstance(prop.get(key), Mapping):
                found |= self._below(prop[key])
        return found


def slug(heading: str) -> str:
    """The anchor that a heading gets where Markdown is shown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _shown(path: str, prop: Mapping[str, Any]) -> str:
    if "items" in prop or any("items" in option for option in prop.get("anyOf", ())):
        return f"`[[{path}]]`"
    return f"`[{path}{'.NAME' if isinstance(prop.get('additionalProperties'), Mapping) else ''}]`"


def _takes(prop: Mapping[str, Any]) -> str:
    """The kind of value, in words."""
    options = [o for key in ("anyOf", "oneOf") for o in prop.get(key, ()) if o.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(_takes(option) for option in options))
    if "enum" in prop:
        return ", ".join(f"`{json.dumps(value)}`" for value in prop["enum"])
    if "const" in prop:
        return f"`{json.dumps(prop['const'])}`"
    kind = prop.get("type")
    if kind == "array":
        items = prop.get("items", {})
        return f"a list: {_takes(items)}" if items else "a list"
    if kind == "object":
        inner = prop.get("additionalProperties")
        return f"a table of names: {_takes(inner)}" if isinstance(inner, Mapping) else "a table"
    words = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "string": "text"}
    said = "path" if prop.get("format") == "path" else words.get(str(kind), "value")
    bounds = [
        f"{sign} {prop[key]:g}"
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if key in prop
    ]
    return f"{said} {' and '.join(bounds)}".rstrip()


def _default(prop: Mapping[str, Any]) -> str:
    value = prop.get("default")
    if value is None or value in ([], {}, ""):
        return "none"
    if isinstance(value, Mapping):
        return f"`{value['name']}`" if "name" in value else "see there"
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _joined(text: str) -> str:
    """A docstring as one paragraph a paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


if __name__ == "__main__":
    sys.stdout.write(page())

"""The base of every settings model: unknown names are refused with the nearest right one.

Each component owns a small frozen model that says how to build it. `parse` turns plain data (a TOML
table, a dictionary) into such a model and pydantic's findings into one sentence each.
"""

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from hotrow.errors import SettingsError, nearest


class Settings(BaseModel):
    """Frozen, and closed to names it does not know and to numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


S = TypeVar("S", bound=Settings)


def parse(model: type[S], data: Any, where: str = "") -> S:
    """`model` from plain data; raises `SettingsError` naming every setting that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise SettingsError(explain(error, model, where)) from None


def explain(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """One line for each thing pydantic found wrong."""
    return "\n".join(_sentence(e, model, where) for e in error.errors())


def _sentence(finding: Any, model: type[BaseModel], where: str) -> str:
    path = [str(p) for p in finding["loc"]]
    place = ".".join(([where] if where else []) + path)
    message = finding["msg"].removeprefix("Value error, ")
    if finding["type"] == "extra_forbidden":
        known = _names_at(model, path[:-1])
        return f'{place}: there is no setting "{path[-1]}".{nearest(path[-1], known)}'
    if finding["type"] == "union_tag_invalid":
        tags = [tag.strip().strip("'") for tag in finding["ctx"]["expected_tags"].split(",")]
        tag = finding["ctx"]["tag"]
        what = path[-2].removesuffix("s") if path[-1].isdigit() else path[-1]  # an item of a list is one of its kind
        return f'{place}: there is no {what} "{tag}".{nearest(tag, tags)}'
    if finding["type"] == "union_tag_not_found":
        return f'{place}: a "name" is needed that says which {path[-1]} it is.'
    if finding["type"] == "sentence":
        return f"{place}: {message}" if place else message
    if finding["type"] == "missing":
        return f"{place}: this setting is needed and has no default."
    given = repr(finding.get("input"))
    if len(given) > 60:
        given = given[:57] + "..."
    return f"{place or 'settings'}: {message[:1].lower()}{message[1:]} (given: {given})."


def _names_at(model: type[BaseModel], path: list[str]) -> set[str]:
    """The setting names known at `path` below `model`; follows unions and containers as far as it can."""
    found = [model]
    for name in path:
        below: list[type[BaseModel]] = []
        for m in found:
            if name in m.model_fields:
                below += _models_in(m.model_fields[name].annotation)
            else:  # a key of a mapping, an item of a list or the tag of a union
                below += [m] if _tag(m) in (None, name) else []
        found = below
    return {n for m in found for n in m.model_fields}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for a in get_args(annotation) for m in _models_in(a)]


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("name")
    return field.default if field is not None and isinstance(field.default, str) else None

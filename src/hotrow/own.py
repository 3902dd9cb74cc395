"""`OwnClass`: a class of the user's, named in a run file as "package.module:Class". Imported only where that is safe.

A run file that a user starts may import code. A folder that somebody else may have written must not: the settings of
its run say the name, and nothing is imported until the user trusts it (`--trust-model`) or passes the class itself.
So settings are parsed without the class. Its own settings are checked when it is loaded, before anything starts.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError

from hotrow.errors import SettingsError, nearest
from hotrow.settings import Settings, explain

TAG = "package.module:Class"
"""What stands for any own class among the names of built-in ones."""


class OwnClass(Settings):
    """A class by its name, where its module lies, and below that its own settings as they were written."""

    model_config = ConfigDict(extra="allow")
    what: ClassVar[str] = "class"
    base: ClassVar[type] = object

    name: str = Field("", pattern=r"^([\w.]+:[\w.]+)?$", description='"package.module:Class"')
    folder: Path | None = Field(
        None, description="where its module lies, if not where Python looks; the run file's folder if not given"
    )
    _given: type | None = PrivateAttr(None)
    _trusted: bool = PrivateAttr(False)

    @property
    def own_settings(self) -> dict[str, Any]:
        """What the class's settings are made of."""
        return dict(self.__pydantic_extra__ or {})

    def given(self, own: type) -> Self:
        """The same for a class that the caller has at hand."""
        if not (isinstance(own, type) and issubclass(own, self.base)):
            said = own.__name__ if isinstance(own, type) else f"a {type(own).__name__}"
            raise SettingsError(f"The {self.what} must be a class made from {_named(self.base)}; {said} is none.")
        name, folder = self.place(own)
        as_written = self.model_dump(exclude={"name", "folder"}, exclude_unset=True)
        settings = type(self).model_validate({**as_written, "name": name, "folder": folder})
        settings._given = own
        return settings

    @staticmethod
    def place(own: type) -> tuple[str, Path | None]:
        """The name of a class and the folder that another process finds its module in."""
        return _place(own)

    def trusted(self, folder: Path | None = None) -> Self:
        """The same, to be imported when it is needed; a relative folder is taken from `folder`, which is the default.

        A module that Python finds without a folder needs none.
        """
        where = self.folder if folder is None else (folder / (self.folder or "")).resolve()
        settings = self.model_copy(update={"folder": where})
        settings._trusted = True
        return settings

    @property
    def unknown(self) -> str:
        """A sentence if nothing says which class it is."""
        if self.name or self._given is not None:
            return ""
        return f"the run names no {self.what}. Name one in its section, or pass a class: Trainer(run, {self.what}=...)."

    @property
    def source(self) -> Path | None:
        """Where its module lies in its folder; None for one that Python finds without."""
        if self.folder is None or not self.name:
            return None
        module = self.folder / self.name.partition(":")[0].partition(".")[0]
        return next((path for path in (module.with_suffix(".py"), module) if path.exists()), None)

    def load(self) -> type:
        """The class; imports it if that is allowed."""
        if self._given is not None:
            return self._given
        if self.unknown:
            raise SettingsError(f"{self.what}.name: {self.unknown}")
        if not self._trusted:
            raise SettingsError(
                f"The {self.what} of this run is {self.name}, a class that is not Hotrow's. Importing it runs "
                f"code that came with the run: if you trust it, say so with --trust-model (trust_model=True), or pass "
                f"the class."
            )
        return self._imported()

    def make(self, *inputs: Any) -> Any:
        """An instance: of settings, where the class has `Settings`, and of what all such classes are given."""
        own = self.load()
        settings = self.parsed(own)
        given = inputs if settings is None else (settings, *inputs)
        try:
            inspect.signature(own).bind(*given)
        except TypeError as error:
            form = "inputs" if settings is None else "settings, inputs"
            raise SettingsError(f"{self.name} cannot be made as {own.__name__}({form}): {error}.") from None
        return own(*given)

    def parsed(self, own: type) -> Any:
        """The class's own settings, checked; None if it has no `Settings`."""
        model = getattr(own, "Settings", None)
        given = self.own_settings
        known = _fields(model)
        if taken := sorted({"name", "folder"} & set(known)):
            raise SettingsError(
                f"{self.what}.{taken[0]}: it says where the class is, and the Settings of {self.name} have a "
                f'"{taken[0]}" too, which no run could set. Give theirs another name.'
            )
        for name in given:
            if name not in known and not _takes_any(model):
                raise SettingsError(f'{self.what}.{name}: {self.name} has no setting "{name}".{nearest(name, known)}')
        if model is None:
            return None
        try:
            return TypeAdapter(model).validate_python(given)
        except ValidationError as error:
            raise SettingsError(explain(error, model, self.what)) from None

    def _imported(self) -> type:
        module, _, path = self.name.partition(":")
        if self.folder is not None and str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))  # behind all else: a module of the run must not hide an installed one
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:
            places = f" in {self.folder} or" if self.folder is not None else ""
            lacking = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
            if lacking and (module == lacking or module.startswith(f"{lacking}.")):
                raise SettingsError(
                    f'{self.what}.name: there is no module "{lacking}"{places} where Python looks for modules. '
                    f"Install it, or set {self.what}.folder."
                ) from None
            raise SettingsError(
                f"{self.what}.name: importing {module} failed: {type(error).__name__}: {error}."
            ) from error
        for part in path.split("."):
            names = [n for n in vars(found) if not n.startswith("_")]
            found = getattr(found, part, None)
            if found is None:
                raise SettingsError(f'{self.what}.name: {module} has no "{part}".{nearest(part, names)}')
        if not (isinstance(found, type) and issubclass(found, self.base)):
            raise SettingsError(f"{self.what}.name: {self.name} is no class made from {_named(self.base)}.")
        return found


def _place(own: type) -> tuple[str, Path | None]:
    """The name of a class and the folder that another process finds its module in; of a script's, the script's."""
    module, name = own.__module__, own.__qualname__.replace(".<locals>", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return f"{module}:{name}", None
    if module == "__main__":
        return f"{Path(file).stem}:{name}", Path(file).resolve().parent
    return f"{module}:{name}", Path(file).resolve().parents[module.count(".") + (Path(file).stem == "__init__")]


def _fields(model: Any) -> tuple[str, ...]:
    if model is None:
        return ()
    if isinstance(model, type) and issubclass(model, BaseModel):
        return tuple(model.model_fields)
    if dataclasses.is_dataclass(model):
        return tuple(f.name for f in dataclasses.fields(model))
    raise SettingsError(f"{_named(model)} must be a pydantic model or a dataclass, for a run file's settings fill it.")


def _takes_any(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, BaseModel) and model.model_config.get("extra") == "allow"


def _named(own: Any) -> str:
    return f"{own.__module__}.{own.__qualname__}" if isinstance(own, type) else str(own)


def tag_of(value: Any) -> str:
    """Which settings a section is read as: those of a built-in name, or of an own class."""
    name = value.get("name", "") if isinstance(value, dict) else getattr(value, "name", "")
    return TAG if not isinstance(name, str) or not name or ":" in name else name

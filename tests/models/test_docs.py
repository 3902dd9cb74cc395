"""What docs/models.md shows, run as it stands there."""

import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hotrow import Feature, ModelInputs
from hotrow.models import Model, TransformerSettings
from hotrow.models.own import OwnModel

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def block(language: str, holds: str) -> str:
    """The first block of this language that holds a text."""
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if holds in text)


def test_a_model_of_ones_own_is_made_with_the_settings_beside_its_name() -> None:
    names: dict[str, Any] = {"__name__": "my_model"}  # as the module that the run file names
    exec(block("python", "class MyModel"), names)
    settings = TypeAdapter(Model).validate_python(tomllib.loads(block("toml", "MyModel"))["model"])
    assert isinstance(settings, OwnModel) and settings.name == "my_model:MyModel"
    model = settings.given(names["MyModel"]).build(ModelInputs([Feature(name="item")], {"item": 8}, dense=3))
    assert [tuple(weight.shape) for weight in model.parameters()] == [(32, 11), (32,), (1, 32), (1,)]


def test_a_module_of_ones_own_trains_on_unique_samples() -> None:
    names: dict[str, object] = {}
    exec(block("python", "def score"), names)
    assert names["embeddings"].steps == 1  # type: ignore[attr-defined]
    assert names["embeddings"].stats()["item"]["rows"] == 6  # type: ignore[attr-defined]


def test_the_models_table_of_a_run_file_is_understood() -> None:
    settings = TypeAdapter(Model).validate_python(tomllib.loads(block("toml", "transformer"))["model"])
    assert settings == TransformerSettings(targets={"history": "item"})


def test_every_model_is_on_the_page() -> None:
    defined = TypeAdapter(Model).json_schema()["$defs"].values()
    built_in = {model["properties"]["name"].get("const") for model in defined} - {None}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == built_in

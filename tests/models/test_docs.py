"""What docs/models.md shows, run as it stands there."""

import re
import tomllib
from pathlib import Path

from pydantic import TypeAdapter

from hotrow.models import Model, TransformerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_a_module_of_ones_own_trains_on_unique_samples() -> None:
    names: dict[str, object] = {}
    exec(block("python"), names)
    assert names["embeddings"].steps == 1  # type: ignore[attr-defined]
    assert names["embeddings"].stats()["item"]["rows"] == 6  # type: ignore[attr-defined]


def test_the_models_table_of_a_run_file_is_understood() -> None:
    settings = TypeAdapter(Model).validate_python(tomllib.loads(block("toml"))["model"])
    assert settings == TransformerSettings(targets={"history": "item"})


def test_every_model_is_on_the_page() -> None:
    defined = TypeAdapter(Model).json_schema()["$defs"].values()
    built_in = {model["properties"]["name"].get("const") for model in defined} - {None}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == built_in

"""Models and objectives of a user's own: by name in a run file, passed in a script, and never imported unasked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from own_parts import Broken, NoModule, Plain, Squared, Tower
from test_trainer import Interrupt, lines

from hotrow import Predictor, Run, Trainer
from hotrow.errors import SettingsError
from hotrow.run import load_run
from hotrow.toml import to_toml
from hotrow.train.evaluate import evaluate_path
from hotrow.train.trainer import train

HERE = Path(__file__).parent
TOWER = {"name": "own_parts:Tower", "width": 4}


@pytest.fixture
def run_file(make_run, tmp_path):
    """Writes a run down and reads it again, as a run file that the user starts."""

    def write(name="run.toml", **changes):
        path = tmp_path / name
        path.write_text(to_toml(make_run(**changes).model_dump(mode="json", exclude_none=True)))
        return path

    return write


@pytest.fixture
def own_run(run_file):
    return lambda **changes: load_run(run_file(**changes))


def test_a_model_of_ones_own_trains_by_its_name(own_run):
    run = own_run(model=TOWER, train__epochs=3)
    result = train(run)
    assert result.metrics["auc"] > 0.7
    with Trainer(run, resume=True) as trainer:
        assert trainer.model.top[0].out_features == 4


def test_a_model_of_ones_own_resumes_to_the_same_bits(own_run, tmp_path, same_weights):
    whole = own_run(model=TOWER, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = own_run(model=TOWER)
    assert train(run, progress=Interrupt(11)).stopped == "SIGTERM"
    train(run, resume=True)
    same_weights(whole.with_classes(Tower), run.with_classes(Tower))
    assert lines(run, "evaluate") == lines(whole, "evaluate")


def test_settings_of_a_class_that_no_run_could_set_are_refused(make_run):
    class Shadowed(Tower):
        class Settings(Tower.Settings):
            folder: str = "pictures"

    with pytest.raises(SettingsError, match=r'model\.folder: .* have a "folder" too'):
        Trainer(make_run(model={}), model=Shadowed)


def test_a_class_that_is_passed_is_found_by_its_name_later(make_run, tmp_path):
    run = make_run(train__steps=8, model={"width": 4})
    with Trainer(run, model=Tower) as trainer:
        result = trainer.fit()
    _, _, metrics = evaluate_path(run.output.folder, trust_model=True)
    assert metrics == pytest.approx(result.metrics, nan_ok=True)


def test_a_module_is_found_where_the_run_file_says(own_run, tmp_path):
    (tmp_path / "code").mkdir()
    source = (HERE / "own_parts.py").read_text()
    (tmp_path / "code" / "parts_elsewhere.py").write_text(source)
    (tmp_path / "parts_beside.py").write_text(source)
    model = {"name": "parts_elsewhere:Tower", "folder": "code"}
    objective = {"name": "parts_beside:Squared"}
    assert train(own_run(model=model, objective=objective, train__steps=4)).steps == 4
    with pytest.raises(SettingsError, match='no module "parts_beside_not"'):
        train(own_run(model={"name": "parts_beside_not:Tower"}))


def test_rows_have_the_values_more_that_a_class_asks_for(make_run):
    run = make_run(train__steps=2)
    with Trainer(run.model_copy(update={"model": Run.model_fields["model"].default}), model=Plain) as trainer:
        trainer.fit()
        assert {table.dim for table in trainer.embeddings.tables.values()} == {5}


def test_an_objective_of_ones_own_is_trained_and_measured(own_run):
    run = own_run(
        model=TOWER,
        objective={"name": "own_parts:Squared", "scale": 2.0},
        train__epochs=2,
        train__evaluate_every=8,
        train__early_stopping={"patience": 50},
    )
    result = train(run)
    assert set(result.metrics) == {"squared"}
    values = [line["squared"] for line in lines(run, "evaluate")]
    assert min(values) < values[0] and result.best_step is not None
    with Predictor(run.output.folder, trust_model=True) as predictor:
        found = predictor.predict({"user": [1], "item": [7**20], "history": [[]], "price": [0.5]})
    assert set(found) == {"click"}


def test_nothing_of_a_folder_is_imported_unless_it_is_trusted(own_run, tmp_path):
    run = own_run(model=TOWER, train__steps=2)
    train(run)
    for open_folder in (Predictor, evaluate_path):
        with pytest.raises(SettingsError, match="own_parts:Tower.*--trust-model"):
            open_folder(run.output.folder)
    Predictor(run.output.folder, model=Tower).close()
    # In a process of its own, so that a module that is already loaded hides nothing.
    code = (
        "import sys; from pathlib import Path; from hotrow.train.logs import RunFolder;"
        "RunFolder(Path(sys.argv[1])).run(); assert 'own_parts' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(run.output.folder)], check=True, cwd=HERE)


def test_hotrow_train_evaluate_and_predict_take_a_model_of_ones_own(run_file, data, tmp_path):
    path = run_file(model={**TOWER, "folder": str(HERE)}, train__steps=4)

    def hotrow(*arguments):
        found = subprocess.run(
            [sys.executable, "-m", "hotrow", *arguments], capture_output=True, text=True, env={**os.environ}
        )
        return found.returncode, found.stdout + found.stderr

    assert hotrow("train", str(path), "--json")[0] == 0
    folder = str(load_run(path).output.folder)
    code, said = hotrow("evaluate", folder)
    assert code != 0 and "--trust-model" in said and "Traceback" not in said
    assert hotrow("evaluate", folder, "--trust-model")[0] == 0
    out = str(tmp_path / "scores.parquet")
    assert hotrow("predict", folder, str(data), "--out", out, "--trust-model")[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_parts:Tover", 'own_parts has no "Tover".* Did you mean "Tower"'),
        ("own_parts:NoModule", "is no class made from torch.nn"),
        ("own_parts:Broken", "cannot be made as Broken"),
        ("own_parts:Fails", "cannot be made: ValueError: no such width"),
        ("no_such_module:Model", 'there is no module "no_such_module"'),
    ],
)
def test_a_class_that_cannot_be_used_is_a_sentence_before_anything_starts(own_run, name, said):
    run = own_run(model={"name": name})
    with pytest.raises(SettingsError, match=said):
        train(run)
    assert not run.output.folder.exists()


def test_settings_that_a_class_has_not_are_refused(own_run, make_run):
    with pytest.raises(SettingsError, match=r'model\.widht: .* has no setting "widht"\. Did you mean "width"'):
        train(own_run(model={**TOWER, "widht": 3}))
    with pytest.raises(SettingsError, match=r"model\.width: .*integer"):
        train(own_run(model={**TOWER, "width": "wide"}))
    with pytest.raises(SettingsError, match="a class is passed too"):
        Trainer(make_run(), model=Tower)
    for wrong in (NoModule, Tower.Settings(), Broken):
        with pytest.raises(SettingsError):
            Trainer(make_run(model={}), model=wrong)


def test_early_stopping_by_a_metric_that_the_objective_has_not_is_refused(own_run):
    run = own_run(
        model=TOWER, objective={"name": "own_parts:Squared"}, train__early_stopping={"metric": "auc"},
        train__evaluate_every=4,
    )  # fmt: skip
    with pytest.raises(SettingsError, match=r'early_stopping\.metric: "auc"'):
        train(run)


def test_an_objective_passed_in_a_script_is_used(make_run):
    with Trainer(make_run(train__steps=4), objective=Squared) as trainer:
        trainer.fit()
        assert set(trainer.evaluate("test")) == {"squared"}


def test_a_model_of_ones_own_learns_as_its_loop_would(make_run):
    run = make_run(model={}, train__steps=6)
    with Trainer(run, model=Tower) as trainer:
        losses = [float(trainer.step(ready)) for ready in trainer.pipeline()]
    assert len(losses) == 6 and all(torch.isfinite(torch.tensor(losses)))

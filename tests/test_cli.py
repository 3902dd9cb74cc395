"""The command line: results on standard output, sentences on standard error, exit codes with a meaning."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hotrow.bench
from hotrow import __version__
from hotrow.cli import app, going_on, main, show

COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)

LOG = "click,user,item,price\n" + "".join(f"{i % 2},{i % 7},{i % 5 + i % 2},{i % 3}.5\n" for i in range(400))
SCHEMA = """
label = "click"
dense = ["price"]
user = "user"

[[features]]
name = "user"

[[features]]
name = "item"
"""
RUN = """
[data]
path = "clicks"
batch_size = 32

[tables]
dim = 4

[model]
name = "wide_deep"

[output]
folder = "out"
tensorboard = false
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.fixture
def prepared(folder, call):
    arguments = ("--schema", folder / "schema.toml", "--split", "last:0.25", "--validation", "0")
    assert call("prepare", folder / "log.csv", folder / "clicks", *arguments)[0] == 0
    return folder


@pytest.fixture
def trained(prepared, call):
    assert call("train", prepared / "run.toml")[0] == 0
    return prepared


def test_help_does_not_wait_for_torch():
    code = """
import sys
from hotrow.cli import main
sys.argv = ["hotrow", "--help"]
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules and "pyarrow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"hotrow {command}" in out.split("Example:")[1]
    assert "--json" in out


def test_version(call):
    assert call("--version") == (0, f"hotrow {__version__}\n", "")


def test_an_unknown_command_is_a_wrong_call(call):
    code, _, err = call("trian")
    assert code == 2
    assert "Did you mean 'train'" in err


def test_a_log_is_made_with_its_best_auc_and_can_be_prepared(tmp_path, call):
    settings = ("--samples", 3000, "--set", "users=50", "--set", "seed=7")
    code, out, _ = call("synth", tmp_path / "log", *settings, "--json")
    assert code == 0
    said = json.loads(out)
    assert 0.5 < said["best_auc"] < 1
    assert said["settings"]["users"] == 50
    code, out, _ = call("prepare", tmp_path / "log", tmp_path / "data", "--json")
    assert code == 0
    assert json.loads(out)["facts"]["best_auc"] == said["best_auc"]
    code, out, _ = call("synth", tmp_path / "log", *settings, "--overwrite")
    assert code == 0
    assert "hotrow prepare" in out
    code, _, err = call("synth", tmp_path / "log", "--set", "user=50")
    assert code == 1
    assert 'Did you mean "users"?' in err


def test_a_log_is_prepared_and_described(folder, call):
    code, out, _ = call(
        "prepare",
        folder / "log.csv",
        folder / "clicks",
        "--schema",
        folder / "schema.toml",
        "--split",
        "last:0.25",
        "--validation",
        "0.2",
        "--json",
    )
    assert code == 0
    said = json.loads(out)
    assert said["kind"] == "data set"
    assert {split: of["samples"] for split, of in said["splits"].items()} == {
        "train": 240,
        "validation": 60,
        "test": 100,
    }
    assert [f["name"] for f in said["features"]] == ["user", "item"]
    code, out, _ = call("inspect", folder / "clicks")
    assert code == 0
    assert "240" in out and "validation" in out


def test_a_malformed_line_is_refused_with_its_place(folder, call):
    log = folder / "log.csv"
    log.write_text(LOG + "1,2,3,cheap\n")
    code, out, err = call("prepare", log, folder / "clicks", "--schema", folder / "schema.toml")
    assert code == 1
    assert out == ""
    assert f"{log}:402" in err
    assert "price" in err
    assert not (folder / "clicks").exists()


def test_training_says_what_it_came_to_and_where(prepared, call):
    code, out, _ = call("train", prepared / "run.toml", "--set", "train.epochs=2", "--json")
    assert code == 0
    said = json.loads(out)
    assert said["steps"] == 20
    assert said["samples"] == 600
    assert said["stopped"] == "end"
    assert Path(said["checkpoint"]).is_dir()
    assert said["folder"] == str(prepared / "out")
    assert 0 <= said["metrics"]["auc"] <= 1
    assert said["samples_per_second"] > 0


def test_a_table_for_people_names_the_run_folder(prepared, call):
    code, out, _ = call("train", prepared / "run.toml")
    assert code == 0
    assert "AUC" in out
    assert "samples a second" in out


def test_a_trained_run_is_not_run_over_and_can_be_resumed(trained, call):
    code, _, err = call("train", trained / "run.toml")
    assert code == 1
    assert "already holds a run" in err
    code, out, _ = call("train", trained / "run.toml", "--resume", "--set", "train.epochs=2", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 20
    code, _, err = call("train", trained / "run.toml", "--resume", "--overwrite")
    assert code == 1
    assert "give one of them" in err


def test_settings_as_run_can_be_run_again(trained, call):
    settings = trained / "out" / "settings.toml"
    assert call("train", settings, "--set", f"output.folder={trained / 'again'}")[0] == 0
    first = call("evaluate", trained / "out", "--json")
    again = call("evaluate", trained / "again", "--json")
    assert json.loads(first[1])["metrics"] == json.loads(again[1])["metrics"]


def test_a_run_folder_a_checkpoint_and_another_split_can_be_evaluated(trained, call):
    code, out, _ = call("evaluate", trained / "out", "--json")
    assert code == 0
    said = json.loads(out)
    assert said["split"] == "test"
    assert said["metrics"]["samples"] == 100
    code, out, _ = call("evaluate", said["checkpoint"], "--split", "train", "--json")
    assert code == 0
    assert json.loads(out)["metrics"]["samples"] == 300
    code, out, _ = call("evaluate", trained / "out", "--data", trained / "clicks")
    assert code == 0
    assert "log loss" in out


def test_a_run_and_its_checkpoint_can_be_inspected(trained, call):
    code, out, _ = call("inspect", trained / "out", "--json")
    assert code == 0
    run = json.loads(out)
    assert run["kind"] == "run"
    assert run["model"] == "wide_deep"
    assert run["tables"]["user"]["rows"] == 7
    assert run["tables"]["user"]["dim"] == 5
    checkpoint = run["checkpoints"][-1]["path"]
    code, out, _ = call("inspect", checkpoint, "--json")
    assert code == 0
    said = json.loads(out)
    assert (said["kind"], said["step"], said["stands_on"]) == ("checkpoint", 10, [])
    assert said["tables"] == run["tables"]
    for path in (trained / "out", checkpoint):
        assert "user" in call("inspect", path)[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "no.toml"), "There is no run file"),
        (("train", "run.toml"), "There is no data set"),
        (("train", "run.toml", "--set", "train.epoch=2"), 'Did you mean "epochs"?'),
        (("train", "run.toml", "--set", "epochs"), "write it as key=value"),
        (("evaluate", "nothing"), "There is no run folder or checkpoint"),
        (("inspect", "nothing"), "There is no folder"),
        (("inspect", "."), "is not a data set, a run folder or a checkpoint"),
        (("bench", "stroe"), 'Did you mean "store"?'),
    ],
)
def test_what_a_user_got_wrong_is_one_sentence_and_exit_code_1(folder, call, monkeypatch, arguments, said):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hotrow.bench, "BENCHES", {"store": lambda quick: {}}, raising=False)
    code, out, err = call(*arguments)
    assert code == 1
    assert out == ""
    assert err.startswith("hotrow: ")
    assert said in err
    assert "Traceback" not in err


UNREAD = (
    ("plan clicks --drift clicks --out x.plan", "--out"),
    ("plan clicks --drift clicks --picture x.html", "--picture"),
    ("plan clicks --drift clicks --threshold 3", "--threshold"),
    ("plan clicks --topology cluster.toml --threshold 3", "--threshold"),
    ("plan clicks --memory 1KiB --run steps.toml --profile clicks/profile.json", "--profile"),
    ("simulate clicks --topology cluster.toml --rows 10", "--rows"),
    ("simulate clicks --topology cluster.toml --seed 1", "--seed"),
    ("simulate --zipf 1 --topology cluster.toml --batch-size 5", "--batch-size"),
    ("simulate --zipf 1 --topology cluster.toml --run run.toml", "--run"),
    ("simulate clicks --topology cluster.toml --plan x.plan --extra 1KiB", "--extra"),
    ("advise clicks --overwrite", "--overwrite"),
    ("topology --megabytes 2", "--megabytes"),
    ("topology --overwrite", "--overwrite"),
    ("bench --quick", "--quick"),
    ("report out --port 8000", "--port"),
    ("predict out clicks --format criteo", "--format"),
    ("predict out log.csv --split test", "--split"),
    ("synth made --samples 10 --set samples=20", "--samples"),
)


@pytest.mark.parametrize(("line", "option"), UNREAD)
def test_an_option_that_nobody_would_read_is_refused_and_nothing_is_written(prepared, call, monkeypatch, line, option):
    monkeypatch.chdir(prepared)
    steps = '[[data.steps]]\nname = "log"\ncolumns = ["price"]\n'
    (prepared / "steps.toml").write_text(RUN + steps)
    before = sorted(prepared.rglob("*"))
    code, out, errors = call(*line.split())
    assert (code, out) == (1, "") and errors.startswith(f"hotrow: {option}: ") and errors.endswith("Leave it out.\n")
    assert sorted(prepared.rglob("*")) == before


def test_an_unexpected_error_keeps_its_trace(monkeypatch):
    def broken(quick):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(hotrow.bench, "BENCHES", {"store": broken}, raising=False)
    monkeypatch.setattr(sys, "argv", ["hotrow", "bench", "store"])
    with pytest.raises(ZeroDivisionError):
        main()


def test_a_benchmark_is_shown_and_written(call, monkeypatch, tmp_path):
    report = {
        "name": "store",
        "results": [
            {
                "id": "store.growth",
                "value": 1.4,
                "unit": "x",
                "must": 2,
                "aim": 1.5,
                "met": True,
                "note": "dim 8",
            }
        ],
        "missing": [{"id": "store.vs_fbgemm_cpu", "reason": "fbgemm is not installed"}],
    }
    asked = []
    monkeypatch.setattr(hotrow.bench, "BENCHES", {"store": lambda quick: asked.append(quick) or report}, raising=False)
    code, out, _ = call("bench", "store", "--quick", "--json", tmp_path / "store.json")
    assert code == 0
    assert asked == [True]
    assert "store.growth" in out
    assert "fbgemm is not installed" in out
    assert json.loads((tmp_path / "store.json").read_text()) == report
    assert call("bench") == (0, "store\nall\n", "")


def test_what_goes_on_with_a_run_repeats_its_settings():
    assert going_on("train", Path("a run.toml"), ['output.folder="x"']) == (
        "hotrow train 'a run.toml' --set 'output.folder=\"x\"' --resume"
    )


def test_names_are_shown_as_they_are_and_whole(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    path = "runs/" + "long/" * 40 + "exp[/v2][lr=0.1]"
    show._pairs("Run", [("run folder", path)])
    show._table("", ("a [x]", "b"), [("[bold]c", "d[/]")])
    said = capsys.readouterr().out
    for text in (path, "a [x]", "[bold]c", "d[/]"):
        assert text in said


def test_a_benchmark_is_not_run_if_its_report_has_no_place(call, tmp_path):
    code, _, err = call("bench", "store", "--json", tmp_path / "nowhere" / "x.json")
    assert code == 1 and "There is no folder" in err

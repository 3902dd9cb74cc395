"""Run files: what they may say, how they are overridden, and what is said when they are wrong."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import SettingsError
from hotrow.plan.topology import load_topology
from hotrow.run import load_run
from hotrow.store.optimizers import Adam, RowWiseAdagrad
from hotrow.table import Feature
from hotrow.toml import to_toml
from hotrow.train.compatibility import refuse_problems

SMALL = """
[data]
path = "clicks"

[model]
name = "dlrm"
"""


@pytest.fixture
def run_file(tmp_path):
    def write(text: str, name: str = "small.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_run(path, overrides)
    return str(caught.value)


def test_a_short_run_file_is_enough(run_file):
    run = load_run(run_file(SMALL))
    assert run.model.name == "dlrm"
    assert run.policy.name == "sync"
    assert run.tables_of(["user", "item"])[1].dim == 16


def test_relative_paths_are_taken_from_the_folder_of_the_run_file(run_file, tmp_path, monkeypatch):
    path = run_file(SMALL)
    monkeypatch.chdir("/")
    run = load_run(path)
    assert run.data.path == tmp_path / "clicks"
    assert run.output.folder == tmp_path / "runs" / "small"


def test_a_table_has_what_all_share_and_over_it_its_own(run_file):
    run = load_run(
        run_file(
            SMALL
            + """
[tables]
dim = 8
optimizer = { name = "adam", lr = 0.5, beta1 = 0.8 }
eviction.ttl = 100

[tables.item]
dim = 32
optimizer.lr = 0.25
eviction.capacity = 1000

[tables.user]
optimizer.name = "rowwise_adagrad"
without = ["eviction"]
"""
        )
    )
    item, user, other = run.tables_of(["item", "user", "other"])
    assert (item.dim, user.dim, other.dim) == (32, 8, 8)
    assert item.optimizer == Adam(lr=0.25, beta1=0.8)
    assert user.optimizer == RowWiseAdagrad()
    assert other.optimizer == Adam(lr=0.5, beta1=0.8)
    assert (item.eviction.ttl, item.eviction.capacity) == (100, 1000)
    assert user.eviction is None
    assert other.eviction.ttl == 100


def test_default_optimizers_can_be_changed_without_naming_them(run_file):
    run = load_run(
        run_file(SMALL + "[tables]\noptimizer.lr = 0.5\n[tables.item]\noptimizer.eps = 0.25\n[optimizer]\nlr = 0.1\n")
    )
    item, user = run.tables_of(["item", "user"])
    assert item.optimizer == RowWiseAdagrad(lr=0.5, eps=0.25)
    assert user.optimizer == RowWiseAdagrad(lr=0.5)
    assert (run.optimizer.name, run.optimizer.lr) == ("adam", 0.1)


def test_a_run_without_a_model_is_refused_before_it_starts(run_file):
    for model in ("", "[model]\ntop = [8]\n"):
        run = load_run(run_file(f"[data]\npath = 'clicks'\n{model}"))
        with pytest.raises(SettingsError, match=r"model\.name: the run names no model"):
            refuse_problems(run)


def test_a_wide_model_gets_one_value_more_in_every_row(run_file):
    run = load_run(run_file(SMALL), ["model.name=wide_deep", "tables.dim=8"])
    assert run.tables_of(["item"])[0].dim == 9


def test_a_section_for_a_table_or_feature_that_is_not_there_is_refused_with_the_nearest(run_file):
    run = load_run(run_file(SMALL + '[tables.itme]\ndim = 4\n[features.histroy]\npooling = "mean"\n'))
    with pytest.raises(SettingsError, match=r'tables\.itme: .* no table "itme"\. Did you mean "item"'):
        run.tables_of(["user", "item"])
    with pytest.raises(SettingsError, match=r'no feature "histroy"\. Did you mean "history"'):
        run.features_of([Feature(name="history")])


def test_a_run_can_change_how_a_feature_is_pooled(run_file):
    run = load_run(run_file(SMALL + '[features.history]\npooling = "sequence"\n'))
    history, item = run.features_of([Feature(name="history", table="item"), Feature(name="item")])
    assert (history.pooling, history.table, item.pooling) == ("sequence", "item", "sum")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nepoch = 2\n", 'train.epoch: there is no setting "epoch". Did you mean "epochs"?'),
        ("[tables]\ndimm = 8\n", 'tables: there is no setting "dimm". Did you mean "dim"?'),
        ("[tables.item]\ndimm = 8\n", 'tables.item.dimm: there is no setting "dimm". Did you mean "dim"?'),
        ("[tables.item.optimizer]\nname = 'adamm'\n", 'there is no optimizer "adamm". Did you mean "adam"?'),
        ("[tables.item.optimizer]\nllr = 1\n", 'there is no setting "llr". Did you mean "lr"?'),
        ("[policy]\nname = 'snyc'\n", 'there is no policy "snyc". Did you mean "sync"?'),
        ("[trian]\nepochs = 2\n", 'there is no setting "trian". Did you mean "train"?'),
        (
            "[tables.item.optimizer]\nname = 'sgd'\nlr = inf\n",
            "input should be a finite number (given: inf)",
        ),
        (
            "[tables.item.eviction]\nttl = 5_000_000_000\n",
            "eviction.ttl: input should be less than 4294967296",
        ),
        ("[train]\nepochs = 'two'\n", "train.epochs: input should be a valid integer"),
        ("[train]\nepochs = 0\n", "train.epochs: input should be greater than or equal to 1 (given: 0)"),
        ("[train]\nearly_stopping.patience = 2\n", "early_stopping needs evaluate_every"),
        ("[optimizer]\nname = 'adma'\n", 'optimizer: there is no optimizer "adma". Did you mean "adam"?'),
    ],
)
def test_a_wrong_setting_is_named_with_its_file_and_the_nearest_right_one(run_file, text, said):
    path = run_file(SMALL + text)
    message = refused(path)
    assert message.startswith(f"{path}: ")
    assert said in message


def test_every_wrong_setting_is_named_at_once(run_file):
    message = refused(run_file(SMALL), "train.epochs=-1", "data.batch_size=0.5")
    assert "train.epochs" in message
    assert "data.batch_size" in message


def test_a_missing_setting_is_named(run_file):
    assert "data.path: this setting is needed" in refused(run_file("[data]\n[model]\nname = 'dlrm'\n"))


def test_a_missing_file_a_folder_and_other_bytes_are_refused(run_file, tmp_path):
    assert refused(tmp_path / "no.toml") == f"There is no run file {tmp_path / 'no.toml'}."
    assert "is a folder" in refused(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused(binary)


def test_bad_toml_is_refused_with_file_and_line(run_file):
    path = run_file("[data]\npath = \n")
    message = refused(path)
    assert message.startswith(f"{path} is not valid TOML")
    assert "line 2" in message


def test_overrides_are_toml_values_or_bare_words(run_file):
    run = load_run(
        run_file(SMALL),
        [
            "train.epochs=3",
            "data.shuffle = false",
            "model.top=[32, 16]",
            "data.path=/elsewhere/clicks",
            "tables.item.optimizer.lr=0.125",
            'tables."odd name".dim=4',
            "data.test=valid",
        ],
    )
    assert run.train.epochs == 3
    assert run.data.shuffle is False
    assert run.model.top == (32, 16)
    assert run.data.path == Path("/elsewhere/clicks")
    assert run.tables.table("item").optimizer.lr == 0.125
    assert run.tables.table("odd name").dim == 4
    assert run.data.test == "valid"


@pytest.mark.parametrize("override", ["epochs", "=3", "train.epochs=[1", "data.path.more=1", "a b=1"])
def test_an_override_that_cannot_be_is_refused_by_its_text(run_file, override):
    assert f"--set {override}" in refused(run_file(SMALL), override)


def test_settings_as_run_are_a_run_file_that_says_the_same(run_file, tmp_path):
    text = SMALL + "[tables]\neviction.ttl = 9\n[tables.item]\nwithout = ['eviction']\n[train]\nlog_every = 5\n"
    run = load_run(run_file(text), ['tables."odd name".dim=4', "data.test=''"])
    again = tmp_path / "elsewhere" / "settings.toml"
    again.parent.mkdir()
    again.write_text(run.to_toml())
    assert load_run(again) == run


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), VALUES, max_size=4))
def test_what_is_written_as_toml_reads_back_as_it_was(data):
    assert tomllib.loads(to_toml(data)) == data


@pytest.mark.parametrize("read", [load_run, load_topology])
@pytest.mark.parametrize("text", [b"a = " + b"[" * 100_000, b"\xff", b"\0", b"a = " + b"9" * 5000])
def test_a_damaged_run_or_cluster_file_is_a_sentence_that_names_it(tmp_path, read, text):
    (tmp_path / "a.toml").write_bytes(text)
    with pytest.raises(SettingsError, match=r"a\.toml"):
        read(tmp_path / "a.toml")

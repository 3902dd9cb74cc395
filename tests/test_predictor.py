"""`Predictor`: the scores of `hotrow evaluate`, from a run folder alone, also while a trainer writes to it."""

import itertools
import shutil
import threading

import numpy as np
import pytest
import torch

from hotrow import Batch, Predictor
from hotrow.data import DataSet, Reader, prepare
from hotrow.data.graph import Graph
from hotrow.data.synth import SynthSettings, preset_settings, write_log
from hotrow.errors import CheckpointError, DataError, SettingsError
from hotrow.export import DensePart
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import Ranker
from hotrow.train.logs import RunFolder
from hotrow.train.trainer import train

MODELS = ("dlrm", "dcnv2", "deepfm", "wide_deep", "din", "transformer", "graph")
EXPORTED = ("dlrm", "dcnv2", "deepfm", "wide_deep", "din")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A session log that repeats: groups with an inverse and histories that slide."""
    folder = tmp_path_factory.mktemp("predictor")
    small = {"samples": 800, "users": 40, "items": 60, "history_length": 6, "past": 6, "vocabulary": 20}
    write_log(SynthSettings.model_validate({**preset_settings("recd"), **small}), folder / "log")
    prepare(folder / "log", folder / "data", split="users:0.3")
    Graph.of_data_set(DataSet.open(folder / "data"), between=("user", "item")).save(folder / "graph")
    return folder / "data"


def run_of(data, folder, model="wide_deep", **changes):
    settings = {
        "data": {"path": str(data), "batch_size": 64},
        "tables": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.05}},
        "model": {"name": model},
        "train": {"threads": 1, "steps": 6},
        "output": {"folder": str(folder), "tensorboard": False},
    }
    if model == "graph":
        steps = [{"name": "neighbours", "graph": str(data.parent / "graph"), "fan_outs": [2, 2]}]
        settings["data"]["steps"] = steps
    for name, value in changes.items():
        section, _, key = name.partition("__")
        settings.setdefault(section, {})[key] = value
    return parse(Run, settings)


def logits_as_evaluated(run):
    """What `hotrow evaluate` takes its metrics of."""
    ranker = Ranker(run)
    checkpoint = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest())
    ranker.restore(checkpoint, checkpoint.arrays())
    ranker.train(False)
    with torch.no_grad(), ranker.pipeline(ranker.whole_reader("test")) as pipeline:
        return torch.cat([ranker.score(fetched)[0] for fetched in pipeline])


def test_batches(run):
    return Reader(DataSet.open(run.data.path), "test", run.data.batch_size, shuffle=False, steps=run.data.steps)


test_batches.__test__ = False


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    made = {}

    def of(model):
        if model not in made:
            made[model] = run_of(data, tmp_path_factory.mktemp(model) / "run", model)
            train(made[model])
        return made[model]

    return of


@pytest.mark.parametrize("model", MODELS)
def test_scores_are_those_of_evaluate(trained, model):
    run = trained(model)
    with Predictor(run.output.folder) as predictor:
        logits = torch.cat([predictor.logits(batch) for batch in test_batches(run)])
        assert torch.equal(logits, logits_as_evaluated(run))
        assert torch.equal(predictor.score(next(iter(test_batches(run)))), torch.sigmoid(logits[:64]))


@pytest.mark.parametrize("model", MODELS)
def test_plain_columns_score_as_the_data_set_does(trained, model):
    run = trained(model)
    table = next(DataSet.open(run.data.path).flat("test"))
    wanted = logits_as_evaluated(run)[: len(table)]
    needed = {f.column for f in DataSet.open(run.data.path).schema.features} | set(
        DataSet.open(run.data.path).schema.dense
    )
    with Predictor(run.output.folder) as predictor:
        torch.testing.assert_close(predictor.logits(table), wanted, rtol=1e-4, atol=1e-5)
        if model == "graph":
            return  # neighbours are drawn by a sample's place, and below there are fewer samples
        columns = {name: table[name].to_pylist()[:20] for name in needed}
        torch.testing.assert_close(predictor.logits(columns), wanted[:20], rtol=1e-4, atol=1e-5)


def test_a_request_about_one_user_looks_the_user_up_once(trained):
    run = trained("wide_deep")
    table = next(DataSet.open(run.data.path).flat("test"))
    row = {name: table[name][0].as_py() for name in table.column_names}
    with Predictor(run.output.folder) as predictor:
        many = {name: [value] * 50 for name, value in row.items()}
        many["item"] = list(range(50))
        batch = predictor.batch(many)
        sizes = {name: group.unique_size for group in batch.groups for name in group.features}
        assert sizes["item"] == 50
        assert sizes["user"] == 1
        one = [predictor.logits({name: [value[i]] for name, value in many.items()}) for i in (0, 7, 49)]
        torch.testing.assert_close(predictor.logits(many)[[0, 7, 49]], torch.cat(one))


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "din", "transformer"])
def test_four_candidates_cost_one_look_at_the_user_also_where_the_data_set_has_no_groups(data, tmp_path, model):
    prepare(data.parent / "log", tmp_path / "data", split="users:0.3", dedup=False)
    run = run_of(tmp_path / "data", tmp_path / "run", model)
    train(run)
    schema = DataSet.open(tmp_path / "data").schema
    assert not schema.groups
    table = next(DataSet.open(tmp_path / "data").flat("test"))
    row = {name: table[name][0].as_py() for name in table.column_names}
    many = {**{name: [value] * 4 for name, value in row.items()}, "item": [1, 2, 3, 4]}
    with Predictor(run.output.folder) as predictor:
        batch = predictor.batch(many)
        sizes = {name: group.unique_size for group in batch.groups for name in group.features}
        assert {name for name, size in sizes.items() if size > 1} == {"item"}
        one = [predictor.logits({name: [value[i]] for name, value in many.items()}) for i in range(4)]
        torch.testing.assert_close(predictor.logits(many), torch.cat(one))


def test_the_run_folder_is_all_it_needs(trained, tmp_path):
    run = trained("dlrm")
    shutil.copytree(run.output.folder, tmp_path / "copied")
    settings = tmp_path / "copied" / "settings.toml"
    settings.write_text(settings.read_text().replace(str(run.data.path), str(tmp_path / "nowhere")))
    with Predictor(tmp_path / "copied") as predictor:
        logits = torch.cat([predictor.logits(batch) for batch in test_batches(run)])
    assert torch.equal(logits, logits_as_evaluated(run))


def test_unseen_keys_read_as_their_rows_would_start(trained):
    run = trained("dlrm")
    with Predictor(run.output.folder) as predictor:
        batch = next(iter(test_batches(run)))
        groups = tuple(
            type(g)(g.features, g.values + 10**12, g.offsets, g.inverse, g.weights, g.begins) for g in batch.groups
        )
        unseen = Batch(groups, batch.dense, batch.labels, batch.weights, batch.users)
        ranker = Ranker(run)
        checkpoint = Checkpoint(predictor.checkpoint)
        ranker.restore(checkpoint, checkpoint.arrays())
        ranker.train(False)
        with torch.no_grad():
            wanted = ranker.model(ranker.embeddings(unseen), unseen.dense)
        before = predictor.memory()
        assert torch.equal(predictor.logits(unseen), wanted)
        assert predictor.memory() == before


def test_rows_take_no_optimizer_state(trained):
    run = trained("dlrm")
    ranker = Ranker(run)
    checkpoint = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest())
    ranker.restore(checkpoint, checkpoint.arrays())
    with Predictor(run.output.folder) as predictor:
        stats = ranker.embeddings.stats().values()
        assert predictor.memory()["rows"] == sum(table["rows"] for table in stats)
        assert predictor.memory()["row_bytes"] < sum(table["bytes"] for table in stats)


def resumed(run, steps):
    """Trains on to `steps` in all."""
    changed = run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})
    train(changed, resume=True)


@pytest.fixture
def growing(data, tmp_path):
    """A run with five checkpoints, each with the changes since the one before; all but the first come when told."""
    run = run_of(data, tmp_path / "run", train__keep=20, tables__eviction={"capacity": 40})
    folder = RunFolder(run.output.folder)
    folder.begin(run, resume=False, overwrite=False)
    folder.keep_schema(DataSet.open(data).schema)
    checkpoints = Checkpoints(folder.checkpoints, keep=20, incremental=20)
    ranker = Ranker(run)
    ranker.train()
    dense = torch.optim.SGD(ranker.model.parameters(), lr=0.1)
    for step, batch in enumerate(itertools.islice(ranker.reader("train", shuffle=True), 5), start=1):
        logits = ranker.model(ranker.embeddings(batch), batch.dense)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        dense.step()
        ranker.embeddings.step()
        checkpoints.save(step, ranker.arrays(), {}, ranker.embeddings)
        checkpoints.wait()
    folders = checkpoints.all()
    away = tmp_path / "away"
    away.mkdir()
    for made in folders[1:]:
        made.rename(away / made.name)

    def arrive(number):
        (away / folders[number].name).rename(folders[number])

    return run, arrive, len(folders)


def test_it_applies_what_changed_and_forgets_what_was_erased(growing):
    run, arrive, count = growing
    with Predictor(run.output.folder) as predictor:
        assert not predictor.refresh()
        rows = predictor._now.embeddings
        gone = 0
        for number in range(1, count):
            before = keys_of(predictor)
            arrive(number)
            assert predictor.refresh()
            assert predictor._now.embeddings is rows  # in place: nothing was loaded anew
            gone += len(before - keys_of(predictor))
            with Predictor(predictor.checkpoint) as afresh:
                assert keys_of(afresh) == keys_of(predictor)
                for batch in test_batches(run):
                    assert torch.equal(afresh.logits(batch), predictor.logits(batch))
        assert gone > 0
        assert predictor.step == count
        logits = torch.cat([predictor.logits(batch) for batch in test_batches(run)])
    assert torch.equal(logits, logits_as_evaluated(run))


def keys_of(predictor):
    tier = predictor._now.embeddings.router.tiers["host"]
    return {(name, key) for name, store in tier.stores().items() for c in store.export() for key in c["keys"].tolist()}


def test_every_answer_is_of_one_checkpoint_while_it_refreshes(growing):
    run, arrive, count = growing
    batch = next(iter(test_batches(run)))
    answers, ended = [[] for _ in range(3)], threading.Event()
    with Predictor(run.output.folder) as predictor:
        right = {predictor.step: predictor.logits(batch)}

        def ask(into):
            while not ended.is_set():
                into.append(predictor.logits(batch))

        threads = [threading.Thread(target=ask, args=(into,)) for into in answers]
        for thread in threads:
            thread.start()
        for number in range(1, count):
            arrive(number)
            assert predictor.refresh()
            right[predictor.step] = predictor.logits(batch)
        ended.set()
        for thread in threads:
            thread.join()
    assert len(right) == count
    for given in answers:
        assert given
        assert all(any(torch.equal(answer, one) for one in right.values()) for answer in given)


def test_following_picks_up_a_checkpoint_as_soon_as_it_can_be_taken(growing):
    run, arrive, count = growing
    with Predictor(run.output.folder) as predictor:
        tried, taken = [threading.Event() for _ in range(2)], threading.Event()
        take = predictor._take

        def told(folder):
            try:
                new = take(folder)
            except CheckpointError:
                next((event for event in tried if not event.is_set()), tried[-1]).set()
                raise
            if new:
                taken.set()
            return new

        predictor._take = told
        predictor.follow(0.01)
        arrive(count - 1)  # what it stands on is not there yet
        assert all(event.wait(60) for event in tried)
        assert "step-" in predictor.trouble
        assert predictor.step == 1
        for number in range(1, count - 1):
            arrive(number)
        assert taken.wait(60)
        with pytest.raises(SettingsError, match="follows its run already"):
            predictor.follow(1)
    assert predictor.step == count


def test_a_full_checkpoint_is_loaded_beside(data, tmp_path):
    run = run_of(data, tmp_path / "run", train__steps=3)
    train(run)
    with Predictor(run.output.folder) as predictor:
        rows = predictor._now.embeddings
        resumed(run, 6)
        assert predictor.refresh()
        assert predictor._now.embeddings is not rows
        logits = torch.cat([predictor.logits(batch) for batch in test_batches(run)])
        assert predictor.step == 6
    assert torch.equal(logits, logits_as_evaluated(run))


def test_a_folder_that_holds_another_run_by_now_is_not_mixed_with_the_one_opened(data, tmp_path):
    train(run_of(data, tmp_path / "run", train__steps=2))
    with Predictor(tmp_path / "run") as predictor:
        steps = [{"name": "hash", "columns": ["item", "history"], "buckets": 7}]
        train(run_of(data, tmp_path / "run", train__steps=3, data__steps=steps), overwrite=True)
        with pytest.raises(CheckpointError, match="holds another run than when it was opened"):
            predictor.refresh()
        assert predictor.step == 2


@pytest.mark.parametrize("model", EXPORTED)
@pytest.mark.parametrize("size", [None, 64])
def test_the_exported_dense_part_gives_the_same_logits(trained, tmp_path, model, size):
    run = trained(model)
    batch = next(iter(test_batches(run)))
    with Predictor(run.output.folder) as predictor:
        path = predictor.export(tmp_path / f"{model}.pt2", batch_size=size)
        program = torch.export.load(path).module()
        torch.testing.assert_close(program(predictor.inputs(batch)), predictor.logits(batch), rtol=1e-4, atol=1e-5)
        if size is None:
            table = next(DataSet.open(run.data.path).flat("test"))
            for rows in (table.slice(0, 1), table.slice(3, 17)):
                wanted = predictor.logits(rows)
                torch.testing.assert_close(program(predictor.inputs(rows)), wanted, rtol=1e-4, atol=1e-5)
    assert [p.name for p in tmp_path.iterdir()] == [f"{model}.pt2"]


@pytest.mark.parametrize("model", sorted(set(MODELS) - set(EXPORTED)))
def test_a_model_whose_shapes_depend_on_data_says_that_it_does_not_export(trained, tmp_path, model):
    with Predictor(trained(model).output.folder) as predictor, pytest.raises(SettingsError, match="cannot be exported"):
        predictor.export(tmp_path / "dense.pt2")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_scored_is_refused_with_a_sentence(trained, tmp_path):
    run = trained("dlrm")
    table = next(DataSet.open(run.data.path).flat("test"))
    good = {name: table[name].to_pylist()[:3] for name in table.column_names}
    schema = DataSet.open(run.data.path).schema
    with Predictor(run.output.folder) as predictor:
        feature, dense = schema.features[0].column, schema.dense[0]
        with pytest.raises(DataError, match=f'Sample 1: there is no column "{feature}"'):
            predictor.score({name: column for name, column in good.items() if name != feature})
        with pytest.raises(
            DataError, match=f"Sample 2: column \"{dense}\" holds 'x'; a dense value is a finite number"
        ):
            predictor.score({**good, dense: ["1", "x", "2"]})
        with pytest.raises(DataError, match="differ in length"):
            predictor.score({**good, dense: [1.0]})
        with pytest.raises(DataError, match="is no column of values"):
            predictor.score({**good, dense: [1.0, "x", [2]]})
        with pytest.raises(DataError, match="needs columns"):
            predictor.score({})
        assert len(predictor.score({name: column[:0] for name, column in good.items()})) == 0
        with pytest.raises(SettingsError, match=r"name it .*dense\.pt2"):
            predictor.export(tmp_path / "dense.onnx")
        with pytest.raises(SettingsError, match="not 0"):
            predictor.export(tmp_path / "dense.pt2", batch_size=0)
        fixed = predictor.checkpoint
    with Predictor(fixed) as predictor, pytest.raises(SettingsError, match="one checkpoint; open the run folder"):
        predictor.follow(1)
    with pytest.raises(CheckpointError, match="There is no run folder or checkpoint"):
        Predictor(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        Predictor(tmp_path / "empty")


def test_a_damaged_checkpoint_leaves_the_one_before_in_place(growing):
    run, arrive, _ = growing
    batch = next(iter(test_batches(run)))
    with Predictor(run.output.folder) as predictor:
        step, before = predictor.step, predictor.logits(batch)
        arrive(1)
        newest = Checkpoints(run.output.folder / "checkpoints").latest()
        rows = max((newest / "rows").glob("*.arrow"), key=lambda path: path.stat().st_size)
        rows.write_bytes(rows.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match="truncated or altered"):
            predictor.refresh()
        assert predictor.step == step
        assert torch.equal(predictor.logits(batch), before)


def test_dense_parts_name_what_they_take(trained):
    predictor = Predictor(trained("din").output.folder)
    part = DensePart(predictor._now.model, predictor._inputs, predictor.objective)
    assert part.sequences
    assert set(part.sequences).isdisjoint(part.features)
    assert np.all([name in part.model.inputs.names for name in (*part.sequences, *part.features)])


@pytest.mark.parametrize("model", ["wide_deep", "transformer"])
def test_candidates_of_one_user_are_ranked_as_all_pairs_are_scored(trained, model):
    run = trained(model)
    table = next(DataSet.open(run.data.path).flat("test"))
    features = [f.column for f in DataSet.open(run.data.path).schema.features]
    own = [name for name in features if name != "item"] + list(DataSet.open(run.data.path).schema.dense)
    user = {name: table[name][0].as_py() for name in own}
    with Predictor(run.output.folder) as predictor:
        scores = predictor.score({**{name: [value] * 30 for name, value in user.items()}, "item": list(range(30))})
        for candidates in (list(range(30)), {"item": list(range(30))}):
            found = predictor.rank(user, candidates, k=5)
            assert torch.equal(found.scores, torch.sort(scores, descending=True, stable=True)[0][:5])
            assert torch.equal(scores[found.places], found.scores) and torch.equal(found.keys, found.places)
        with pytest.raises(DataError, match="Which feature the candidates' keys are of is not clear"):
            predictor.rank({name: value for name, value in user.items() if name != "user"}, [1, 2])
        with pytest.raises(SettingsError, match="This run predicts score: say what to rank by"):
            predictor.rank(user, [1, 2], by="click")

"""Retrieval: softmax objectives and metrics over all items, resumed, under every policy, over ranks."""

import numpy as np
import pytest
import torch
from own_parts import Sequence, Tower, TwoTower
from test_trainer import Interrupt, lines
from torch.nn import functional as F

from hotrow import Batch, Embeddings, ModelInputs, Predictor, Run, Table, Trainer
from hotrow.data import DataSet, Reader
from hotrow.errors import BatchError, SettingsError
from hotrow.objectives import Catalogue, ObjectiveInputs
from hotrow.objectives.inputs import Inputs
from hotrow.profile import Profile, fingerprint
from hotrow.profile.profile import PROFILE
from hotrow.settings import parse
from hotrow.table import Feature
from hotrow.train.trainer import train
from ranks import Ranks
from train.conftest import SCHEMA

IN_BATCH = {"name": "in_batch_softmax", "k": [5, 20]}
SAMPLED = {"name": "sampled_softmax", "k": [5, 20], "negatives": 24}
NEXT = {"name": "next_item", "k": [5, 20]}
NEXT_DRAWN = {**NEXT, "negatives": 24}
OBJECTIVES = (IN_BATCH, SAMPLED)
ALL = (IN_BATCH, SAMPLED, NEXT, NEXT_DRAWN)
POLICIES = ({"name": "sync"}, {"name": "hybrid", "worst": True})
FEATURES = [Feature(name=name, table="item" if name == "history" else name) for name in ("user", "item", "history")]


def by_name(settings):
    return settings["name"] + ("_drawn" if settings == NEXT_DRAWN else "")


@pytest.fixture
def retrieval(make_run):
    def make(objective=IN_BATCH, **changes):
        model = Sequence if objective["name"] == "next_item" else TwoTower
        if model is Sequence:
            changes["features"] = {"history": {"pooling": "sequence"}}
        return make_run(model={"name": f"own_parts:{model.__name__}"}, objective=objective, **changes).with_classes(
            model
        )

    return make


def objective_of(settings, **inputs):
    """An objective by itself, over four items."""
    counts = Catalogue.of("item", torch.tensor([9, 3, 5, 7]), torch.tensor([1, 4, 3, 2]))
    given = ObjectiveInputs(FEATURES, ("click",), seed=3, items=lambda item, others: counts, **inputs)
    run = {"data": {"path": "d"}, "output": {"folder": "r"}, "objective": settings}
    return parse(Run, run).objective.build(given)


def batch_of(items, labels=None, weights=None):
    keys = torch.tensor(items)
    given = [None if g is None else torch.tensor(g, dtype=torch.float32) for g in (labels, weights)]
    features = {"user": keys, "item": keys, "history": [[int(k)] for k in keys]}
    return Batch.plain(features, labels=given[0], weights=given[1])


def test_the_in_batch_loss_is_its_formula():
    objective = objective_of({**IN_BATCH, "temperature": 0.5})
    batch = batch_of([3, 5, 3, 9], labels=[1, 1, 0, 1], weights=[2, 1, 5, 1])
    user, item = torch.randn(4, 3), torch.randn(4, 3)
    loss = objective.loss({"user": user, "item": item}, Inputs.of(batch, objective.extras(batch)))
    logits = user @ item.T / 0.5 - torch.log(torch.tensor([0.4, 0.3, 0.4, 0.1]))
    logits[0, 2] = logits[2, 0] = -torch.inf
    each = F.cross_entropy(logits, torch.arange(4), reduction="none")
    assert objective.weight(batch) == 4
    torch.testing.assert_close(loss, (2 * each[0] + each[1] + each[3]) / 4)


def test_the_sampled_loss_is_its_formula_and_repeats_its_draws():
    objective = objective_of({**SAMPLED, "alpha": 0.5})
    batch = objective.prepare(batch_of([3, 5, 9]), 7)
    drawn = batch["candidates/item"].values
    again = objective_of({**SAMPLED, "alpha": 0.5}).prepare(batch_of([3, 5, 9]), 7)
    assert torch.equal(drawn, again["candidates/item"].values)
    for other in (objective.prepare(batch_of([3]), 8), objective_of(SAMPLED, rank=1).prepare(batch_of([3]), 7)):
        assert not torch.equal(drawn, other["candidates/item"].values)
    user, item, negatives = torch.randn(3, 2), torch.randn(3, 2), torch.randn(24, 2)
    inputs = Inputs.of(batch, objective.extras(batch))
    loss = objective.loss({"user": user, "item": item, "drawn": negatives}, inputs)
    chances = {key: count**0.5 for key, count in ((9, 1), (3, 4), (5, 3), (7, 2))}
    log = {key: np.log(chance / sum(chances.values())) for key, chance in chances.items()}
    expected = 0.0
    for i, key in enumerate([3, 5, 9]):
        right = float(user[i] @ item[i]) - log[key]
        others = [float(user[i] @ negatives[j]) - log[k] for j, k in enumerate(drawn.tolist()) if k != key]
        expected += np.log(np.exp([right, *others]).sum()) - right
    assert float(loss) == pytest.approx(expected / 3, rel=1e-5)


def test_the_item_is_the_feature_that_the_run_names():
    batch = Batch.plain({"user": torch.tensor([4, 6]), "item": torch.tensor([1, 2]), "history": [[], []]})
    for item in ("item", "user"):
        extras = objective_of({**IN_BATCH, "item": item}).extras(batch)
        assert torch.equal(extras["items"], batch.keys(item))


def test_further_features_of_an_item_are_looked_up_with_what_is_drawn():
    features = objective_of({**SAMPLED, "item_features": ["history"]}).features()
    assert [(f.name, f.table) for f in features] == [("candidates/item", "item"), ("candidates/history", "item")]


def test_positives_are_where_the_named_label_is_above_0():
    given = ObjectiveInputs(FEATURES, ("click", "buy"))
    run = {"data": {"path": "d"}, "output": {"folder": "r"}}
    for label, expected in (("click", [1.0, 0.0]), ("buy", [0.0, 2.0])):
        objective = parse(Run, {**run, "objective": {**IN_BATCH, "label": label}}).objective.build(given)
        weights = objective.weights(torch.tensor([[0.5, 0.0], [0.0, 3.0]]), torch.tensor([1.0, 2.0]), 2)
        assert weights.tolist() == expected
    with pytest.raises(SettingsError, match="several labels: click, buy"):
        parse(Run, {**run, "objective": IN_BATCH}).objective.build(given)


def test_without_logq_counts_do_not_matter():
    for settings in ALL:
        objective = objective_of({**settings, "logq": False})
        batch = objective.prepare(batch_of([3, 5]), 0)
        assert not any("logq" in name for name in objective.extras(batch))


def nexts(**changes):
    """An objective for next items, of a model with a vector for each position, and a batch with three histories."""
    objective = objective_of({**NEXT, **changes})
    objective.check(Sequence(ModelInputs(FEATURES, {"user": 4, "item": 4, "history": 4})))
    features = {"user": torch.tensor([1, 2, 4]), "item": torch.tensor([3, 5, 9]), "history": [[9, 7, 5, 8, 3], [], [5]]}
    return objective, Batch.plain(features, weights=torch.tensor([2.0, 1.0, 1.0]))


def test_the_loss_of_next_items_is_its_formula():
    objective, batch = nexts(temperature=0.5)
    batch = objective.prepare(batch, 0)
    extras = objective.extras(batch)
    keys = batch["candidates/item"].values.tolist()
    assert keys == [3, 5, 7, 9]  # 8 is no item of the training split
    positions, items = torch.randn(3, 4, 2), torch.randn(4, 2)
    chances = -torch.expm1(5 * torch.log1p(-torch.tensor([0.4, 0.3, 0.2, 0.1])))  # of being one of five
    logits = positions @ items.T / 0.5 - chances.log()
    each = {(i, t): float(F.cross_entropy(logits[i, t], torch.tensor(keys.index(key))))
            for i, t, key in ((0, 0, 5), (0, 2, 3), (0, 3, 3), (2, 0, 9))}  # fmt: skip
    expected = (2 * (each[0, 0] + each[0, 2] + each[0, 3]) / 3 + each[2, 0]) / 4
    found = objective.loss({"positions": positions, "candidates": items}, Inputs.of(batch, extras))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_drawn_next_items_is_its_formula():
    objective, batch = nexts(negatives=6, alpha=0.5)
    batch = objective.prepare(batch, 4)
    keys = batch["candidates/item"].values.tolist()
    assert keys[:4] == [3, 5, 7, 9] and len(keys) == 10
    chances = {key: count**0.5 for key, count in ((9, 1), (3, 4), (5, 3), (7, 2))}
    positions, items = torch.randn(3, 1, 2), torch.randn(10, 2)
    scores = [(items @ positions[i, 0] - torch.tensor([chances[k] for k in keys]).log()).double() for i in (0, 2)]
    expected = []
    for own, score in zip((3, 9), scores, strict=True):
        right = score[keys.index(own)]
        others = [score[j] for j in range(4, 10) if keys[j] != own]
        expected.append(float(torch.logsumexp(torch.stack([right, *others]), 0) - right))
    found = objective.loss({"positions": positions, "candidates": items}, Inputs.of(batch, objective.extras(batch)))
    assert float(found) == pytest.approx((2 * expected[0] + expected[1]) / 4, rel=1e-5)
    with pytest.raises(SettingsError, match="alpha says how negatives are drawn"):
        nexts(alpha=0.5)


def test_the_next_item_is_that_of_the_history_that_the_run_names():
    objective, batch = nexts()
    assert objective.extras(objective.prepare(batch, 0))["next"].tolist() == [2, 1, -1, 0, 0, 3]
    objective._everywhere = False
    assert objective.extras(objective.prepare(batch, 0))["next"].tolist() == [0, 1, 2]
    with pytest.raises(SettingsError, match=r'objective\.history: the keys of feature user are those of table "user"'):
        nexts(history="user")


def test_items_are_drawn_by_count_to_the_power_of_alpha():
    for alpha, expected in ((0.0, [0.25] * 4), (1.0, [0.4, 0.3, 0.2, 0.1])):
        batch = objective_of({**SAMPLED, "alpha": alpha, "negatives": 20_000}).prepare(batch_of([3]), 0)
        found = torch.bincount(batch["candidates/item"].values, minlength=10)[[3, 5, 7, 9]] / 20_000
        torch.testing.assert_close(found, torch.tensor(expected), atol=0.02, rtol=0)


def plain_ranks(trainer, split):
    """The rank of each positive's item, by a loop over samples and a sort."""
    embeddings, model, run = trainer.embeddings.eval(), trainer.model.eval(), trainer.run
    keys = np.unique(np.concatenate([b.keys("item").numpy() for b in Reader(trainer.data, "train", shuffle=False)]))
    ranks = []
    with torch.no_grad():
        items = model.item_vectors(embeddings(Batch.plain({"item": torch.from_numpy(keys)}), ["item"]), None)
        for batch in Reader(trainer.data, split, run.data.batch_size, shuffle=False):
            users = model.user_vectors(embeddings(batch, ["user", "history"]), None)
            for user, key, label in zip(users, batch.keys("item").tolist(), batch.labels.tolist(), strict=True):
                if label > 0:
                    at = np.flatnonzero(keys == key)
                    order = np.lexsort((keys, -(items @ user).numpy()))
                    ranks.append(int(np.flatnonzero(order == at[0])[0]) + 1 if len(at) else None)
    embeddings.train()
    model.train()
    return ranks


@pytest.mark.parametrize("objective", ALL, ids=by_name)
def test_a_two_tower_model_learns_to_find_items_and_is_measured_over_all(retrieval, objective):
    run = retrieval(objective, train__epochs=3, train__evaluate_every=32)
    with Trainer(run) as trainer:
        before = trainer.evaluate("test")
        result = trainer.fit()
        ranks = plain_ranks(trainer, "test")
    assert result.metrics["recall@20"] > before["recall@20"]
    assert result.metrics["samples"] == len(ranks)
    for k in (5, 20):
        hits = [rank for rank in ranks if rank is not None and rank <= k]
        assert result.metrics[f"recall@{k}"] == pytest.approx(len(hits) / len(ranks))
        assert result.metrics[f"mrr@{k}"] == pytest.approx(sum(1 / r for r in hits) / len(ranks))
        assert result.metrics[f"ndcg@{k}"] == pytest.approx(sum(1 / np.log2(1 + r) for r in hits) / len(ranks))
    assert result.metrics["unseen"] == pytest.approx(sum(r is None for r in ranks) / len(ranks))


@pytest.mark.parametrize("policy", POLICIES, ids=by_name)
@pytest.mark.parametrize("objective", ALL, ids=by_name)
def test_a_killed_run_is_resumed_to_the_same_bits(retrieval, tmp_path, same_weights, objective, policy):
    settings = {"objective": objective, "policy": policy, "train__steps": 20, "train__evaluate_every": 5}
    whole = retrieval(**settings, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = retrieval(**settings)
    assert train(run, progress=Interrupt(11)).stopped == "SIGTERM"
    train(run, resume=True)
    same_weights(whole, run)
    assert lines(run, "evaluate") == lines(whole, "evaluate")


def test_batches_that_make_one_step_draw_negatives_of_their_own_and_are_resumed(retrieval, tmp_path, same_weights):
    settings = {"objective": SAMPLED, "train__accumulate": 3, "train__epochs": 2}
    whole = retrieval(**settings, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = retrieval(**settings)
    assert train(run, progress=Interrupt(14)).stopped == "SIGTERM"
    train(run, resume=True)
    same_weights(whole, run)


@pytest.mark.parametrize("objective", ALL, ids=by_name)
def test_a_run_under_exact_ends_as_under_sync(retrieval, tmp_path, same_weights, objective):
    sync, exact = (
        retrieval(objective, policy={"name": name}, output__folder=str(tmp_path / name)) for name in ("sync", "exact")
    )
    train(sync)
    train(exact)
    same_weights(sync, exact)


def test_a_plan_for_the_device_gives_the_same_run(retrieval, tmp_path, close_weights):
    plain = retrieval(SAMPLED, train__steps=12, output__folder=str(tmp_path / "plain"))
    planned = retrieval(SAMPLED, train__steps=12, plan={"memory": "6KiB"})
    train(plain)
    train(planned)
    close_weights(plain, planned)


def test_early_stopping_watches_a_metric_over_all_items(retrieval):
    stopping = {"metric": "ndcg@20", "patience": 1, "min_delta": 9.0}
    result = train(retrieval(train__evaluate_every=4, train__early_stopping=stopping, train__epochs=4))
    assert result.stopped == "early" and result.steps == 8
    with pytest.raises(SettingsError, match=r'"recall@7" is no metric.*Did you mean "recall@'):
        train(retrieval(train__evaluate_every=4, train__early_stopping={"metric": "recall@7"}))


def test_drawn_items_are_whole_where_fields_are_dropped(retrieval):
    result = train(retrieval(SAMPLED, train__steps=3, features={"item": {"dropout": 0.5}}))
    assert result.steps == 3


def test_every_sample_of_a_log_without_labels_is_a_positive(retrieval, write_log, tmp_path):
    schema = SCHEMA.model_copy(update={"label": None, "labels": ()})
    path = write_log(tmp_path / "views", schema=schema, change=lambda table: table.drop_columns("click"))
    for objective in (IN_BATCH, NEXT):
        folder = str(tmp_path / objective["name"])
        run = retrieval(objective, train__steps=3, data__path=str(path), output__folder=folder)
        assert train(run).metrics["samples"] == 500


def test_slices_add_up_to_all_samples(retrieval):
    with Trainer(retrieval(train__steps=4, evaluate={"slices": ["user"], "values": 2})) as trainer:
        metrics = trainer.evaluate("test")
    parts = [name.removesuffix("samples") for name in metrics if name.endswith(".samples")]
    assert len(parts) == 3
    hits = sum(metrics[f"{part}recall@20"] * metrics[f"{part}samples"] for part in parts)
    assert hits == pytest.approx(metrics["recall@20"] * metrics["samples"])


def test_what_is_excluded_is_not_recommended_again(retrieval):
    with Trainer(retrieval({**IN_BATCH, "exclude": "history"}, train__steps=8)) as trainer:
        trainer.fit()
        without = trainer.evaluate("test")
    with Trainer(retrieval(train__steps=8), overwrite=True) as trainer:
        trainer.fit()
        assert without["mrr@20"] > trainer.evaluate("test")["mrr@20"]


def test_items_have_the_further_features_that_the_item_side_reads(data):
    dataset = DataSet.open(data)
    items = Catalogue.read(dataset, "train", "item", ["user", "history"])
    first = {}
    for batch in Reader(dataset, "train", 100, shuffle=False):
        plain = batch.expand()
        bags = [plain["history"].values.tensor_split(plain["history"].offsets[1:-1])][0]
        for key, user, bag in zip(plain.keys("item").tolist(), plain.keys("user").tolist(), bags, strict=True):
            first.setdefault(key, (user, bag.tolist()))
    assert items.keys.tolist() == sorted(first) and items.counts.sum() == 2000
    batch = items.batch(3, 8)
    for i, key in enumerate(items.keys[3:8].tolist()):
        history = batch["history"]
        assert (int(batch.keys("user")[i]), history.values[history.offsets[i] : history.offsets[i + 1]].tolist()) == (
            first[key]
        )


def test_items_of_a_profile_are_those_of_the_split(write_log, tmp_path):
    dataset = DataSet.open(write_log(tmp_path / "log"))
    read = Catalogue.read(dataset, "train", "item")
    Profile.read(dataset).save(dataset.path / PROFILE, fingerprint(dataset.parts("train")))
    profiled = Catalogue.read(dataset, "train", "item")
    assert np.array_equal(read.keys, profiled.keys) and np.array_equal(read.counts, profiled.counts)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({**IN_BATCH, "item": "itme"}, r'objective\.item: the data set has no feature "itme"\. Did you mean "item"'),
        ({**IN_BATCH, "item_features": ["brand"]}, 'item_features: the data set has no feature "brand"'),
        ({**IN_BATCH, "exclude": "user"}, 'the keys of feature user are those of table "user"'),
        ({**IN_BATCH, "label": "clikc"}, 'has no label "clikc"'),
    ],
)
def test_what_the_data_set_has_not_is_a_sentence_before_anything_starts(retrieval, objective, said):
    run = retrieval(objective)
    with pytest.raises(SettingsError, match=said):
        train(run)
    assert not run.output.folder.exists()


def test_what_a_model_lacks_is_a_sentence_before_anything_starts(make_run, retrieval):
    run = make_run(model={}, objective=IN_BATCH).with_classes(Tower)
    with pytest.raises(SettingsError, match="Tower has no method user_vectors"):
        train(run)
    with pytest.raises(SettingsError, match=r"train\.compile: .*user_vectors"):
        train(retrieval(train__compile=True))
    with pytest.raises(SettingsError, match="steered by a metric that is better when smaller"):
        train(retrieval(plan={"memory": "6KiB", "mode": "hot_cold"}))
    assert not run.output.folder.exists()


def test_a_predictor_scores_pairs_by_their_product(retrieval):
    run = retrieval(SAMPLED, train__steps=8)
    train(run)
    with Predictor(run.output.folder, model=TwoTower) as predictor:
        request = {"user": [1, 2], "item": [7**20, 7**20], "history": [[], [7**20]], "price": [0.5, 0.5]}
        outputs = predictor.outputs(request)
        assert torch.equal(predictor.score(request), (outputs["user"] * outputs["item"]).sum(1))


@pytest.mark.parametrize("objective", ALL, ids=by_name)
def test_ranks_train_on_their_own_negatives_and_agree_on_exact_metrics(retrieval, objective, tmp_path):
    run = retrieval(objective, train__steps=6, train__evaluate_every=3)
    with Ranks(2) as pool:
        text = run.to_toml()
        results = pool.run(2, "train_work:train_trusted", text, timeout=120)
    assert results[0] == results[1]
    with Trainer(run.trusted(), resume=True) as trainer:
        assert trainer.evaluate("test") == results[0]["metrics"]


def test_some_features_are_looked_up_alone():
    rows = Embeddings([Table(name="user", dim=2), Table(name="item", dim=3)], FEATURES)
    batch = batch_of([3, 5])
    assert rows(batch, features=["item"]).pooled_features == ("item",)
    alone = Batch.plain({"item": torch.tensor([3, 5])})
    assert torch.equal(rows(alone, ["item"]).vector("item"), rows(batch).vector("item"))
    with pytest.raises(BatchError, match='no feature "itme" to look up.*"item"'):
        rows(batch, ["itme"])
    with pytest.raises(BatchError, match='no feature "user"'):
        rows(alone, ["user"])
    with pytest.raises(BatchError, match="no feature"):
        rows(alone)

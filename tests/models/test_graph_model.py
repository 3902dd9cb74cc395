"""GraphSAGE on sampled neighbours: what a plain loop over nodes computes, better than a model that sees no graph."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hotrow import Batch, Embeddings, Feature, Group, Table
from hotrow.data import Column, DataSet, DataSetWriter, Schema
from hotrow.data.graph import Graph
from hotrow.errors import BatchError, SettingsError
from hotrow.models import GraphSettings, ModelInputs, build
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.store.optimizers import SGD
from hotrow.train.trainer import train

DIMS = {"user": 3, "item": 5}
TABLE = {"user": "user", "item": "item", "user_hop1": "item", "user_hop2": "user", "user_hop3": "item"}
TABLE |= {"item_hop1": "user", "item_hop2": "item", "item_hop3": "user"}


def features_of(hops):
    names = ["user", "item", *(f"{end}_hop{h}" for end in ("user", "item") for h in range(1, hops + 1))]
    return [Feature(name=n, table=TABLE[n], pooling="sequence" if "hop" in n else "sum") for n in names]


def model_and_tables(hops, **more):
    features = features_of(hops)
    tables = [Table(name=name, dim=dim, optimizer=SGD(lr=0.1)) for name, dim in DIMS.items()]
    torch.manual_seed(1)
    model = build(
        GraphSettings(width=4, deep=(6,), **more), ModelInputs(features, {f.name: DIMS[f.table] for f in features})
    )
    return model, Embeddings(tables, features, seed=2)


@st.composite
def samples(draw, hops):
    """A batch as the step `neighbours` makes it: of each end none or `fan_outs[0]`, and so on from each."""
    size = draw(st.integers(1, 5))
    fan_outs = [draw(st.integers(1, 3)) for _ in range(hops)]
    keys = st.integers(0, 4)
    columns = {}
    for end in ("user", "item"):
        columns[end] = [[draw(keys)] for _ in range(size)]
        bags = [
            draw(st.lists(keys, min_size=fan_outs[0], max_size=fan_outs[0])) * draw(st.booleans()) for _ in range(size)
        ]
        for h in range(1, hops + 1):
            columns[f"{end}_hop{h}"] = bags
            if h < hops:
                bags = [[draw(keys) for _ in range(len(bag) * fan_outs[h])] for bag in bags]
    return Batch.plain(columns), columns


def vector(model, embeddings, columns, i, end, hop, at, layer):
    """A node's vector after `layer` layers, by definition: `at` is its place among the sample's nodes of that hop."""
    name = end if hop == 0 else f"{end}_hop{hop}"
    if layer == 0:
        return embeddings.read(TABLE[name], torch.tensor([columns[name][i][at]]))[0]
    around = columns[f"{end}_hop{hop + 1}"][i]
    count = len(around) // len(columns[name][i]) if columns[name][i] else 0
    mine = range(at * count, (at + 1) * count)
    sage = model.ends[("user", "item").index(end)].layers[layer - 1][hop]
    below = [vector(model, embeddings, columns, i, end, hop + 1, n, layer - 1) for n in mine]
    mean = torch.stack(below).mean(0) if below else torch.zeros(sage.neighbours.in_features)
    own = vector(model, embeddings, columns, i, end, hop, at, layer - 1)
    h = sage.own.weight @ own + sage.own.bias + sage.neighbours.weight @ mean
    last = layer == len(model.ends[0].layers)
    return h / h.norm().clamp(min=1e-12) if last else h.relu()


@pytest.mark.parametrize("hops", [1, 2, 3])
@settings(max_examples=25)
@given(st.data())
def test_a_logit_is_what_a_loop_over_nodes_computes(hops, data):
    batch, columns = data.draw(samples(hops))
    model, embeddings = model_and_tables(hops)
    logits = model(embeddings(batch))
    with torch.no_grad():
        for i in range(batch.size):
            ends = [vector(model, embeddings, columns, i, end, 0, 0, hops) for end in ("user", "item")]
            wanted = model.deep(torch.cat([*ends, ends[0] * ends[1]]))
            torch.testing.assert_close(logits[i], wanted[0], rtol=1e-4, atol=1e-5)


@given(st.data())
@settings(max_examples=25)
def test_ends_that_repeat_give_the_same_logits_and_gradients(data):
    batch, columns = data.draw(samples(2))
    user = torch.tensor([bag[0] for bag in columns["user"]])
    unique, inverse = torch.unique(user, return_inverse=True)
    plain = batch.groups[0]
    rest = Batch.plain({name: bags for name, bags in columns.items() if name != "user"}).groups[0]
    users = Group(("user",), unique, torch.arange(len(unique) + 1), inverse)
    found = []
    for groups in ((plain,), (users, rest)):
        model, embeddings = model_and_tables(2)
        logits = model(embeddings(Batch(groups)))
        F.softplus(logits).sum().backward()
        embeddings.step()
        rows = [embeddings.read(name, torch.arange(5)) for name in DIMS]
        found.append([logits.detach(), *(p.grad for p in model.parameters()), *rows])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_other_features_and_dense_inputs_join_behind_the_graph():
    features = [*features_of(1), Feature(name="city"), Feature(name="seen", table="item", pooling="sequence")]
    dims = {f.name: DIMS.get(f.table, 2) for f in features}
    model = build(GraphSettings(width=4, deep=()), ModelInputs(features, dims, dense=2))
    assert model.others == ("city", "seen")
    assert model.deep[0].in_features == 3 * 4 + 2 + 5 + 2


def test_a_model_without_its_features_says_what_to_add():
    features = [Feature(name="user"), Feature(name="item")]
    inputs = ModelInputs(features, {"user": 3, "item": 5})
    with pytest.raises(SettingsError, match=r'no sequence feature "user_hop1".*hotrow graph DATA'):
        build(GraphSettings(), inputs)
    with pytest.raises(SettingsError, match=r'no pooled feature "member"; name both ends'):
        build(GraphSettings(between=("member", "item")), inputs)


def test_neighbours_that_do_not_share_out_evenly_are_refused():
    model, embeddings = model_and_tables(2)
    bags = {"user": [[1]], "item": [[1]], "user_hop1": [[1, 2]], "user_hop2": [[1, 2, 3]]}
    with pytest.raises(BatchError, match="2 neighbours have 3 neighbours of their own"):
        model(embeddings(Batch.plain({**bags, "item_hop1": [[]], "item_hop2": [[]]})))


def write_pairs(path, splits):
    """Users and items with a label, and the graph of the positive ones among those to train on."""
    schema = Schema(label="y", features=(Column(name="user"), Column(name="item")))
    with DataSetWriter(path, schema, row_group=8192) as writer:
        for split, (user, item, label) in splits.items():
            writer.write(split, pa.table({"y": label.astype(np.float32), "user": user, "item": item}))


def with_negatives(random, user, item, pool, known, each=2):
    """Each pair, and beside it the same user with items drawn from `pool` that are none of theirs; shuffled."""
    users, items = np.repeat(user, 1 + each), np.column_stack([item, random.choice(pool, (len(item), each))]).ravel()
    labels = np.tile(np.arange(1 + each) == 0, len(user))
    kept = random.permutation(np.flatnonzero(labels | ~np.isin(users * (1 << 32) + items, known)))
    return users[kept], items[kept], labels[kept]


def aucs(folder, epochs, rate, fan_outs, width=16):
    """Of DLRM, which sees user and item alone, and of the graph model on top of the same tables."""
    edges = folder / "pairs.graph"
    Graph.of_data_set(DataSet.open(folder / "data")).save(edges)
    step = {"name": "neighbours", "graph": str(edges), "fan_outs": fan_outs}
    found = {}
    for name, model, steps in (("dlrm", {}, []), ("graph", {"width": width, "deep": [32]}, [step])):
        run = {
            "data": {"path": str(folder / "data"), "batch_size": 512, "steps": steps},
            "tables": {"dim": 16, "optimizer": {"name": "rowwise_adagrad", "lr": rate}},
            "model": {"name": name, **model},
            "optimizer": {"lr": 0.005},
            "train": {"epochs": epochs, "threads": 1},
            "output": {"folder": str(folder / name), "tensorboard": False},
        }
        found[name] = train(parse(Run, run)).metrics["auc"]
    return found


def test_with_few_edges_a_node_the_graph_beats_a_model_without(tmp_path):
    """Users and items of twenty kinds, eight edges a user: too few to learn a user's kind from the user's row alone."""
    random = np.random.default_rng(0)
    users, items, kinds = 1500, 400, 20
    user = np.repeat(np.arange(users), 10)
    liked = random.random(len(user)) < 0.85
    item = np.where(
        liked,
        random.integers(0, items // kinds, len(user)) * kinds + user % kinds,
        random.integers(0, items, len(user)),
    )
    known = np.unique(user * (1 << 32) + item)
    tested = np.arange(len(user)) % 10 >= 8
    pairs = {"train": ~tested, "test": tested}
    splits = {name: with_negatives(random, user[of], item[of], item, known) for name, of in pairs.items()}
    write_pairs(tmp_path / "data", splits)
    found = aucs(tmp_path, epochs=2, rate=0.1, fan_outs=[5, 4])
    assert found["graph"] > 0.8
    assert found["graph"] > found["dlrm"] + 0.1


def test_on_real_purchases_the_graph_beats_a_model_without(shared_data, tmp_path):
    """Books that a few thousand people bought: the 1,500 bought most, and those who bought five of them to train on."""
    with pa.input_stream(str(shared_data / "amazon_book.csv.zst"), compression="zstd") as stream:
        table = pa.csv.read_csv(stream)
    user, item, tested = (table.column(name).to_numpy() for name in ("user", "item", "test"))
    most = np.argsort(-np.bincount(item[tested == 0]))[:1500]
    kept = np.isin(item, most)
    kept &= np.bincount(user[kept & (tested == 0)], minlength=user.max() + 1)[user] >= 5
    kept &= np.isin(user, np.unique(user[kept])[:2000])
    user, item, tested = user[kept], item[kept], tested[kept]
    random, known = np.random.default_rng(0), np.unique(user * (1 << 32) + item)
    splits = {
        name: with_negatives(random, user[tested == t], item[tested == t], item[tested == 0], known)
        for name, t in (("train", 0), ("test", 1))
    }
    write_pairs(tmp_path / "data", splits)
    found = aucs(tmp_path, epochs=2, rate=0.05, fan_outs=[8])
    assert found["graph"] > found["dlrm"] + 0.02
    assert found["graph"] > 0.6


def test_a_graph_run_may_have_hot_rows_but_no_hot_and_cold_batches(tmp_path):
    random = np.random.default_rng(0)
    user, item = random.integers(0, 50, 1000), random.integers(0, 40, 1000)
    write_pairs(tmp_path / "data", dict.fromkeys(("train", "test"), (user, item, random.random(1000) < 0.5)))
    Graph.of_data_set(DataSet.open(tmp_path / "data")).save(tmp_path / "pairs.graph")
    found = {}
    for mode in (None, "split", "hot_cold"):
        run = {
            "data": {
                "path": str(tmp_path / "data"),
                "batch_size": 100,
                "steps": [{"name": "neighbours", "graph": str(tmp_path / "pairs.graph"), "fan_outs": [3, 2]}],
            },
            "tables": {"dim": 4},
            "model": {"name": "graph", "width": 4},
            "train": {"threads": 1},
            "output": {"folder": str(tmp_path / str(mode)), "tensorboard": False},
            **({} if mode is None else {"plan": {"memory": "2KiB", "mode": mode}}),
        }
        if mode == "hot_cold":
            with pytest.raises(SettingsError, match="neighbours draws anew in every epoch"):
                train(parse(Run, run))
        else:
            found[mode] = train(parse(Run, run))
    assert found["split"].metrics["log_loss"] == pytest.approx(found[None].metrics["log_loss"], abs=1e-5)
    assert 0.2 < found["split"].plan["measured"] < 0.95
    assert found["split"].plan["within"] is None, "other keys were drawn than were counted"

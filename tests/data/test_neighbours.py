"""The graph of a data set and the drawing of neighbours: right, uniform, repeatable, never the sample's own edge."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hotrow.cli import app
from hotrow.data import Column, DataSet, DataSetWriter, Reader, Schema
from hotrow.data.graph import Graph
from hotrow.data.mix import mix64
from hotrow.data.neighbours import Neighbours
from hotrow.data.steps import schema_after
from hotrow.errors import DataError, HotrowError, SettingsError
from hotrow.run import load_run
from old_formats import graph_of_version_1

SCHEMA = Schema(label="y", features=(Column(name="user"), Column(name="item"), Column(name="tags", kind="keys")))
FAR = 1 << 40
"""Keys of items are so far from those of users that none can be taken for the other."""
EDGES = st.lists(st.tuples(st.integers(0, 6), st.integers(FAR, FAR + 6)), min_size=1, max_size=30)


def arrays(edges):
    return [np.array([edge[side] for edge in edges], np.int64) for side in (0, 1)]


def draws(n, seed=0):
    return mix64(np.arange(n, dtype=np.uint64) + np.uint64(seed << 32))


def neighbours_of(edges, side, key):
    return sorted({edge[1 - side] for edge in edges if edge[side] == key})


@given(EDGES)
def test_both_sides_have_the_distinct_edges_of_the_pairs(edges):
    graph = Graph.of_pairs(("user", "item"), *arrays(edges))
    assert graph.edges == len(set(edges))
    for side in (0, 1):
        this, other = graph.sides[side], graph.sides[1 - side]
        for n, key in enumerate(this.keys.tolist()):
            found = other.keys[this.others[this.begins[n] : this.begins[n + 1]]].tolist()
            assert found == neighbours_of(edges, side, key)
        assert graph.nodes(side, this.keys).tolist() == list(range(len(this.keys)))
        assert graph.nodes(side, np.array([-5])).tolist() == [-1]


@given(EDGES, st.integers(0, 1), st.integers(1, 4), st.integers(0, 99))
def test_what_is_drawn_is_a_neighbour_and_not_the_one_left_out(edges, side, fan_out, seed):
    graph = Graph.of_pairs(("user", "item"), *arrays(edges))
    mine, others = arrays(edges)[side], arrays(edges)[1 - side]
    keys = np.concatenate([mine, mine, [-5]])  # each with its edge left out, then with none, then an unknown key
    without = np.concatenate([others, np.full(len(mine), -7), others[:1]])
    drawn = graph.draw(side, graph.nodes(side, keys), fan_out, draws(len(keys), seed), graph.nodes(1 - side, without))
    ends = np.cumsum(drawn.lengths)
    assert ends[-1] == len(drawn.nodes) == len(drawn.draws)
    found = graph.sides[1 - side].keys[drawn.nodes]
    for n, key in enumerate(keys.tolist()):
        possible = set(neighbours_of(edges, side, key)) - {int(without[n])}
        got = found[ends[n] - drawn.lengths[n] : ends[n]].tolist()
        assert len(got) == (fan_out if possible else 0)
        assert set(got) <= possible
    again = graph.draw(side, graph.nodes(side, keys), fan_out, draws(len(keys), seed), graph.nodes(1 - side, without))
    assert again.nodes.tolist() == drawn.nodes.tolist()


@pytest.mark.parametrize("left_out", [None, 0, 3, 6])
def test_every_neighbour_is_drawn_as_often_as_another(left_out):
    """Chi-squared with 5 or 6 degrees of freedom stays below 25 but for one case in three thousand."""
    edges = [(1, FAR + i) for i in range(7)] + [(2, FAR + 3)]
    graph = Graph.of_pairs(("user", "item"), *arrays(edges))
    n, fan_out = 20_000, 3
    without = None if left_out is None else np.full(n, left_out)
    drawn = graph.draw(0, np.zeros(n, np.int64), fan_out, draws(n), without)
    possible = [i for i in range(7) if i != left_out]
    counts = Counter(drawn.nodes.tolist())
    expected = n * fan_out / len(possible)
    assert set(counts) == set(possible)
    assert sum((counts[i] - expected) ** 2 / expected for i in possible) < 25
    pairs = Counter(map(tuple, drawn.nodes.reshape(n, fan_out)[:, :2].tolist()))
    each = n / len(possible) ** 2
    assert sum((pairs[a, b] - each) ** 2 / each for a in possible for b in possible) < len(possible) ** 2 + 45


@pytest.fixture(scope="module")
def edges():
    random = np.random.default_rng(0)
    user, item = random.integers(0, 30, 600), random.integers(0, 40, 600) + FAR
    return user, item, (random.random(600) < 0.6).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory, edges):
    user, item, label = edges
    path = tmp_path_factory.mktemp("graph") / "data"
    tags = pa.array([[1]] * 600, pa.list_(pa.int64()))
    with DataSetWriter(path, SCHEMA, row_group=90) as writer:
        writer.write("train", pa.table({"y": label, "user": user, "item": item, "tags": tags}))
        writer.write("test", pa.table({"y": label[:50], "user": user[:50] + 20, "item": item[:50], "tags": tags[:50]}))
    return DataSet.open(path)


@pytest.fixture(scope="module")
def graph_file(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "small.graph"
    Graph.of_data_set(data).save(path)
    return path


def test_edges_are_the_pairs_of_positive_samples(data, edges, graph_file):
    user, item, label = edges
    wanted = set(zip(user[label == 1].tolist(), item[label == 1].tolist(), strict=True))
    graph = Graph.load(graph_file)
    first, second = graph.sides
    owners = np.repeat(first.keys, np.diff(first.begins))
    assert set(zip(owners.tolist(), second.keys[first.others].tolist(), strict=True)) == wanted
    assert graph.edges == len(wanted)


def read(data, step, split="train", batch_size=64, epoch=0, **settings):
    """Every sample of an epoch: its user, its item and its neighbours, hop by hop."""
    reader = Reader(data, split, batch_size, steps=[step], **settings)
    reader.seek(epoch)
    found = []
    for batch in reader:
        spelled = batch.expand()
        columns = {name: spelled[name] for group in batch.groups for name in group.features}
        for i in range(batch.size):
            sample = {}
            for name, bags in columns.items():
                begin, end = bags.offsets[i : i + 2].tolist()
                sample[name] = bags.values[begin:end].tolist()
            found.append(sample)
    return found


def test_a_sample_gets_the_neighbours_of_both_ends_hop_by_hop(data, edges, graph_file):
    user, item, label = edges
    known = list(zip(user[label == 1].tolist(), item[label == 1].tolist(), strict=True))
    around = [{key: set(neighbours_of(known, side, key)) for key in {e[side] for e in known}} for side in (0, 1)]
    for sample in read(data, Neighbours(graph=graph_file, fan_outs=(4, 3, 2)), shuffle=False):
        for side, end in enumerate(("user", "item")):
            (mine,), (other,) = sample[end], sample[("item", "user")[side]]
            possible = around[side].get(mine, set()) - {other}
            first = sample[f"{end}_hop1"]
            assert len(first) == (4 if possible else 0)
            assert set(first) <= possible
            before = first
            for hop, fan_out in ((2, 3), (3, 2)):
                here = sample[f"{end}_hop{hop}"]
                assert len(here) == len(before) * fan_out
                for n, parent in enumerate(before):
                    of_parent = around[(side + hop - 1) % 2][parent]
                    assert set(here[n * fan_out : (n + 1) * fan_out]) <= of_parent
                before = here


def by_pair(samples):
    return sorted(map(str, samples))


def test_draws_depend_on_seed_epoch_and_place_alone(data, graph_file):
    step = Neighbours(graph=graph_file, fan_outs=(3, 2))
    whole = by_pair(read(data, step, seed=1))
    assert whole == by_pair(read(data, step, seed=1, batch_size=17, window=1, threads=0))
    shared = [sample for rank in (0, 1) for sample in read(data, step, seed=1, batch_size=50, rank=rank, world=2)]
    assert whole == by_pair(shared)
    assert whole == by_pair(read(data, step, seed=1, shuffle=False)), "the order of samples has no say in it"
    assert whole != by_pair(read(data, step, seed=1, epoch=1))
    assert whole != by_pair(read(data, step, seed=2))


def test_a_key_without_an_edge_has_no_neighbours(data, graph_file):
    samples = read(data, Neighbours(graph=graph_file), split="test", shuffle=False)
    strangers = [s for s in samples if s["user"][0] >= 30]
    assert strangers
    assert all(s["user_hop1"] == s["user_hop2"] == [] for s in strangers)


def test_the_new_features_look_up_the_tables_of_the_ends(data, graph_file):
    schema = schema_after([Neighbours(graph=graph_file)], data.schema)
    tables = {f.name: (f.table, f.pooling, f.kind) for f in schema.features if "hop" in f.name}
    assert tables == {
        "user_hop1": ("item", "sequence", "keys"),
        "user_hop2": ("user", "sequence", "keys"),
        "item_hop1": ("user", "sequence", "keys"),
        "item_hop2": ("item", "sequence", "keys"),
    }


def test_the_command_writes_a_graph_and_says_what_it_is(data, tmp_path):
    out = tmp_path / "a.graph"
    done = CliRunner().invoke(app, ["graph", str(data.path), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert f'"edges": {Graph.load(out).edges}' in done.output
    again = CliRunner().invoke(app, ["graph", str(data.path), "--out", str(out)])
    assert isinstance(again.exception, HotrowError)
    assert "--overwrite" in str(again.exception)
    assert CliRunner().invoke(app, ["graph", str(data.path), "--out", str(out), "--overwrite"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--between", "user"], "--between names two features"),
        (["--between", "user,itme"], r'has none called "itme"\. Did you mean "item"'),
        (["--between", "user,tags"], 'has none called "tags"'),
        (["--between", "user,user"], "two different features"),
        (["--positive", "2"], "no sample with a label of 2 or more"),
        (["--split", "tset"], 'Did you mean "test"'),
    ],
)
def test_a_graph_that_cannot_be_is_refused(data, tmp_path, arguments, said):
    done = CliRunner().invoke(app, ["graph", str(data.path), "--out", str(tmp_path / "x"), *arguments])
    with pytest.raises(HotrowError, match=said):
        raise done.exception
    assert not (tmp_path / "x").exists()


def test_a_file_that_is_no_graph_is_refused_and_never_replaced(data, tmp_path, graph_file):
    path = tmp_path / "notes.txt"
    with pytest.raises(DataError, match="There is no graph"):
        Graph.load(path)
    path.write_text("mine")
    with pytest.raises(DataError, match="cannot be read"):
        Graph.of_data_set(data).save(path, overwrite=True)
    assert path.read_text() == "mine"
    table = pa.table({"value": [1, 2]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="is not a graph"):
        Graph.load(path)
    with pa.ipc.open_file(str(graph_file)) as reader:
        batches = [reader.get_batch(i) for i in range(5)]
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, reader.schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    with pytest.raises(DataError, match="altered or cut short"):
        Graph.load(path)


def test_another_neighbour_in_the_file_is_refused_and_version_1_is_read_as_it_is(tmp_path, graph_file):
    path, graph = tmp_path / "a.graph", Graph.load(graph_file)
    graph.save(path)
    data, others = path.read_bytes(), graph.sides[0].others
    wrong = others.copy()
    wrong[[0, -1]] = others[[-1, 0]]
    assert wrong[0] != others[0] and data.count(others.tobytes()) == 1
    path.write_bytes(data.replace(others.tobytes(), wrong.tobytes()))
    with pytest.raises(DataError, match="altered or cut short"):
        Graph.load(path)
    path.write_bytes(data)
    graph_of_version_1(path)
    for side, old in zip(graph.sides, Graph.load(path).sides, strict=True):
        assert all(map(np.array_equal, side, old))


def test_a_step_that_does_not_fit_the_data_set_is_refused(data, graph_file, tmp_path):
    other = Schema(label="y", features=(Column(name="usr"), Column(name="item")))
    with pytest.raises(SettingsError, match=r'no feature "user" with one key a sample\. Did you mean "usr"'):
        schema_after([Neighbours(graph=graph_file)], other)
    twice = [Neighbours(graph=graph_file), Neighbours(graph=graph_file)]
    with pytest.raises(SettingsError, match='already a column "user_hop1"'):
        schema_after(twice, data.schema)
    with pytest.raises(DataError, match="There is no graph"):
        schema_after([Neighbours(graph=tmp_path / "none")], data.schema)


def test_the_path_of_a_graph_is_taken_from_the_folder_of_the_run_file(tmp_path):
    path = tmp_path / "run.toml"
    steps = '[[data.steps]]\nname = "neighbours"\ngraph = "a.graph"\n'
    path.write_text(f'[data]\npath = "x"\n{steps}[model]\nname = "graph"\n')
    assert load_run(path).data.steps[0].graph == tmp_path / "a.graph"


def test_a_key_that_stands_twice_in_a_graph_of_version_1_is_refused(tmp_path):
    path = tmp_path / "a.graph"
    Graph.of_pairs(("user", "item"), np.array([7**9, 3 * 7**9]), np.array([FAR, FAR + 1])).save(path)
    graph_of_version_1(path)
    whole = path.read_bytes()
    assert whole.count((3 * 7**9).to_bytes(8, "little")) == 1
    path.write_bytes(whole.replace((3 * 7**9).to_bytes(8, "little"), (7**9).to_bytes(8, "little")))
    with pytest.raises(DataError, match="altered or cut short"):
        Graph.load(path)

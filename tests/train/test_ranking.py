"""`Predictor.rank` and requests of frames, of two-tower models: what scoring every pair gives."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from own_parts import TwoTower

from hotrow import Predictor, Trainer
from hotrow.errors import DataError, SettingsError

USER = {"user": 5, "history": [7**20, 3 * 7**20], "price": 0.5}
ITEMS = [7**20 * i for i in range(60)]


class Counted(TwoTower):
    """Counts the users it encodes."""

    users = 0

    def user_vectors(self, rows, dense):
        found = super().user_vectors(rows, dense)
        Counted.users += len(found)
        return found


class Frame:
    """What pandas' DataFrame has of a mapping."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def items(self):
        return [(name, np.array(column, dtype=object)) for name, column in self._columns.items()]

    def __contains__(self, name):
        return name in self._columns


def repeated(items):
    """The same request spelled out."""
    return {**{name: [value] * len(items) for name, value in USER.items()}, "item": items}


@pytest.fixture
def predictor(make_run):
    """Of a run whose steps a loop of one's own made, from a checkpoint in its midst."""
    run = make_run(model={}, objective={"name": "in_batch_softmax"})
    with Trainer(run, model=Counted) as trainer, trainer.pipeline() as pipeline:
        for ready in pipeline:
            trainer.step(ready)
            if trainer.state.step == 6:
                break
        trainer.checkpoint()
    with Predictor(run.output.folder, model=Counted) as found:
        yield found


def test_the_user_is_encoded_once_and_the_order_is_that_of_all_pairs(predictor):
    scores = predictor.score(repeated(ITEMS))
    Counted.users = 0
    found = predictor.rank(USER, ITEMS, k=10)
    assert Counted.users == 1
    best, places = torch.sort(scores, descending=True, stable=True)
    torch.testing.assert_close(found.scores, best[:10])
    assert found.keys.tolist() == [ITEMS[i] for i in found.places.tolist()]
    torch.testing.assert_close(scores[found.places], best[:10])
    assert len(places) == len(predictor.rank(USER, ITEMS, k=1000).keys)


def test_candidates_are_keys_or_columns_of_any_kind(predictor):
    wanted = predictor.rank(USER, ITEMS, k=7)
    columns = {"item": ITEMS}
    for given in (columns, np.array(ITEMS), torch.tensor(ITEMS), pa.array(ITEMS), pa.table(columns), Frame(columns)):
        found = predictor.rank(USER, given, k=7)
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    assert len(predictor.rank(USER, []).keys) == 0


def test_many_candidates_are_encoded_some_at_a_time(predictor, monkeypatch):
    wanted = predictor.rank(USER, ITEMS, k=9)
    monkeypatch.setattr("hotrow.ranking._CHUNK", 7)
    found = predictor.rank(USER, ITEMS, k=9)
    assert torch.equal(found.places, wanted.places)
    torch.testing.assert_close(found.scores, wanted.scores)


def test_of_candidates_with_one_score_the_first_comes_first(predictor):
    found = predictor.rank(USER, [ITEMS[3]] * 5, k=3)
    assert found.places.tolist() == [0, 1, 2]


def test_frames_and_tables_are_scored_as_columns(predictor):
    columns = repeated(ITEMS[:5])
    wanted = predictor.score(columns)
    for table in (pa.table(columns), Frame({**columns, "unused": [object()] * 5})):
        assert torch.equal(predictor.score(table), wanted)


def test_pandas_frames_are_scored_where_pandas_is(predictor):
    pandas = pytest.importorskip("pandas")
    columns = repeated(ITEMS[:5])
    assert torch.equal(predictor.score(pandas.DataFrame(columns)), predictor.score(columns))
    assert torch.equal(predictor.rank(USER, pandas.DataFrame({"item": ITEMS})).keys, predictor.rank(USER, ITEMS).keys)


def test_towers_without_a_forward_are_exported_as_vectors_of_users_and_items(predictor, tmp_path):
    columns = repeated(ITEMS[:7])
    with Predictor(predictor.checkpoint, model=TwoTower) as found:  # which counts nothing
        program = torch.export.load(found.export(tmp_path / "dense.pt2")).module()
        vectors = program(found.inputs(columns))
    assert set(vectors) == {"user", "item"}
    torch.testing.assert_close((vectors["user"] * vectors["item"]).sum(1), predictor.score(columns))


def test_a_model_that_cannot_be_exported_is_a_sentence(predictor, tmp_path):
    with pytest.raises(SettingsError, match=r"Counted cannot be exported: torch\.export says: .* take padded\(\)"):
        predictor.export(tmp_path / "dense.pt2")
    assert not list(tmp_path.glob("*.pt2"))


@pytest.mark.parametrize(
    ("user", "candidates", "k", "error", "said"),
    [
        (USER, ITEMS, 0, SettingsError, "first 0 candidates"),
        ({**USER, "item": 3}, ITEMS, 3, DataError, 'Column "item" is given for the user and for the candidates'),
        ({"user": 5}, ITEMS, 3, DataError, 'no column "price"'),
        ([5], ITEMS, 3, DataError, "one value by column"),
        (USER, {"item": ITEMS, "price": [1.0]}, 3, DataError, "differ in length"),
        (USER, {}, 3, DataError, "no columns of candidates"),
    ],
)
def test_what_cannot_be_ranked_is_a_sentence(predictor, user, candidates, k, error, said):
    with pytest.raises(error, match=said):
        predictor.rank(user, candidates, k)

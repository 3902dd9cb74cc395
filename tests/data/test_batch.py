"""Batches: checked on construction with messages that name the feature; expanded only where asked."""

import pytest
import torch
from hypothesis import given

from hotrow import Batch, Group, Jagged
from hotrow.errors import BatchError
from shapes import cases


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_tensors_lists_and_jagged_features_make_a_plain_batch():
    batch = Batch.plain(
        {
            "one": ints(5, 6),
            "two": torch.tensor([[1, 2], [3, 4]]),
            "bags": [[7, 8, 9], []],
            "weighted": Jagged(ints(1, 2), ints(0, 0, 2), torch.tensor([0.5, 2.0])),
        },
        dense=torch.zeros(2, 3),
        labels=torch.zeros(2),
    )
    assert len(batch) == 2
    assert batch.features == ("one", "two", "bags", "weighted")
    assert batch["two"].values.tolist() == [1, 2, 3, 4]
    assert batch["bags"].lengths.tolist() == [3, 0]
    assert batch["weighted"].weights.tolist() == [0.5, 2.0]
    assert [g.features for g in batch.groups] == [("one", "two", "bags"), ("weighted",)]


@given(cases(steps=1))
def test_expanding_spells_out_every_sample(case):
    (batch,) = case.batches
    expanded = batch.expand()
    assert expanded.size == batch.size
    for name in batch.features:
        group, short, long = batch.group_of(name), batch[name], expanded[name]
        inverse = torch.arange(batch.size) if group.inverse is None else group.inverse
        for sample, unique in enumerate(inverse.tolist()):
            a, b = int(short.offsets[unique]), int(short.offsets[unique + 1])
            c, d = int(long.offsets[sample]), int(long.offsets[sample + 1])
            assert short.values[a:b].tolist() == long.values[c:d].tolist()
            if short.weights is not None:
                assert short.weights[a:b].tolist() == long.weights[c:d].tolist()


@given(cases(steps=1))
def test_windows_laid_apart_keep_repeats_and_lose_overlaps(case):
    (batch,) = case.batches
    for group in batch.groups:
        apart = group.apart()
        apart.check()
        assert apart.begins is None and apart.inverse is group.inverse
        for name in group.features:
            assert group[name].values.tolist() == apart[name].values.tolist()
            assert group[name].lengths.tolist() == apart[name].lengths.tolist()


def test_a_history_that_slides_is_kept_once_and_read_by_windows():
    group = Group(
        ("clicks", "user"),
        ints(1, 2, 3, 4, 5, 70, 71),
        ints(0, 3, 6, 6, 8, 9, 10, 11, 12),
        ints(0, 1, 1, 3),
        torch.arange(7, dtype=torch.float32),
        ints(0, 1, 4, 3, 5, 5, 6, 6),
    )
    batch = Batch((group,))
    assert batch["clicks"].values.tolist() == [1, 2, 3, 2, 3, 4, 4, 5]
    assert batch["clicks"].offsets.tolist() == [0, 3, 6, 6, 8]
    assert batch["clicks"].weights.tolist() == [0, 1, 2, 1, 2, 3, 3, 4]
    assert batch["user"].values.tolist() == [70, 70, 71, 71]
    expanded = batch.expand()
    assert expanded["clicks"].values.tolist() == [1, 2, 3, 2, 3, 4, 2, 3, 4, 4, 5]
    assert expanded["user"].values.tolist() == [70, 70, 70, 71]
    assert expanded.groups[0].begins is None


GOOD = Group(("a", "b"), ints(1, 2, 3), ints(0, 1, 2, 2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batch((Group((), ints(), ints(0)),)), "A group of a batch has no features."),
        (
            lambda: Batch.plain({"a": Jagged(ints(1, 2, 3), ints(0, 2)), "b": Jagged(ints(9), ints(0, 1))}),
            "Feature a: offsets run from 0 to 2, but there are 3 values.",
        ),
        (
            lambda: Batch.plain({"a": Jagged(ints(1, 2, 3), ints(1, 3))}),
            "Feature a: offsets run from 1 to 3, but there are 3 values.",
        ),
        (lambda: Batch.plain({"a": [[1.5]]}), "feature a has keys that are not whole numbers of 64 bits."),
        (lambda: Batch.plain({"a": [[2**63]]}), "feature a has keys that are not whole numbers of 64 bits."),
        (lambda: Batch.plain({"a": ints(1, 2)}, users=ints(1)), "users has 1 samples, the batch has 2."),
        (
            lambda: Batch.plain({"a": Jagged(ints(1), ints(0, 1), torch.ones(1, requires_grad=True))}),
            "Feature a: weights of keys get no gradient here; give them detached.",
        ),
        (
            lambda: Batch((Group(("a",), torch.tensor([1.0]), ints(0, 1)),)),
            "values of feature a must be int64, not float32.",
        ),
        (lambda: Batch((Group(("a",), [1], ints(0, 1)),)), "values of feature a must be a tensor, not list."),
        (
            lambda: Batch((Group(("a",), ints(1)[None], ints(0, 1)),)),
            "values of feature a must have 1 dimension, not 2.",
        ),
        (
            lambda: Batch((Group(("a", "b"), ints(1), ints(0, 1)),)),
            "Feature a, b: 2 offsets do not divide over 2 features",
        ),
        (
            lambda: Batch((Group(("a",), ints(1, 2), ints(0, 1)),)),
            "Feature a: offsets run from 0 to 1, but there are 2 values.",
        ),
        (
            lambda: Batch((Group(("a", "b"), ints(1, 2, 3), ints(0, 1, 2, 1, 3)),)),
            "Feature b: offsets decrease at sample 0",
        ),
        (
            lambda: Batch((Group(("a",), ints(1), ints(0, 1), None, torch.ones(2)),)),
            "Feature a: 2 weights for 1 values; each value needs one.",
        ),
        (
            lambda: Batch((Group(("a",), ints(1), ints(0, 1), ints(0, 1)),)),
            "Feature a: inverse names unique samples from 0 to 1, but there are 1.",
        ),
        (
            lambda: Batch((Group(("a", "b"), ints(1, 2), ints(0, 1, 2), None, None, ints(0)),)),
            "Feature a, b: 1 begins for 2 bags; each needs one.",
        ),
        (
            lambda: Batch((Group(("a", "b"), ints(1, 2), ints(0, 1, 1, 3, 3), None, None, ints(0, 2, 1, 2)),)),
            "Feature b: the window of sample 0 is not within the 2 values.",
        ),
        (
            lambda: Batch((Group(("a",), ints(1, 2), ints(0, 1, 1), None, None, ints(0, -1)),)),
            "Feature a: the window of sample 1 is not within the 2 values.",
        ),
        (
            lambda: Batch((Group(("a",), ints(1, 2), ints(0, 1), None, None, torch.zeros(1)),)),
            "begins of feature a must be int64, not float32.",
        ),
        (
            lambda: Batch((Group(("a",), ints(1, 2), ints(1, 2), None, None, ints(0)),)),
            "Feature a: offsets run from 1 to 2",
        ),
        (lambda: Batch((GOOD, GOOD)), "Feature a stands twice in the batch."),
        (
            lambda: Batch((GOOD, Group(("c",), ints(1), ints(0, 1)))),
            "Feature c has 1 samples, the batch has 2.",
        ),
        (lambda: Batch((GOOD,), labels=torch.zeros(3)), "labels has 3 samples, the batch has 2."),
        (lambda: Batch((GOOD,), dense=torch.zeros(2)), "dense must have 2 dimensions, not 1."),
        (
            lambda: Batch((GOOD,), labels=torch.zeros(2, dtype=torch.int64)),
            "labels must be float32, not int64.",
        ),
        (lambda: Batch((GOOD,))["c"], 'The batch has no feature "c". Known here: a, b.'),
        (lambda: Batch.plain({"a": ints(1, 2), "b": ints(1)}), "Feature b has 1 samples, others have 2."),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_the_feature(make, message):
    with pytest.raises(BatchError) as error:
        make()
    assert message in str(error.value)


def test_the_keys_of_a_feature_are_those_of_every_sample():
    group = Group(("a", "b"), torch.tensor([7, 8, 1, 2, 3]), torch.tensor([0, 1, 2, 2, 5]), torch.tensor([1, 0, 1]))
    batch = Batch((group,))
    assert batch.keys("a").tolist() == [8, 7, 8]
    with pytest.raises(BatchError, match="Feature b does not have one key in every sample"):
        batch.keys("b")
    with pytest.raises(BatchError, match='no feature "c"'):
        batch.keys("c")

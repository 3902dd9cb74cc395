"""Dropout of what features look up: each sample by itself whatever is deduplicated, and in training alone."""

import pytest
import torch

from hotrow import Batch, Embeddings, Feature, Group, Table
from hotrow.errors import SettingsError
from hotrow.plan import Plan, Share
from hotrow.run import FeatureSection
from hotrow.settings import parse
from hotrow.store.optimizers import SGD
from hotrow.table import Fill

SAMPLES = 4000
TABLES = [Table(name="t", dim=3, init=Fill(value=1.0), optimizer=SGD(lr=1.0))]


def batch(inverse=True):
    """Four features of one group, of 40 unique samples or of as many as there are; a sequence in another group."""
    unique = 40 if inverse else SAMPLES
    which = torch.randint(unique, (SAMPLES,), generator=torch.Generator().manual_seed(1)) if inverse else None
    values = torch.arange(4 * unique)
    pooled = Group(("a", "b", "c", "d"), values, torch.arange(4 * unique + 1), which)
    lengths = torch.tensor([0, *([3] * SAMPLES)]).cumsum(0)
    return Batch((pooled, Group(("s",), torch.arange(3 * SAMPLES), lengths)))


def made(**dropout):
    features = [Feature(name=n, table="t", dropout=dropout.get(n, 0.0)) for n in "abcd"]
    features.append(Feature(name="s", table="t", pooling="sequence", dropout=dropout.get("s", 0.0)))
    return Embeddings(TABLES, features, seed=3)


@pytest.mark.parametrize("deduplicated", [True, False])
def test_each_sample_is_dropped_by_itself_and_the_mean_stays(deduplicated):
    torch.manual_seed(0)
    embedded = made(b=0.25, d=0.5)(batch(deduplicated))
    assert embedded.pooled_features == ("a", "b", "c", "d")
    vectors = {name: embedded.vector(name) for name in "abcd"}
    assert (vectors["a"] == 1).all() and (vectors["c"] == 1).all()
    for name, share in (("b", 0.25), ("d", 0.5)):
        dropped = (vectors[name] == 0).all(1)
        assert ((vectors[name] == 1 / (1 - share)).all(1) | dropped).all()
        assert float(dropped.float().mean()) == pytest.approx(share, abs=0.04)
    both = ((vectors["b"] == 0).all(1) & (vectors["d"] == 0).all(1)).float().mean()
    assert float(both) == pytest.approx(0.125, abs=0.03)
    if deduplicated:  # samples that share a row are not dropped together, and unique samples stay unique
        rows, _ = embedded.unique("b")
        assert len(rows) == 41
        first = vectors["b"][batch().groups[0].inverse == 7]
        assert 0 < int((first == 0).all(1).sum()) < len(first)


def test_results_and_gradients_are_those_of_samples_spelled_out():
    ends = []
    for given in (batch(), batch().expand()):
        embeddings = made(a=0.5, c=0.1)
        torch.manual_seed(4)
        vectors = embeddings(given).vectors()
        (vectors * torch.arange(vectors.numel()).view_as(vectors) / 1000).sum().backward()
        embeddings.step()
        ends.append((vectors.detach(), embeddings.read("t", torch.arange(160))))
    assert torch.equal(ends[0][0], ends[1][0])
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-4, atol=1e-3)


def test_rows_of_a_sequence_are_dropped_by_themselves():
    torch.manual_seed(0)
    sequence = made(s=0.25)(batch()).sequence("s")
    dropped = (sequence.values == 0).all(1)
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.02)
    assert ((sequence.values == 4 / 3).all(1) | dropped).all() and (sequence.lengths == 3).all()


def test_nothing_is_dropped_where_nothing_is_trained():
    embeddings, before = made(a=0.5, s=0.5), torch.get_rng_state()
    with torch.no_grad():
        assert (embeddings.train()(batch()).vector("a") != 0).all()
    embedded = embeddings.eval()(batch())
    assert (embedded.vector("a") != 0).all() and (embedded.sequence("s").values != 0).all()
    assert torch.equal(torch.get_rng_state(), before)


def test_results_computed_on_a_device_are_dropped_alike():
    ends = []
    for plan in (None, Plan({"t": (Share("device", torch.arange(0, 160, 2).numpy()), Share("host"))})):
        features = [Feature(name=n, table="t", dropout=0.5 if n in "bs" else 0.0) for n in "abcds"]
        embeddings = Embeddings(TABLES, features, seed=3, plan=plan)
        torch.manual_seed(4)
        ends.append(embeddings(batch()).vectors())
    torch.testing.assert_close(ends[0], ends[1])


def test_a_section_of_a_feature_that_says_nothing_is_refused():
    with pytest.raises(SettingsError, match="the section is empty"):
        parse(FeatureSection, {})
    with pytest.raises(SettingsError, match="dropout"):
        parse(FeatureSection, {"dropout": 1.0})

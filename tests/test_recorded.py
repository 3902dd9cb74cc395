"""The recorded runs: what they came to, and that the same run gives the same bits, also when it is killed."""

import pytest

from ranks import Ranks
from recorded.fixture import HERE, NAMES, RECORDED, TOLERANCE, VARYING, Fixture, read, stated

REPEATING = [name for name in NAMES if name not in VARYING]


@pytest.fixture(scope="module")
def fixture(tmp_path_factory):
    with Ranks(2) as ranks:
        made = Fixture(tmp_path_factory.mktemp("recorded"), ranks)
        made.make_data()
        yield made


@pytest.mark.parametrize("name", NAMES)
def test_a_run_comes_to_what_was_recorded(name, fixture, tmp_path):
    recorded, now = read(RECORDED)[name], fixture.train(name, tmp_path / "run")
    if name in VARYING:
        assert sum(now.losses[-50:]) / 50 == pytest.approx(sum(recorded.losses[-50:]) / 50, abs=0.02)
        assert now.metrics["auc"] == pytest.approx(recorded.metrics["auc"], abs=0.05)
    else:
        assert now.losses == pytest.approx(recorded.losses, abs=TOLERANCE)
        assert now.metrics == pytest.approx(recorded.metrics, abs=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_states_every_setting(name):
    """If this fails a setting is new: `python -m recorded settings`, in tests/, writes its default down."""
    assert (HERE / "run_files" / f"{name}.toml").read_text() == stated(name)


@pytest.mark.parametrize("name", ["hybrid", "hot_exact", "follow", "served_exact"])
def test_a_run_that_is_killed_and_resumed_has_the_same_bits(name, fixture, tmp_path):
    whole = fixture.train(name, tmp_path / "whole", steps=90, every=20)
    assert fixture.train(name, tmp_path / "killed", steps=90, every=20, killed=61) == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATING)
def test_after_a_thousand_steps_the_bits_are_the_same_run_twice_or_killed_and_resumed(name, fixture, tmp_path):
    whole = fixture.train(name, tmp_path / "whole", steps=1000, every=170)
    assert len(whole.losses) == 1000
    assert fixture.train(name, tmp_path / "again", steps=1000, every=170) == whole
    assert fixture.train(name, tmp_path / "killed", steps=1000, every=170, killed=517) == whole

"""Shards know whose rows they hold: no run takes the place of another's rows unless it is told to."""

import shutil

import pytest
from test_trainer import lines

from hotrow.errors import SettingsError
from hotrow.service.shard import Shard
from hotrow.train.evaluate import Ranker
from hotrow.train.logs import RunFolder
from hotrow.train.trainer import train
from serving import embeddings, served
from serving import shards as served_by

SHORT = {"train__steps": 4, "train__checkpoint_every": 2, "train__log_every": 1}


def losses(run):
    return [line["loss"] for line in lines(run, "train")]


@pytest.fixture
def shards():
    with served_by(2) as addresses:
        yield addresses


@pytest.mark.parametrize("cache", [{}, {"cache": {"capacity": 60}}], ids=["served", "cached"])
def test_a_run_is_refused_on_shards_with_rows_of_another(make_run, tmp_path, shards, cache):
    cluster = {"shards": shards, **cache}
    first = make_run(**SHORT, cluster=cluster)
    train(first)
    name = RunFolder(first.output.folder).id
    assert name.startswith("run-")
    other = make_run(**SHORT, data__seed=3, cluster=cluster, output__folder=str(tmp_path / "other"))
    with pytest.raises(SettingsError, match=rf"{shards[0]} holds rows of the run {name}\. .* or use --overwrite"):
        train(other)
    assert not other.output.folder.exists()
    train(make_run(**SHORT | {"train__steps": 6}, cluster=cluster), resume=True)

    alone = make_run(**SHORT, data__seed=3, output__folder=str(tmp_path / "alone"))
    train(alone)
    train(other, overwrite=True)
    assert losses(other) == losses(alone)
    with pytest.raises(SettingsError, match=r"rows of the run other-\w{8}\. Start the shards anew, or give this run"):
        train(first, resume=True)


def test_a_run_that_has_no_checkpoint_yet_knows_its_rows_again(make_run, shards):
    run = make_run(**SHORT, cluster={"shards": shards})
    train(run)
    shutil.rmtree(run.output.folder / "checkpoints")
    assert train(run, resume=True).steps == 4


def test_rows_of_a_loop_of_ones_own_are_rows_of_somebody(make_run, shards):
    run = make_run(**SHORT, cluster={"shards": shards})
    ranker = Ranker(make_run())
    tables = list(ranker.embeddings.tables.values())
    with served(shards, tables, seed=run.train.seed) as tier:
        rows = embeddings(tier, list(ranker.embeddings.features.values()), seed=run.train.seed)
        rows(next(iter(ranker.reader("train", shuffle=False))))
    with pytest.raises(SettingsError, match="holds rows of another program"):
        train(run)


def test_a_shard_that_is_started_again_on_its_folder_knows_whose_rows_they_are(make_run, tmp_path):
    def shard():
        return Shard("tcp://127.0.0.1:*", folder=tmp_path / "rows")

    with shard() as one:
        run = make_run(**SHORT, cluster={"shards": [one.address]})
        train(run)
    with shard() as again:
        other = make_run(**SHORT, cluster={"shards": [again.address]}, output__folder=str(tmp_path / "other"))
        with pytest.raises(SettingsError, match=RunFolder(run.output.folder).id):
            train(other)

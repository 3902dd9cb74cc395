"""`check_outputs`: what a model of the user's own gives is shown to the objective before anything starts.

A built-in model gives what it is asked for. Of another nobody knows before it has been called, so it is asked for two
made-up samples, with rows of tables that are thrown away: a run that would end at its first batch, in the queue of a
cluster perhaps, ends here instead. Only what the objective refuses counts. A model that cannot answer for samples that
are made up is asked again by the first batch.
"""

from __future__ import annotations

import contextlib

import torch

from hotrow.data.batch import Batch
from hotrow.embeddings import Embeddings
from hotrow.errors import SettingsError
from hotrow.models import OwnModel
from hotrow.table import Table
from hotrow.train.evaluate import Ranker


def check_outputs(ranker: Ranker) -> None:
    """Raises `SettingsError` where the objective cannot read what the run's model gives."""
    model, objective = ranker.model, ranker.objective
    if not isinstance(ranker.run.model, OwnModel) or not objective.measures_training:
        return
    training = model.training
    model.eval()
    with contextlib.ExitStack() as asking:
        asking.callback(model.train, training)
        asking.enter_context(torch.no_grad())
        asking.enter_context(torch.random.fork_rng([]))
        try:
            batch = _made_up(ranker)
            dense = None if batch.dense is None else batch.dense.to(ranker.device)
            outputs = objective.outputs(model, _rows(ranker)(batch), dense)
        except Exception:
            return
        _refused(ranker, outputs)


def _refused(ranker: Ranker, outputs: object) -> None:
    try:
        ranker.objective.predict(outputs)
    except SettingsError as error:
        raise SettingsError(f"model: {error}") from None
    except Exception:  # an objective of the user's own: the first batch will show its place
        return


def _rows(ranker: Ranker) -> Embeddings:
    """Tables like those of the run, without a row."""
    tables = [Table(name=t.name, dim=t.dim) for t in ranker.embeddings.tables.values()]
    known = [f for f in ranker.embeddings.features.values() if f.name not in ranker.embeddings.optional]
    return Embeddings(tables, known, device=ranker.device).eval()


def _made_up(ranker: Ranker) -> Batch:
    """Two samples with one key in every feature."""
    keys = torch.arange(2)
    names = [name for name in ranker.embeddings.features if name not in ranker.embeddings.optional]
    dense = len(ranker.columns)
    return Batch.plain(dict.fromkeys(names, keys), torch.zeros(2, dense) if dense else None)

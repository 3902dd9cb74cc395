"""`Predictor.rank`: the best of some candidates for one user, who is given, looked up and encoded once.

A retrieval model encodes the user once and candidates 4,096 at a time, without dense inputs; scores are products. Any
other model scores pairs, in batches in which what belongs to the user stands once: it is looked up once a batch, and a
model that computes on unique samples encodes it once a batch. All of it is answered by one checkpoint. Of two
candidates with one score that which was given first ranks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hotrow.data.batch import Batch
from hotrow.data.fresh import Columns, beside
from hotrow.embedded import Embedded
from hotrow.errors import DataError, NotFiniteError, SettingsError, nearest
from hotrow.objectives.catalogue import of_samples
from hotrow.objectives.retrieval import Retrieval, items_alone
from hotrow.train.evaluate import not_finite

if TYPE_CHECKING:
    from hotrow.predictor import Predictor, Version

_CHUNK = 4096


class Ranked(NamedTuple):
    """The best candidates, best first: their keys, their scores, and where they stood among those given."""

    keys: Tensor
    scores: Tensor
    places: Tensor


def rank(predictor: Predictor, user: Mapping[str, Any], candidates: Any, k: int, by: str) -> Ranked:
    """What `Predictor.rank` gives."""
    if k < 1:
        raise SettingsError(f"There is no ranking of the first {k} candidates; k is at least 1.")
    item, columns = _columns(predictor, user, candidates)
    keys, scores = list[Tensor](), list[Tensor]()
    with torch.no_grad(), predictor.answering() as version:
        score = _products(predictor, version) if isinstance(predictor.objective, Retrieval) else _pairs(predictor, by)
        for batch in _batches(predictor, beside(user, columns)):
            found = score(version, batch)
            refuse_not_finite(found, len(batch), version.checkpoint)
            keys.append(batch.keys(item))
            scores.append(found)
    if not keys:
        return Ranked(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0, dtype=torch.int64))
    best, places = torch.sort(torch.cat(scores), descending=True, stable=True)
    return Ranked(torch.cat(keys)[places[:k]], best[:k], places[:k])


def refuse_not_finite(outputs: Any, samples: int, checkpoint: Path) -> None:
    """Refuses an answer that is no number."""
    if unusable := not_finite(outputs):
        raise NotFiniteError(
            f"The answer for {unusable:,} of {samples:,} samples is no finite number: {checkpoint} holds weights or "
            f"rows that are not, or the samples' dense values are too large. Open another checkpoint, or mend the "
            f"samples."
        )


def _columns(predictor: Predictor, user: Mapping[str, Any], candidates: Any) -> tuple[str, Columns]:
    """The feature whose keys the candidates are, and their columns."""
    objective, schema = predictor.objective, predictor.schema
    one_key = [f.name for f in schema.features if f.kind == "key" and f.name not in user]
    item = objective.settings.item if isinstance(objective, Retrieval) else ""
    if not isinstance(candidates, Sequence | Tensor | np.ndarray | pa.Array | pa.ChunkedArray):
        names = getattr(candidates, "column_names", candidates)
        item = item or next((name for name in one_key if name in names), "")
        if not item:
            raise DataError(f"Candidates need a feature with one key each: {', '.join(one_key) or 'there is none'}.")
        return item, candidates
    if not item and len(one_key) != 1:
        raise DataError(
            f"Which feature the candidates' keys are of is not clear ({', '.join(one_key) or 'the user has all'}): "
            f'give columns, {{"{one_key[0] if one_key else "item"}": [...]}}.'
        )
    item = item or one_key[0]
    return item, {item: candidates}


def _batches(predictor: Predictor, whole: Any) -> Iterator[Batch]:
    return (predictor.batch(whole.slice(first, _CHUNK)) for first in range(0, len(whole), _CHUNK))


def _products(predictor: Predictor, version: Version) -> Any:
    """Scores by the product of the user's vector and each candidate's."""
    objective = predictor.objective
    assert isinstance(objective, Retrieval)
    side = objective.item_side
    others = [name for name in version.embeddings.features if name not in side]
    encoded: list[Tensor] = []

    def score(version: Version, batch: Batch) -> Tensor:
        if not encoded:
            one = _first(batch)

            def user(model: Any, rows: Embedded) -> Tensor:
                found: Tensor = model.user_vectors(rows, one.dense)
                return found

            encoded.append(version.dense.apply(user, version.embeddings(one, others))[0])
        return version.dense.apply(items_alone, version.embeddings(batch, side)) @ encoded[0]

    return score


def _pairs(predictor: Predictor, by: str) -> Any:
    """Scores of pairs, as the model ranks them."""

    def score(version: Version, batch: Batch) -> Tensor:
        outputs = version.dense(version.embeddings(batch), batch.dense)
        found = predictor.objective.predict(outputs)
        if by not in found and (by or len(found) > 1):
            names = ", ".join(found)
            raise SettingsError(f'This run predicts {names}: say what to rank by, not "{by}".{nearest(by, found)}')
        return found[by] if by else next(iter(found.values()))

    return score


def _first(batch: Batch) -> Batch:
    """The first sample alone."""
    features = {name: of_samples(batch, name, torch.zeros(1, dtype=torch.int64)) for name in batch.features}
    return Batch.plain(features, dense=None if batch.dense is None else batch.dense[:1])

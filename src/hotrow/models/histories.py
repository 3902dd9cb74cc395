"""Which sequence is a history of what: the pooled feature it is weighed against when a sample is scored."""

from __future__ import annotations

from collections.abc import Mapping

from hotrow.errors import SettingsError, nearest
from hotrow.models.model import ModelInputs


def targets_of(model: str, named: Mapping[str, str], inputs: ModelInputs) -> dict[str, str]:
    """Each history and its target, as named or found; refuses names and dims that cannot be.

    If none is named, a sequence is a history if exactly one pooled feature looks up the same table: its target.
    """
    targets = dict(named) or _found(inputs)
    if not targets:
        raise SettingsError(
            f"{model} found no history: no sequence feature looks up the same table as just one pooled feature; "
            f'name them in the model\'s settings, targets = {{ history = "target" }}.'
        )
    for history, target in targets.items():
        for name, known, what in ((history, inputs.sequences, "sequence"), (target, inputs.pooled, "pooled")):
            if name not in known:
                raise SettingsError(f'{model}: there is no {what} feature "{name}".{nearest(name, known)}')
        if inputs.dims[history] != inputs.dims[target]:
            raise SettingsError(
                f"{model} weighs {history} against {target}, so their rows need one dim, not "
                f"{inputs.dims[history]} and {inputs.dims[target]}."
            )
    return targets


def _found(inputs: ModelInputs) -> dict[str, str]:
    table_of = {feature.name: feature.table for feature in inputs.features}
    found: dict[str, str] = {}
    for history in inputs.sequences:
        same = [name for name in inputs.pooled if table_of[name] == table_of[history]]
        if len(same) == 1:
            found[history] = same[0]
    return found

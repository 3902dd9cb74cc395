"""Which of a sample's labels is meant, and its values. Those of a batch are `[B]` where there is one, else `[B, L]`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotrow.errors import SettingsError, nearest


def label_column(name: str, labels: Sequence[str], setting: str = "objective.label") -> int:
    """Where a label stands among those of the data set; refuses one that is not there, and to guess among several."""
    if not labels:
        raise SettingsError(
            f"{setting}: the samples have no label. Prepare the log with one, or choose what needs none: "
            f"in_batch_softmax, sampled_softmax or next_item."
        )
    if not name and len(labels) == 1:
        return 0
    if not name:
        raise SettingsError(f"{setting}: samples have several labels: {', '.join(labels)}. Name one.")
    if name not in labels:
        raise SettingsError(f'{setting}: the data set has no label "{name}".{nearest(name, labels)}')
    return labels.index(name)


def of_column(labels: Tensor, column: int) -> Tensor:
    """One label of each sample, `[B]`."""
    return labels if labels.dim() == 1 else labels[:, column]

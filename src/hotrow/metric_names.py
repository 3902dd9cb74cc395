"""Metrics by their names: which there are, what people call them, and which are those of a slice of the samples.

A run may have any metrics: of its objective, of a task (`click.auc`), of a class of the user's, of a slice
(`country=49.auc`). Those that Hotrow knows come in its order, all others behind them in theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_WORDS = {
    "auc": "AUC",
    "user_auc": "AUC within users",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "rmse": "RMSE",
    "mae": "MAE",
    "mrr": "MRR",
    "calibration": "calibration",
}
_ABOUT = {"kind", "step", "split", "samples", "best_step", "said"}
"""What a line of metrics says besides metrics."""


def words(name: str) -> str:
    """What people call a metric: "click.log_loss" is "click log loss"."""
    of, _, metric = name.rpartition(".")
    mean = metric.removeprefix("mean_")
    said = f"mean {_WORDS[mean]}" if mean != metric and mean in _WORDS else _WORDS.get(metric, metric.replace("_", " "))
    return f"{of} {said}" if of else said


def is_of_slice(name: str) -> bool:
    """Whether a metric is that of a slice."""
    return "=" in name


def metric_names(lines: Iterable[Mapping[str, object]]) -> list[str]:
    """The metrics of all samples that some of these lines or results have, in the order in which they are shown."""
    found = dict.fromkeys(
        name
        for line in lines
        for name, value in line.items()
        if isinstance(value, float) and name not in _ABOUT and not name.endswith(".samples") and not is_of_slice(name)
    )
    known = [name for name in _WORDS if name in found]
    return [*known, *(name for name in found if name not in _WORDS)]


def by_slice(metrics: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The metrics of each slice by their names, by the slice's."""
    found: dict[str, dict[str, object]] = {}
    for name, value in metrics.items():
        if is_of_slice(name):
            column, _, rest = name.partition("=")
            of, _, metric = rest.partition(".")
            found.setdefault(f"{column}={of}", {})[metric] = value
    return found

"""`RunData`: what a run folder says of a run, as columns of numbers over the samples trained on.

Runs are compared by samples, not steps: a step of one run may be ten of another. Lines of metrics that do not say how
many samples or seconds there had been by then (evaluations, tiers) get them from the lines that do, by their steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow.errors import DataError, HotrowError
from hotrow.report.section import Series
from hotrow.run import Run
from hotrow.train.logs import RunFolder

Floats = npt.NDArray[np.float64]


@dataclass
class RunData:
    """One run; `name` tells it apart from the others on the page."""

    name: str
    folder: RunFolder
    run: Run
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @staticmethod
    def read(folder: RunFolder, name: str) -> RunData:
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for line in folder.lines():
            by_kind.setdefault(str(line.get("kind")), []).append(line)
        return RunData(name, folder, folder.run(), by_kind)

    def of(self, kind: str, *columns: str) -> list[dict[str, Any]]:
        """The lines of a kind that have a number in each of these columns."""
        return [
            line for line in self.lines.get(kind, ()) if all(isinstance(line.get(c), (int, float)) for c in columns)
        ]

    @property
    def splits(self) -> list[str]:
        """Those that were evaluated on."""
        return list(dict.fromkeys(str(line.get("split", "")) for line in self.lines.get("evaluate", ())))

    def series(self, kind: str, column: str, *, over: str = "samples", split: str | None = None) -> Series | None:
        """A column over the samples (or seconds) trained on, of one split; None where the run never wrote it."""
        lines = [line for line in self.of(kind, column) if split is None or line.get("split", "") == split]
        if not lines:
            return None
        return Series(self.name, self.at(lines, over).tolist(), [line[column] for line in lines])

    def at(self, lines: Sequence[dict[str, Any]], over: str = "samples") -> Floats:
        """How many samples had been trained on, or seconds spent, by each line, or by the step that it is about."""
        steps, found = self._progress[over]
        by_line: Floats = np.interp([line.get("best_step", line["step"]) for line in lines], steps, found)
        return by_line

    @cached_property
    def _progress(self) -> dict[str, tuple[Floats, Floats]]:
        lines = self.of("train", "samples", "seconds")
        steps = np.array([0.0, *(line["step"] for line in lines)])
        return {over: (steps, np.array([0.0, *(line[over] for line in lines)])) for over in ("samples", "seconds")}

    @property
    def last(self) -> dict[str, Any]:
        """The last line of training, empty before there is one."""
        lines = self.of("train", "samples", "seconds")
        return lines[-1] if lines else {}


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """The runs in these folders, with names that differ."""
    folders = [RunFolder(path) for path in paths]
    for folder in folders:
        if not folder.exists:
            raise DataError(
                f"{folder.path} is not a run folder: it has no settings.toml. Name the output.folder of a run."
            )
    return [RunData.read(folder, name) for folder, name in zip(folders, names([f.path for f in folders]), strict=True)]


def names(paths: Sequence[Path]) -> list[str]:
    """As few of each path's last parts as tell it apart from the others; "run" alone says nothing."""
    full = [path.resolve().parts for path in paths]
    found = []
    for at, parts in enumerate(full):
        others = [other for i, other in enumerate(full) if i != at and other != parts]
        least = 2 if parts[-1] == "run" else 1
        depth = next((n for n in range(least, len(parts)) if all(o[-n:] != parts[-n:] for o in others)), len(parts))
        again = sum(other == parts for other in full[:at])
        found.append("/".join(parts[-depth:]) + (f" ({again + 1})" if again else ""))
    return found


def said(error: HotrowError | OSError) -> str:
    """An error as a sentence for a page."""
    return str(error).rstrip(".") + "."

"""The dense part of a model as a `torch.export` program: rows in, logits out, without Hotrow.

    program = torch.export.load("dense.pt2")
    logits = program.module()(predictor.inputs(columns))

Its one argument is a dictionary of tensors, which `Predictor.inputs` makes of samples:

    vectors[B, width]        pooled features side by side, in the order of `DensePart.features`
    dense[B, n]              dense inputs, where the model has some
    NAME[B, T, dim]          a sequence that the model sees row by row, padded to its longest with anything
    NAME_lengths[B]          how many of these rows count

A sequence that the model only averages comes averaged, among the vectors. Any batch size and any T fit, unless one was
asked for. dlrm, dcnv2, deepfm, wide_deep and din export, and models of your own, whose sequences all come row by row;
one with `user_vectors` and `item_vectors`, for retrieval, gives both by name, "user" and "item".
The transformer and the graph model say `static_shapes = False` and do not: they sort samples into buckets by the
lengths they find, and a program has no shape for that.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.errors import HotrowError, SettingsError
from hotrow.models import DIN, ModelInputs, RankingModel
from hotrow.models.model import mean_of
from hotrow.objectives import Objective

VECTORS, DENSE = "vectors", "dense"


def lengths_name(sequence: str) -> str:
    """The name of the tensor that says how long each sample's sequence is."""
    return f"{sequence}_lengths"


class DensePart(nn.Module):
    """A model that takes plain tensors instead of an `Embedded`."""

    def __init__(self, model: nn.Module, inputs: ModelInputs, objective: Objective) -> None:
        """The objective says what of the model gives its outputs: `forward`, or vectors of users and items."""
        super().__init__()
        if not getattr(model, "static_shapes", True):
            raise SettingsError(
                f"The dense part of {type(model).__name__} cannot be exported: the shapes it computes with depend on "
                f"the samples. This one is served by hotrow.Predictor."
            )
        self.model, self._inputs, self._outputs = model, inputs, objective.outputs
        self.sequences = tuple(model.targets) if isinstance(model, DIN) else ()
        if not isinstance(model, RankingModel):  # which averages all other sequences itself
            self.sequences = inputs.sequences
        self.features = tuple(name for name in inputs.names if name not in self.sequences)
        for name in self.sequences:
            if {name, lengths_name(name)} & {VECTORS, DENSE}:
                raise SettingsError(f'The sequence "{name}" has the name of another input; rename it to export.')

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        """What the model gives: logits `[B]`, or several tensors by name."""
        dims = tuple(self._inputs.dims[name] for name in self.features)
        pooled = [PooledGroup(self.features, dims, inputs[VECTORS], None)] if self.features else []
        sequences = {name: _jagged(inputs[name], inputs[lengths_name(name)]) for name in self.sequences}
        return self._outputs(self.model, Embedded(pooled, sequences), inputs.get(DENSE))

    def inputs(self, embedded: Embedded, dense: Tensor | None) -> dict[str, Tensor]:
        """What `forward` takes for samples that were looked up."""
        given = embedded.expand()
        averaged = [name for name in given.sequence_features if name not in self.sequences]
        means = {name: mean_of(name, given.sequence(name)).rows for name in averaged}
        vectors = [means[name] if name in means else given.vector(name) for name in self.features]
        found = {VECTORS: torch.cat(vectors, dim=1)}
        for name in self.sequences:
            found[name], mask = given.sequence(name).padded()
            found[lengths_name(name)] = mask.sum(1)
        return found if dense is None else {**found, DENSE: dense}

    def example(self, size: int) -> dict[str, Tensor]:
        """Inputs of `size` samples, of zeros, as long as sequences need to be for a program that takes any."""
        dims = self._inputs.dims
        found = {VECTORS: torch.zeros(size, sum(dims[name] for name in self.features))}
        for name in self.sequences:
            found[name] = torch.zeros(size, 3, dims[name])
            found[lengths_name(name)] = torch.arange(size) % 4
        return {**found, DENSE: torch.zeros(size, self._inputs.dense)} if self._inputs.dense else found


def export(
    model: nn.Module, inputs: ModelInputs, objective: Objective, path: Path, *, batch_size: int | None = None
) -> Path:
    """Writes the program to `path`, whole or not at all; for one batch size if given, else for any."""
    if path.suffix != ".pt2":
        raise SettingsError(f"An exported program is a .pt2 file; name it {path.with_suffix('.pt2')}.")
    if batch_size is not None and batch_size < 1:
        raise SettingsError(f"A batch has at least one sample, not {batch_size}.")
    part = DensePart(model, inputs, objective).eval()
    example = part.example(batch_size or 5)  # 0 and 1 would be taken for constants
    samples, length = torch.export.Dim("samples"), torch.export.Dim("length")
    shapes = {
        name: ({} if batch_size else {0: samples}) | ({1: length} if name in part.sequences else {}) for name in example
    }
    beside = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}.pt2")
    try:
        with torch.no_grad():
            program = torch.export.export(part, (example,), dynamic_shapes=(shapes,), strict=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(program, beside)
        beside.replace(path)
    except RuntimeError as error:
        raise SettingsError(
            f"The dense part of {type(model).__name__} cannot be exported: torch.export says: "
            f"{str(error).strip().partition(chr(10))[0]} Shapes must not depend on the samples: take padded() of a "
            f"sequence as it comes, and expand(rows, inverse) after it."
        ) from error
    except OSError as error:
        raise HotrowError(f"The program {path} could not be written: {error.strerror or error}.") from error
    finally:
        beside.unlink(missing_ok=True)
    return path


class _Padded(JaggedRows):
    """Rows that come padded: how long the longest sequence is follows from their shape, not from the samples."""

    @property
    def longest(self) -> int:
        return self.values.shape[0] // self.lengths.shape[0]


def _jagged(rows: Tensor, lengths: Tensor) -> JaggedRows:
    """Padded rows as the windows that they are."""
    samples, longest, dim = rows.shape
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    begins = torch.arange(samples, device=rows.device) * longest
    return _Padded(rows.reshape(samples * longest, dim), offsets, None, begins)

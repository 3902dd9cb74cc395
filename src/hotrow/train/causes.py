"""`Causes`: why a loss or a gradient is no finite number: which column, keys, weights, layer or gradient was the first.

On a CPU a step looks at its loss before the backward and at its gradients before anything learns from them. A look at
the gradients is one sum over each, which cannot hide what is not finite: 0.1 ms of a step of 12 ms (DLRM, batches of
2,048). On a GPU nobody waits for a step: `Losses` knows which was the first, and `hotrow replay` makes that one again
with these looks.

Once something is found the run ends, so what is done here may take its time: the forward is made again, with a look at
what goes into every module and what comes out of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotrow.device_lookup import DeviceLookup
from hotrow.embedded import Embedded
from hotrow.embeddings import Embeddings
from hotrow.objectives.inputs import Inputs
from hotrow.train.dense import DenseForward, same_buffers
from hotrow.train.finite import REMEDY
from hotrow.train.ready import Ready

_NAMED = 5
"""Keys and weights that a sentence names; of more it gives the number."""
_OF_DATA = "The log is to be mended and prepared again."
_OF_TRAINING = f"Training does not converge. {REMEDY}"


@dataclass(frozen=True)
class Made:
    """The forward of a step: what it was made of, and what came of it."""

    ready: Ready
    rows: Embedded
    inputs: Inputs
    loss: Tensor


class Causes:
    """Finds them for one model and its tables; `columns` are the names of the dense inputs."""

    def __init__(
        self, model: nn.Module, embeddings: Embeddings, forward: DenseForward, columns: Sequence[str] = ()
    ) -> None:
        self._model, self._embeddings, self._forward = model, embeddings, forward
        self._columns = tuple(columns)
        self._parameters = dict(model.named_parameters())

    def of_loss(self, made: Made) -> str:
        """Why the loss is no finite number, and what to do; nothing where it is one."""
        value = float(made.loss.detach())
        if math.isfinite(value):
            return ""
        of_data = list(self._inputs(made.inputs))
        found = [*of_data, *self._rows(made.ready), *self._weights()] or list(self._layers(made))
        why = " ".join(found) or "What the model gives is finite; what the objective makes of it is not."
        return f"The loss is {value}. {why} {_OF_DATA if of_data else _OF_TRAINING}"

    def of_gradients(self, ready: Ready) -> str:
        """Whose gradients are not finite, and what to do; nothing where all are."""
        grads = [*self.gradients().values(), *(grad for grad in ready.lookup.grads or () if grad is not None)]
        with np.errstate(all="ignore"):
            if all(math.isfinite(_sum(grad)) for grad in grads):
                return ""
        weights = [name for name, grad in self.gradients().items() if not finite(grad)]
        found = [f"The gradients of {_some(weights[::-1], 'weights')} are not finite."] if weights else []
        for feature, grad in self.gradients_of_features(ready):
            if not finite(grad):
                found.append(f"The gradients of {_rows_of(ready, feature, grad)} are not finite.")
        return f"{' '.join(found)} {_OF_TRAINING}" if found else ""

    def rows(self, ready: Ready) -> Iterator[tuple[str, Tensor, Tensor]]:
        """For each table the unique keys of a batch and their rows, as the model has them if they are at hand."""
        lookup, starts = ready.lookup, ready.lookup.grouping.starts
        at_hand = lookup.rows is not None and not isinstance(lookup, DeviceLookup)
        for t, (name, keys) in enumerate(zip(lookup.layout.tables, lookup.keys(), strict=True)):
            of_table = torch.from_numpy(keys)
            if at_hand:
                rows = lookup.rows[starts[t] : starts[t + 1]].view(len(keys), -1) if len(keys) else torch.empty(0, 1)
                yield name, of_table, rows
            elif self._embeddings.world.size == 1:  # otherwise all ranks would have to read
                yield name, of_table, self._embeddings.read(name, of_table)

    def gradients(self) -> dict[str, Tensor]:
        """Those of the dense weights that have some, by name."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _inputs(self, inputs: Inputs) -> Iterator[str]:
        named: list[tuple[str, Tensor]] = []
        if inputs.dense is not None:
            names = self._columns if len(self._columns) == inputs.dense.shape[1] else range(inputs.dense.shape[1])
            named += [(f"Dense column {name}", column) for name, column in zip(names, inputs.dense.T, strict=True)]
        for name, tensor in (("The label", inputs.labels), ("The weight", inputs.weights)):
            named += [] if tensor is None else [(name, tensor)]
        named += [(f"What the objective drew as {name}", tensor) for name, tensor in inputs.extras.items()]
        for name, tensor in named:
            if not finite(tensor):
                wrong = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(1).nonzero().view(-1).tolist()
                yield f"{name} is not finite in {_some([str(sample) for sample in wrong], 'samples')} of the batch."

    def _rows(self, ready: Ready) -> Iterator[str]:
        for table, keys, rows in self.rows(ready):
            if finite(rows):
                continue
            wrong = keys[~torch.isfinite(rows).all(1)]
            features = [
                name
                for name, feature in self._embeddings.features.items()
                if feature.table == table and bool(torch.isin(ready.batch[name].values, wrong).any())
            ]
            yield f"The rows of {_keys(wrong)} of table {table}, feature {', '.join(features)}, are not finite."

    def _weights(self) -> Iterator[str]:
        state = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        wrong = [name for name, tensor in state.items() if not finite(tensor)]
        if wrong:
            yield f"The values of {_some(wrong, 'weights')} are not finite."

    def _layers(self, made: Made) -> Iterator[str]:
        """The first module that something not finite goes into or comes out of, when the forward is made again."""
        devices = [made.loss.device] if made.loss.is_cuda else []
        random = torch.random.fork_rng(devices)
        with torch.no_grad(), random, same_buffers(self._model), _looked_at(self._model) as found:
            outputs = self._forward.plain(made.rows, made.inputs.dense)
        if found:
            yield found[0]
        elif not _all_finite(outputs):
            yield "What the model gives is not finite, though all that its layers take and give is."

    def gradients_of_features(self, ready: Ready) -> Iterator[tuple[str, Tensor]]:
        """For each feature those of what it looked up: of unique samples where it is pooled, else of each place."""
        layout, grads = ready.lookup.layout, ready.lookup.grads or ()
        for (names, dims, _), grad in zip(layout.pooled, grads, strict=False):
            if grad is not None:
                yield from zip(names, grad.split(dims, dim=1), strict=True)
        for (name, *_), grad in zip(layout.sequences, grads[len(layout.pooled) :], strict=False):
            if grad is not None:
                yield name, grad


def finite(tensor: Tensor) -> bool:
    """Whether it holds finite numbers only."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _sum(grad: Tensor) -> float:
    """Of all values; in one thread, since waiting for others takes longer than to add up what is still in its cache."""
    if grad.dtype != torch.float32 or not grad.is_cpu or grad.is_sparse:
        return float(grad.sum())
    return float(grad.detach().numpy().sum())


def _rows_of(ready: Ready, feature: str, grad: Tensor) -> str:
    """A feature, and the keys whose gradients are not finite where each has its own place."""
    bags, wrong = ready.batch[feature], (~torch.isfinite(grad)).any(1).cpu()
    if len(wrong) == len(bags.lengths) and ready.lookup.layout.looks_up(feature)[1] != "sequence":
        wrong = torch.repeat_interleave(wrong, bags.lengths)
    if len(wrong) != len(bags.values):  # windows that share their places
        return f"feature {feature}"
    return f"feature {feature}, {_keys(bags.values[wrong])},"


def _keys(keys: Tensor) -> str:
    return _some([str(key) for key in sorted(set(keys.tolist()))], "keys")


def _some(names: Sequence[str], what: str) -> str:
    """'weight a', 'keys 3, 4', 'keys 1, 2, 3, 4, 5 and 7 others'."""
    if len(names) == 1:
        return f"{what.removesuffix('s')} {names[0]}"
    others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"{what} {', '.join(names[:_NAMED])}{others}"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _all_finite(value: Any) -> bool:
    return all(map(finite, _tensors(value)))


@contextlib.contextmanager
def _looked_at(model: nn.Module) -> Iterator[list[str]]:
    """While open, sentences about modules that something not finite goes into or comes out of, in their order."""
    found: list[str] = []

    def look(name: str, how: str) -> Callable[..., None]:
        def hook(module: nn.Module, *values: Any) -> None:
            if not _all_finite(values[-1]):
                layer = f"layer {name} ({type(module).__name__})" if name else "the model"
                found.append(f"What {how} {layer} is the first value that is not finite.")

        return hook

    hooks = [
        handle
        for name, module in model.named_modules()
        for handle in (
            module.register_forward_pre_hook(look(name, "goes into")),
            module.register_forward_hook(look(name, "comes out of")),
        )
    ]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()

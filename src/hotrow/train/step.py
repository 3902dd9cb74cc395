"""`Step`: one training step: model, loss and backward; sums over ranks; dense optimizer and rows.

    step = Step(embeddings, model, objective, optimizer)
    for ready in pipeline:
        loss = step(ready)

`Trainer` makes its steps with one of these, and so can a loop of your own. The loss stays on the device: reading it
waits for the step, so a loop reads it when it wants to show it.

Several batches make one step where all but the last are `add`ed: their losses are summed by weight, and the sum of
gradients is divided by the weight of all samples of all ranks, so the step is that of one batch of all of them. It
costs the memory of the gradients of their results, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.embeddings import Embeddings
from hotrow.errors import NotFiniteError
from hotrow.objectives import BinarySettings, Objective, ObjectiveInputs
from hotrow.train.causes import Causes, Made
from hotrow.train.dense import DenseAdam, DenseForward, DenseOptimizer, DenseStep
from hotrow.train.phases import Phases
from hotrow.train.ranks import FLAGS, DenseSync, Ranks
from hotrow.train.ready import Ready
from hotrow.world import World

QUIET = (False,) * len(FLAGS)


class Step:
    """Trains on one batch a call. `optimizer` holds the dense optimizer, `flags` what ranks said with the last step."""

    def __init__(
        self,
        embeddings: Embeddings,
        model: nn.Module,
        objective: Objective | None = None,
        optimizer: DenseOptimizer | None = None,
        *,
        forward: DenseForward | None = None,
        ranks: Ranks | None = None,
        phases: Phases | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        """`columns` are the names of dense inputs, to be said where one of them is no finite number."""
        self.embeddings, self.model = embeddings, model
        self.ranks = ranks or Ranks(World(), torch.device("cpu"))
        self.objective = objective or _binary(embeddings)
        self.forward = forward or DenseForward(model, self.ranks.device, outputs=self.objective.outputs)
        self.optimizer = DenseStep(model, optimizer or DenseAdam())
        self.flags = dict.fromkeys(FLAGS, False)
        self.looks = self.ranks.device.type == "cpu"  # for what is not finite; on a GPU each look waits for the step
        self.causes = Causes(model, embeddings, self.forward, columns)
        self.wrong = ""  # in the step made last
        self.loss: Tensor | None = None
        self.keeps_outputs = False
        self.outputs: Any = None  # what the model gave for the last batch, where it is to be kept
        self._added = 0
        self._weight = 0.0
        self._sync = DenseSync(model, self.ranks)
        self._phases = phases or Phases()

    def __call__(self, ready: Ready, flags: Sequence[bool] = QUIET) -> Tensor:
        """The mean loss of this rank's samples; rows and weights have learned from it. Ranks say `flags` with it."""
        loss = self.compute(ready)
        self._refuse_wrong()
        flags = (*flags[:-1], bool(self.wrong))
        self._sync.begin(flags)
        self.embeddings.step()
        with self._phases("reduce"):
            self.flags = self._sync.end(flags)
        if self.flags["not finite"]:  # on some rank: all end here, before the dense weights learn from it
            said = self.ranks.peers.agree("not finite", self.wrong)
            raise NotFiniteError(next(filter(None, said)))
        with self._phases("model"):
            self.optimizer.step()
        return loss

    def add(self, ready: Ready) -> Tensor:
        """The mean loss of a batch that the next call learns from too. Changes no weight and no row."""
        loss = self.compute(ready, last=False)
        self._refuse_wrong()
        return loss

    def compute(self, ready: Ready, *, last: bool = True) -> Tensor:
        """Model, loss and backward, of the `last` batch of a step or one before it. Changes no weight and no row."""
        joined = not last or self._added > 0
        with self._phases("model"):
            inputs, rows = ready.inputs.to(self.ranks.device), ready.rows()
            outputs = self.forward(rows, inputs.dense)
            loss = self.objective.loss(outputs, inputs)
            self.outputs = detached(outputs) if self.keeps_outputs else None
            wrong = self.causes.of_loss(Made(ready, rows, inputs, loss)) if self.looks else ""
            weighed = self._summed(loss, ready) if joined else self._scaled(loss, ready)
            weighed.backward()  # type: ignore[no-untyped-call]
            wrong = wrong or (self.causes.of_gradients(ready) if self.looks else "")
        said = f"Step {self.embeddings.steps + 1:,}: {wrong}" if wrong else ""
        self.wrong = (self.wrong if self._added > 1 else "") or said
        if joined and last:
            self._divide()
        self.loss = loss.detach()
        return self.loss

    def _refuse_wrong(self) -> None:
        """Ends a run of one rank here; several end together, once all know."""
        if self.wrong and self.ranks.world.size == 1:
            raise NotFiniteError(self.wrong)

    def forget(self) -> None:
        """Lets go of what was added."""
        self._added, self._weight = 0, 0.0
        self.optimizer.optimizer.zero_grad(set_to_none=True)
        self.embeddings.forget()

    def _summed(self, loss: Tensor, ready: Ready) -> Tensor:
        """The sum of the samples' losses, each by its weight."""
        weight = self.objective.weight(ready.batch)
        self._added += 1
        self._weight += weight
        return loss * weight

    def _divide(self) -> None:
        """Makes of the sums over samples such means that the mean over ranks is the mean over the step's samples."""
        (whole,) = self.ranks.sums(self._weight)
        factor = self.ranks.world.size / max(whole, 1e-12)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.embeddings.scale(factor)
        self._added, self._weight = 0, 0.0

    def _scaled(self, loss: Tensor, ready: Ready) -> Tensor:
        """This rank's loss, such that the mean over ranks is the mean over the step's samples."""
        ranks = self.ranks.world.size
        if ranks == 1:
            return loss
        mine = self.objective.weight(ready.batch)
        if ready.samples is not None and ready.batch.weights is None and self.objective.of_samples:
            whole = float(ready.samples)
        else:
            (whole,) = self.ranks.sums(mine)
        factor = mine * ranks / max(whole, 1e-12)
        return loss if factor == 1.0 else loss * factor


def detached(outputs: Any) -> Any:
    """What a model gave, without how it came to it."""
    return outputs.detach() if isinstance(outputs, Tensor) else {n: value.detach() for n, value in outputs.items()}


def _binary(embeddings: Embeddings) -> Objective:
    inputs = ObjectiveInputs(list(embeddings.features.values()), ("label",))
    return BinarySettings().build(inputs)

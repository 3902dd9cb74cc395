"""The dense part: how its forward runs, its optimizer's settings, and an optimizer whose state is plain named arrays.

With bf16 only the products run in bfloat16 (autocast): weights, loss, rows and every optimizer keep their own dtype.

The learning rate is set from the schedule before every step, so it depends on the step count alone and a
resumed run needs no scheduler state. State is kept under parameter names, not positions: a checkpoint can be
read without the program that wrote it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Discriminator, Field, Tag
from torch import Tensor, nn

from hotrow.embedded import Embedded
from hotrow.errors import CheckpointError, SettingsError
from hotrow.own import TAG, tag_of
from hotrow.schedule import Constant, Schedule
from hotrow.settings import Settings
from hotrow.train.groups import Group, freeze, parameter_groups
from hotrow.train.optimizer_state import named, settings_of, take
from hotrow.train.own_optimizer import OwnOptimizer, tried_on

Parameters = list[dict[str, Any]]
"""Groups of parameters, as a torch optimizer takes them."""


class _Dense(Settings):
    lr: float = Field(0.001, gt=0, description="learning rate")
    schedule: Schedule = Field(Constant(), description="how the learning rate changes over the steps")
    weight_decay: float = Field(0.0, ge=0, description="added to the gradient times the weight")
    clip_norm: float | None = Field(None, gt=0, description="the norm of all gradients together is held to this")
    groups: tuple[Group, ...] = Field((), description="parameters that learn in another way: [[optimizer.groups]]")

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        raise NotImplementedError


class DenseSGD(_Dense):
    """`torch.optim.SGD`."""

    name: Literal["sgd"] = "sgd"

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, weight_decay=self.weight_decay)


class DenseMomentum(_Dense):
    """`torch.optim.SGD` with momentum."""

    name: Literal["momentum"] = "momentum"
    momentum: float = Field(0.9, gt=0, lt=1)
    nesterov: bool = False

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
        )


class DenseAdagrad(_Dense):
    """`torch.optim.Adagrad`."""

    name: Literal["adagrad"] = "adagrad"
    eps: float = Field(1e-10, ge=0)
    initial: float = Field(0.0, ge=0, description="what the accumulators start from")

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(
            parameters,
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            initial_accumulator_value=self.initial,
        )


class DenseAdam(_Dense):
    """`torch.optim.Adam`."""

    name: Literal["adam"] = "adam"
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, ge=0)

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.Adam(parameters, lr=self.lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)


class DenseAdamW(_Dense):
    """`torch.optim.AdamW`: its weight decay shrinks the weight instead of joining the gradient."""

    name: Literal["adamw"] = "adamw"
    weight_decay: float = Field(0.01, ge=0, description="share of the weight taken off, times the learning rate")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, ge=0)

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(parameters, lr=self.lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)


DenseOptimizer = Annotated[
    Annotated[DenseSGD, Tag("sgd")]
    | Annotated[DenseMomentum, Tag("momentum")]
    | Annotated[DenseAdagrad, Tag("adagrad")]
    | Annotated[DenseAdam, Tag("adam")]
    | Annotated[DenseAdamW, Tag("adamw")]
    | Annotated[OwnOptimizer, Tag(TAG)],
    Discriminator(lambda value: "adam" if isinstance(value, dict) and not value.get("name") else tag_of(value)),
]


class DenseForward:
    """What a model gives, in fp32 whatever `precision` its products have; compiled for training where that works.

    Compiling is tried on the first training batch, forward and backward, and forgotten with a `note` if it fails.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        precision: str = "fp32",
        compiled: bool = False,
        outputs: Callable[[Any, Embedded, Tensor | None], Any] | None = None,
    ) -> None:
        self.note = ""
        self._model, self._device = model, device
        self._bf16 = precision == "bf16"
        self._outputs = outputs or (lambda model, embedded, dense: model(embedded, dense))
        self._compiled: Any = torch.compile(model) if compiled else None
        self._tried = False

    def __call__(self, embedded: Embedded, dense: Tensor | None) -> Any:
        if self._compiled is None or not self._model.training:
            return self._logits(self._model, embedded, dense)
        if not self._tried:
            self._try(embedded, dense)
        model = self._model if self._compiled is None else self._compiled  # a compiled module has no truth value
        return self._logits(model, embedded, dense)

    def plain(self, embedded: Embedded, dense: Tensor | None) -> Any:
        """The same without being compiled, so that hooks on the model's modules are called."""
        return self._logits(self._model, embedded, dense)

    def apply(self, give: Callable[[Any, Embedded], Tensor], embedded: Embedded) -> Tensor:
        """What a function makes of the model and rows, as the forward is computed."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            return give(self._model, embedded).float()

    def _logits(self, model: Any, embedded: Embedded, dense: Tensor | None) -> Any:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            outputs = self._outputs(model, embedded, dense)
        if isinstance(outputs, Tensor):
            return outputs.float()
        if isinstance(outputs, Mapping) and all(isinstance(output, Tensor) for output in outputs.values()):
            return {name: output.float() for name, output in outputs.items()}
        said = "values that are none" if isinstance(outputs, Mapping) else type(outputs).__name__
        raise SettingsError(f"A model gives a tensor, or tensors by name; {type(self._model).__name__} gives {said}.")

    def _try(self, embedded: Embedded, dense: Tensor | None) -> None:
        """Runs the compiled model once; no weight, buffer, row or random number is different afterwards."""
        self._tried = True
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), same_buffers(self._model):
            try:
                logits = self._logits(self._compiled, embedded, dense)
                total = logits.sum() if isinstance(logits, Tensor) else sum(output.sum() for output in logits.values())
                learning = [p for p in self._model.parameters() if p.requires_grad]
                torch.autograd.grad(total, learning, allow_unused=True)
            except Exception as error:  # whatever a compiler may raise: the model itself is judged by the next line
                with torch.no_grad():
                    self._logits(self._model, embedded, dense)
                why = str(error).strip().partition("\n")[0]
                self.note = f"The dense part is not compiled, for torch.compile failed: {type(error).__name__}: {why}"
                self._compiled = None


@contextlib.contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Puts a model's buffers back as they were: a forward in training mode moves running means."""
    kept = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)


class DenseStep:
    """One optimizer over a model's dense parameters: clip, set the learning rate, step, forget gradients.

    Parameters that its settings freeze are taken out of the model's training.
    """

    def __init__(self, model: nn.Module, settings: DenseOptimizer) -> None:
        self.settings = settings
        self.steps = 0
        freeze(model, settings.groups)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = settings.build(parameter_groups(settings.groups, self._parameters))
        self._lr = float(self.optimizer.defaults["lr"])
        self._lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._given = settings_of(self.optimizer)
        self._rates: list[Tensor] = []

    @property
    def lr(self) -> float:
        """The learning rate of the next step, of parameters without one of their own."""
        return self._lr * self._factor

    @property
    def _factor(self) -> float:
        return self.settings.schedule.factor(self.steps)

    def step(self) -> None:
        """Makes one step with the gradients there are."""
        self.begin_step()
        self.apply()
        self.optimizer.zero_grad(set_to_none=True)

    def begin_step(self) -> None:
        """Sets the learning rate of the step to come, and counts it."""
        factor = self._factor
        if self._rates:
            for rate, lr in zip(self._rates, self._lrs, strict=True):
                rate.fill_(lr * factor)
        else:
            for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
                group["lr"] = lr * factor
        self.steps += 1

    def apply(self) -> None:
        """Clips and applies the gradients there are."""
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self.settings.clip_norm)
        self.optimizer.step()

    def on_device(self, device: torch.device) -> None:
        """Keeps all that changes from step to step on the device, so that a CUDA graph can hold the step."""
        self._rates = [torch.tensor(lr * self._factor, device=device) for lr in self._lrs]
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
            if "fused" in group and device.type == "cuda":  # one kernel for all parameters
                group["fused"], group["foreach"] = True, False
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].to(device)
        self._given = settings_of(self.optimizer)

    def state(self) -> dict[str, Tensor]:
        """A copy of the optimizer's state as `parameter/what` -> tensor, and the step count."""
        return {"steps": torch.tensor(self.steps), **named(self.optimizer, self._parameters, self._given)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state()` gave; `CheckpointError` for a parameter this model does not have."""
        take(self.optimizer, self._parameters, state)
        self.steps = int(state["steps"])


def check_optimizer(model: nn.Module, settings: DenseOptimizer) -> None:
    """Refuses, before anything starts, an optimizer that cannot train this model; a model made for that alone."""
    DenseStep(model, settings)
    if not isinstance(settings, OwnOptimizer):
        return
    with torch.random.fork_rng([]):
        try:
            tried = DenseStep(tried_on(), settings.alone())
            tried.step()
            DenseStep(tried_on(), settings.alone()).load(tried.state())
        except CheckpointError as error:
            raise SettingsError(f"optimizer.name: {settings.name} cannot be resumed. {error}") from None
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise SettingsError(f"optimizer.name: {settings.name} cannot make a step. {said}.") from error

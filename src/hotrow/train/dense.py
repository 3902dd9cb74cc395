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
from pydantic import Field
from torch import Tensor, nn

from hotrow.embedded import Embedded
from hotrow.errors import CheckpointError
from hotrow.schedule import Constant, Schedule
from hotrow.settings import Settings


class _Dense(Settings):
    lr: float = Field(0.001, gt=0, description="learning rate")
    schedule: Schedule = Field(Constant(), description="how the learning rate changes over the steps")
    weight_decay: float = Field(0.0, ge=0, description="added to the gradient times the weight")
    clip_norm: float | None = Field(None, gt=0, description="the norm of all gradients together is held to this")

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise NotImplementedError


class DenseSGD(_Dense):
    """`torch.optim.SGD`."""

    name: Literal["sgd"] = "sgd"

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, weight_decay=self.weight_decay)


class DenseMomentum(_Dense):
    """`torch.optim.SGD` with momentum."""

    name: Literal["momentum"] = "momentum"
    momentum: float = Field(0.9, gt=0, lt=1)
    nesterov: bool = False

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
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

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
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

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.Adam(parameters, lr=self.lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)


class DenseAdamW(_Dense):
    """`torch.optim.AdamW`: its weight decay shrinks the weight instead of joining the gradient."""

    name: Literal["adamw"] = "adamw"
    weight_decay: float = Field(0.01, ge=0, description="share of the weight taken off, times the learning rate")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, ge=0)

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(parameters, lr=self.lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)


DenseOptimizer = Annotated[
    DenseSGD | DenseMomentum | DenseAdagrad | DenseAdam | DenseAdamW, Field(discriminator="name")
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

    def _logits(self, model: Any, embedded: Embedded, dense: Tensor | None) -> Any:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            outputs = self._outputs(model, embedded, dense)
        return outputs.float() if isinstance(outputs, Tensor) else {name: o.float() for name, o in outputs.items()}

    def _try(self, embedded: Embedded, dense: Tensor | None) -> None:
        """Runs the compiled model once; no weight, buffer, row or random number is different afterwards."""
        self._tried = True
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), _same_buffers(self._model):
            try:
                logits = self._logits(self._compiled, embedded, dense)
                total = logits.sum() if isinstance(logits, Tensor) else sum(output.sum() for output in logits.values())
                torch.autograd.grad(total, list(self._model.parameters()), allow_unused=True)
            except Exception as error:  # whatever a compiler may raise: the model itself is judged by the next line
                with torch.no_grad():
                    self._logits(self._model, embedded, dense)
                why = str(error).strip().partition("\n")[0]
                self.note = f"The dense part is not compiled, for torch.compile failed: {type(error).__name__}: {why}"
                self._compiled = None


@contextlib.contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Puts a model's buffers back as they were: a forward in training mode moves running means."""
    kept = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)


class DenseStep:
    """One optimizer over a model's dense parameters: clip, set the learning rate, step, forget gradients."""

    def __init__(self, model: nn.Module, settings: DenseOptimizer) -> None:
        self.settings = settings
        self.steps = 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = settings.build(list(self._parameters.values()))
        self._rate: Tensor | None = None

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.settings.lr * self.settings.schedule.factor(self.steps)

    def step(self) -> None:
        """Makes one step with the gradients there are."""
        self.begin_step()
        self.apply()
        self.optimizer.zero_grad(set_to_none=True)

    def begin_step(self) -> None:
        """Sets the learning rate of the step to come, and counts it."""
        if self._rate is not None:
            self._rate.fill_(self.lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
        self.steps += 1

    def apply(self) -> None:
        """Clips and applies the gradients there are."""
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self.settings.clip_norm)
        self.optimizer.step()

    def on_device(self, device: torch.device) -> None:
        """Keeps all that changes from step to step on the device, so that a CUDA graph can hold the step."""
        self._rate = torch.tensor(self.lr, device=device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
            if "capturable" in group:
                group["capturable"] = True
            if "fused" in group and device.type == "cuda":  # one kernel for all parameters
                group["fused"], group["foreach"] = True, False
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].to(device)

    def state(self) -> dict[str, Tensor]:
        """A copy of the optimizer's state as `parameter/what` -> tensor, and the step count."""
        out = {"steps": torch.tensor(self.steps)}
        for name, parameter in self._parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                if value is not None:
                    out[f"{name}/{key}"] = torch.as_tensor(value).detach().cpu().clone()
        return out

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state()` gave; `CheckpointError` for a parameter this model does not have."""
        per_parameter: dict[str, dict[str, Any]] = {}
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            if name:
                per_parameter.setdefault(name, {})[key] = value
        for name, values in per_parameter.items():
            if name not in self._parameters:
                raise CheckpointError(f'The checkpoint has optimizer state for "{name}", which this model lacks.')
            parameter = self._parameters[name]
            self.optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device).clone()
                for key, value in values.items()
            }
        self.steps = int(state["steps"])

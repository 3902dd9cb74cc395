"""What a run is besides weights and rows: where it stands, its random generators, and at its end what it came to.

Every rank draws random numbers of its own. A checkpoint has the generators of all of them; a rank that was not there
then begins with numbers that follow from seed, rank and step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.run import Run
from hotrow.train.ranks import Ranks


@dataclass(frozen=True)
class Result:
    """What a run came to. `stopped` says why it ended: "end", "early", "idle", "hook" or the name of a signal.

    `checkpoint` and `metrics` are the newest, or of `best_step` where the run is over and was to stop early.
    `plan` is what came of a plan: what the device held, what was predicted, and whether that was within its interval.
    """

    folder: Path
    checkpoint: Path
    stopped: str
    steps: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    best_step: int | None
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


@dataclass
class State:
    """Where a run stands between two steps: all a checkpoint keeps besides weights, rows and generators.

    `loss` and `count` add up the steps since the last line of metrics; `waited` counts evaluations that were
    not better than `best`, which `best_metrics` are of; `feed` is the feed's own.
    """

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    count: float = 0.0
    best: float | None = None
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    waited: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    feed: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, Any] = field(default_factory=dict)


def seed_of(run: Run, ranks: Ranks, step: int) -> int:
    """What a rank's random numbers begin with where no checkpoint has them: others than those of any other rank."""
    text = f"{run.train.seed}/{ranks.world.rank}/{step}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def generators(device: torch.device, ranks: Ranks) -> dict[str, Tensor]:
    """The state of every rank's generators, as a checkpoint keeps them."""
    out = {_of_rank("random/cpu", r): state for r, state in enumerate(ranks.generators(torch.get_rng_state()))}
    if device.type == "cuda":
        states = ranks.generators(torch.cuda.get_rng_state(device))
        out |= {_of_rank("random/cuda", r): state for r, state in enumerate(states)}
    return out


def set_generators(arrays: Mapping[str, Tensor], device: torch.device, seed: int, ranks: Ranks) -> None:
    """This rank's generators as a checkpoint has them, or begun with `seed`."""
    torch.manual_seed(seed)
    for name, put in (("random/cpu", torch.set_rng_state), ("random/cuda", torch.cuda.set_rng_state)):
        state = arrays.get(_of_rank(name, ranks.world.rank))
        if state is not None and (name == "random/cpu" or device.type == "cuda"):
            put(state)


def _of_rank(name: str, rank: int) -> str:
    return f"{name}/{rank}" if rank else name

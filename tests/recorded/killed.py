"""A run of the fixture that dies on the way: a function that `ranks.Ranks` runs in processes of their own."""

import itertools
import os
import signal
from unittest import mock

from hotrow.train.dense import DenseStep
from hotrow.world import World
from train_work import train_run


def train_and_die(world: World, text: str, after: int) -> dict[str, object]:
    """Trains, but each rank kills itself in the midst of the step after so many, between rows and dense weights."""
    step, made = DenseStep.step, itertools.count()

    def die(self: DenseStep) -> None:
        if next(made) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self)

    with mock.patch.object(DenseStep, "step", die):
        return train_run(world, text)

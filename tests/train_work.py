"""What ranks do in tests of training: functions that `ranks.Ranks` runs in processes of their own."""

import os
import tomllib

from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.loop import train
from hotrow.world import World


def train_run(world: World, text: str, resume: bool = False) -> dict[str, object]:
    """Trains the run of a run file's text, as torchrun would have it; what it came to."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (world.rank, world.size, world.node_size)), strict=True))
    try:
        result = train(parse(Run, tomllib.loads(text)), resume=resume)
    finally:
        for name in names:
            del os.environ[name]
    return {"stopped": result.stopped, "steps": result.steps, "samples": result.samples, "metrics": result.metrics}

"""A warm start: a new run begins with what it has in common with the checkpoint of another, `train.warm_start`.

Tables are matched by name and dim, dense weights by name and shape; nothing else is looked at, so what has another
meaning should have another name. All the rest starts fresh: steps, schedules, the dense optimizer, and the state of a
table's optimizer where it is another (`store/warm.py`). Of buffers running means are taken, and no others: they may be
constants of the other model. What became of each table and weight is said, and written to warm_start.json.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hotrow.errors import HotrowError, SettingsError
from hotrow.files import write_text
from hotrow.models.din import Dice
from hotrow.store.warm import compare, take_rows
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.logs import find_run

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


def source(path: Path, into: Path) -> Checkpoint:
    """The checkpoint that `path` is, or that the run in `path` stands for; `into` is where the new run goes."""
    try:
        folder, at = find_run(path)
        at = at or Checkpoints(folder.checkpoints).chosen()
        if at is None:
            raise SettingsError(f"{path} has no complete checkpoint yet")
        if folder.path.resolve() == into.resolve():
            raise SettingsError("that is this run's own folder. Use --resume to go on with it")
        return Checkpoint(at)
    except HotrowError as error:
        raise SettingsError(f"train.warm_start: {str(error).rstrip('.')}.") from None


def warm_start(t: Trainer, found: Checkpoint) -> None:
    """Takes over rows and weights; says and writes down what became of each."""
    tables = list(t.embeddings.tables.values())
    arrays = {n.removeprefix("model/"): a for n, a in found.arrays().items() if n.startswith("model/")}
    of_tables, of_weights = compare(found.rows, tables), _of_weights(t.model, arrays)
    if not any(said.startswith("taken") for said in (*of_tables.values(), *of_weights.values())):
        raise SettingsError(f"train.warm_start: {found.folder} has no table and no weights that this run has too.")
    _take_weights(t.model, arrays, of_weights)
    take_rows(found.rows, t.embeddings.router, tables, t.ranks.peers)
    for name, said in of_tables.items():
        t.progress.say(f"Table {name} is {said}.")
    t.progress.say(_in_words(of_weights))
    if t.ranks.first:
        whole = {"checkpoint": str(found.folder), "tables": of_tables, "weights": of_weights}
        write_text(t.folder.warm_start, json.dumps(whole, indent=1))


def _of_weights(model: nn.Module, there: dict[str, Tensor]) -> dict[str, str]:
    """For each weight here and there a sentence that begins with what becomes of it: taken, fresh or left."""
    here, running = model.state_dict(), _running(model)
    found = {}
    for name, value in here.items():
        was = there.get(name)
        if was is None:
            found[name] = "fresh: there is none of this name there"
        elif was.shape != value.shape:
            found[name] = f"fresh: its shape is {tuple(value.shape)} here and {tuple(was.shape)} there"
        elif name not in running:
            found[name] = "fresh: it is a constant of the model"
        else:
            found[name] = "taken"
    return found | {name: "left: this run has none of this name" for name in there if name not in here}


def _running(model: nn.Module) -> set[str]:
    """What training changes in a model: its parameters, and buffers that follow the data."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (_NormBase, Dice)):
            names |= {f"{prefix}.{name}" if prefix else name for name, _ in module.named_buffers()}
    return names


def _take_weights(model: nn.Module, there: dict[str, Tensor], said: dict[str, str]) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if said[name] == "taken":
                value.copy_(there[name])


def _in_words(said: dict[str, str]) -> str:
    counts = Counter(sentence.partition(":")[0] for sentence in said.values())
    names = [name for name, sentence in said.items() if sentence.startswith("fresh")]
    fresh = f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""
    return (
        f"Of the dense weights {counts['taken']} are taken, {counts['fresh']} are fresh{fresh} and {counts['left']} "
        f"are left; warm_start.json names each."
    )

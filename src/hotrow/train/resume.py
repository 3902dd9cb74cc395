"""How a run begins, goes on, is cut into checkpoints and ends: the files of its run folder."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotrow.errors import CheckpointError, HotrowError, SettingsError
from hotrow.service.remote import RemoteRows
from hotrow.store.store import Rows
from hotrow.tiers.cached_rows import CachedRows
from hotrow.train.best import in_words, kept, measured
from hotrow.train.checkpoint import Checkpoint
from hotrow.train.finite import check_dense, left
from hotrow.train.losses import Losses
from hotrow.train.state import Result, State, generators, seed_of, set_generators
from hotrow.train.warm import source, warm_start

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


def begin(t: Trainer, *, resume: bool, overwrite: bool) -> None:
    """Starts the run afresh, or goes on from its last checkpoint; says what there is to say."""
    latest = t.checkpoints.latest() if resume else None
    name = t.ranks.decide("" if latest is None else latest.name)
    found = t.checkpoints.folder / name if name else None
    other = _other(t) if found is None else None
    said = t.feed.start() if found is None else []
    t.ranks.do_first(lambda: _begin_folder(t, resume, overwrite))
    if found is not None:
        _restore(t, found)
    else:
        _start_afresh(t)
        if other is not None:
            warm_start(t, other)
    if resume and found is None:
        t.progress.say(f"{t.folder.path} has no checkpoint yet; the run starts from its beginning.")
    t.steps = t.state.step + t.feed.left
    if t.run.train.steps is not None:
        t.steps = min(t.steps, t.run.train.steps)
    for sentence in (*t.notes, *said):
        t.progress.say(sentence)


def cut(t: Trainer) -> None:
    """A checkpoint of this moment, written in the background."""
    latest = t.checkpoints.latest()
    hooks = {f"{i}/{type(hook).__name__}": hook.state() for i, hook in enumerate(t.hooks)}
    state = dataclasses.replace(t.state, feed=t.feed.state(), hooks=hooks)
    state.loss, state.count = t.losses.sums(latest)
    dense = {**t.parts.arrays(), **{f"optimizer/{k}": v for k, v in t.optimizer.state().items()}}
    check_dense(dense, state.step, latest)
    t.checkpoints.save(
        t.state.step,
        {**dense, **t.feed.arrays(), **generators(t.device, t.ranks)},
        {**dataclasses.asdict(state), "data": _data(t)},
        t.embeddings,
        protect=t.state.best_step,
    )


def result_of(t: Trainer) -> Result:
    """What the run has come to, with a checkpoint of it."""
    state = t.state
    t.checkpoints.wait()
    if t.ranks.decide(t.checkpoints.latest() != t.checkpoints.at(state.step)):
        t.checkpoint()  # a signal came when those due after the step were already made, or it was missed
        t.checkpoints.wait()
        if t.checkpoints.missed:
            raise CheckpointError(t.checkpoints.missed)
    plan = t.feed.verdict()
    if plan:
        t.progress.say(plan["said"])
    best = _best(t) if t.stopped in ("end", "early", "idle") else None
    return Result(
        folder=t.folder.path,
        checkpoint=best or t.checkpoints.at(state.step),
        stopped=t.stopped,
        steps=state.step,
        samples=state.samples,
        seconds=state.seconds,
        metrics=state.metrics,
        best_step=state.best_step,
        plan=plan,
    )


def to_go_on_from(t: Trainer) -> str:
    """What is left of a run that cannot go on."""
    said = left(t.checkpoints.latest())
    if t.ranks.world.size > 1 or t.run.data.follow is not None:
        return said
    again = f"hotrow replay {shlex.quote(str(t.folder.path))} --step {t.state.step + 1}"
    return f"{said} The step is made again, and its batch written down, by: {again}"


def _begin_folder(t: Trainer, resume: bool, overwrite: bool) -> None:
    if not overwrite:
        _refuse_rows_of_others(t, t.folder.id if resume else "")
    t.folder.begin(t.run, resume=resume, overwrite=overwrite)
    for _, shards in _on_shards(t)[:1]:
        shards.own(t.folder.id)
    t.folder.keep_schema(t.data.schema)
    t.checkpoints.clean()


def _on_shards(t: Trainer) -> list[tuple[Rows, RemoteRows]]:
    """The tables whose rows are on shards, as the first rank sees them: behind their cache, if any, and without."""
    stores = [rows for tier in t.embeddings.router.tiers.values() for rows in tier.stores().values()]
    behind = [(rows, rows.behind if isinstance(rows, CachedRows) else rows) for rows in stores]
    return [(rows, shards) for rows, shards in behind if isinstance(shards, RemoteRows)]


def _refuse_rows_of_others(t: Trainer, mine: str) -> None:
    """Says so where shards hold rows of another run, for those of this one would take their place."""
    for _, shards in _on_shards(t):
        for address, run in shards.runs().items():
            if not mine or run not in ("", mine):
                whose = f"the run {run}" if run else "another program"
                again = "" if mine else ", or use --overwrite, which forgets those rows"
                raise SettingsError(
                    f"The shard at {address} holds rows of {whose}. Start the shards anew{again}, or give this run "
                    f"shards of its own."
                )


def _other(t: Trainer) -> Checkpoint | None:
    """The checkpoint of another run that this one begins with."""
    path = t.run.train.warm_start
    return None if path is None else source(path, t.folder.path)


def _start_afresh(t: Trainer) -> None:
    """Leaves nothing of an earlier run: neither its metrics, nor its rows on shards that are still running."""
    if t.ranks.first:
        t.feed.write(t.folder)
        t.folder.cut_back(0)
        for rows, _ in _on_shards(t):
            rows.clear()
    t.ranks.decide("")  # nobody trains before that is done
    if t.ranks.world.rank:
        torch.manual_seed(seed_of(t.run, t.ranks, 0))


def _restore(t: Trainer, found: Path) -> None:
    checkpoint = Checkpoint(found)
    state = dict(checkpoint.state)
    t.trained_on = state.pop("data")
    if t.trained_on not in ("", _data(t)):
        raise HotrowError(
            f'The split "{t.run.data.train}" of {t.run.data.path} is not the one that {found} was trained on.'
        )
    arrays = checkpoint.arrays()
    t.state = State(**state)
    t.feed.restore(t.state.step, t.state.feed, arrays)
    t.parts.restore(checkpoint, arrays)
    t.optimizer.load(_under("optimizer/", arrays))
    set_generators(arrays, t.device, seed_of(t.run, t.ranks, t.state.step), t.ranks)
    for i, hook in enumerate(t.hooks):
        if (name := f"{i}/{type(hook).__name__}") in t.state.hooks:
            hook.restore(t.state.hooks[name])
    if t.ranks.first:
        t.folder.cut_back(t.state.step)
    else:
        t.state.loss = t.state.count = 0.0  # the sums are of all ranks together
    t.losses = Losses(t.state, t.ranks)
    t.progress.say(f"Going on after step {t.state.step:,}, from {found}.")


def _data(t: Trainer) -> str:
    """What the training split holds, in one number; a run that follows a log keeps that of the one before."""
    if t.run.data.follow is not None:
        return t.trained_on
    parts = t.data.parts(t.run.data.train)
    return hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()


def _best(t: Trainer) -> Path | None:
    """The best checkpoint where the run was to stop early, which the metrics are of from then on."""
    state, split = t.state, t.run.data.test or t.watched
    if state.best_step is None or (best := kept(t.checkpoints, state, t.ranks, t.progress)) is None:
        return None
    known = state.best_metrics if split == t.watched else {}
    state.metrics = known or measured(t.parts, best, state, split)
    t.log.write("evaluate", state.step, {"split": split, "best_step": state.best_step, **state.metrics})
    t.progress.say(f"Best at step {state.best_step:,}, {split}: {in_words(state.metrics)}")
    return best


def _under(prefix: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

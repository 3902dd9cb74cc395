"""`EmbeddingBagCollection` and `EmbeddingCollection` as TorchRec has them, over `hotrow.Embeddings`.

A feature of several tables is looked up under TorchRec's own name for each output, `feature@table`. State
dicts have TorchRec's names and shapes, so weights move both ways; they hold rows only, as TorchRec's do, and
no optimizer state. To keep that too, and keys outside num_embeddings, use `rows.snapshot` and `rows.restore`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)

from hotrow.data.batch import Batch
from hotrow.embedded import Embedded
from hotrow.embeddings import Embeddings
from hotrow.errors import BatchError, CheckpointError, SettingsError
from hotrow.opaque import opaque
from hotrow.store.optimizers import Optimizer
from hotrow.store.store import RowStore
from hotrow.table import Table
from hotrow.torchrec import configs
from hotrow.torchrec.kjt import kjt_groups
from hotrow.torchrec.optimizer import TableOptimizer, TableParameter
from hotrow.torchrec.weight import Weight, Write

_CHUNK = 1 << 17  # rows written to a table, or looked through, at a time


class _Rows(Embeddings):
    """The rows of a collection, whose state dict has them: it needs no mark of them."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class _Collection(nn.Module):
    """What both collections are: TorchRec's configs, and `rows`, the `Embeddings` that hold the tables."""

    _section: ClassVar[str]  # in state dicts, TorchRec's name for the modules that hold the tables
    rows: Embeddings

    def _open(
        self,
        tables: Sequence[Any],
        config_type: Any,
        device: torch.device | str | None,
        optimizer: Optimizer | None,
        seed: int,
    ) -> None:
        if not tables:
            raise SettingsError(f"{type(self).__name__} needs at least one table.")
        self._configs = [configs.checked(config, config_type) for config in tables]
        self._names_by_table: list[list[str]] = get_embedding_names_by_table(self._configs)
        by_table = list(zip(self._configs, self._names_by_table, strict=True))
        self._wanted = [pair for c, names in by_table for pair in zip(names, c.feature_names, strict=True)]
        self._check_world()
        # On device meta weights take no memory; rows take none before they are used.
        self._device = None if device is None or torch.device(device).type == "meta" else torch.device(device)
        self.rows = _Rows(
            [configs.table(config, optimizer) for config in self._configs],
            [configs.feature(config, name) for config, names in by_table for name in names],
            seed=seed,
        )
        for config in self._configs:
            empty = torch.empty(0, config.embedding_dim, device="cpu")
            self._parameters[self._weight_name("", config)] = TableParameter(empty, requires_grad=False)
        stand_ins = {name: p for name, p in self._parameters.items() if isinstance(p, TableParameter)}
        self._optimizer = TableOptimizer(self.rows, stand_ins)

    def _check_world(self) -> None:
        """Refuses ranks, each of which would train tables of its own."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            if ranks > 1:
                raise SettingsError(
                    f"{type(self).__name__} is for one process: each of the {ranks} ranks here, under "
                    f"DistributedModelParallel too, would train tables of its own. For several ranks use "
                    f"hotrow.Embeddings with world=World.here(), or a run file under torchrun."
                )

    def _embed(self, features: KeyedJaggedTensor, weights: Tensor | None) -> Embedded:
        """The features in the order of the configs, on the device they are wanted on."""
        self._check_world()
        embedded: Embedded = self.rows(Batch(kjt_groups(features, self._wanted, weights)))
        device = features.device() if self._device is None else self._device
        return embedded if device.type == "cpu" else embedded.to(device)

    @property
    def device(self) -> torch.device:
        """Where outputs go, if that was given; rows are in host memory."""
        return torch.device("cpu") if self._device is None else self._device

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Applies the gradients of every forward since the last step, as one step of the optimizer."""
        self._optimizer.step(None, scaler)

    def optimizer(self) -> TableOptimizer:
        """The tables' optimizer, for `CombinedOptimizer` and schedulers: its `step` is this collection's."""
        return self._optimizer

    def _weight_name(self, prefix: str, config: Any) -> str:
        return f"{prefix}{self._section}.{config.name}.weight"

    def _store(self, table: str) -> RowStore:
        store = self.rows.router.tiers["host"].stores()[table]
        assert isinstance(store, RowStore)
        return store

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Each table as TorchRec has it: the rows of keys 0 to num_embeddings - 1, seen or not."""
        for config in self._configs:
            outside = _rows_outside(self._store(config.name), config.num_embeddings)
            if outside:
                raise CheckpointError(
                    f"Table {config.name} has {outside} rows with keys outside 0 to "
                    f"{config.num_embeddings - 1}, for which a TorchRec state dict has no place; "
                    f"save it with rows.snapshot(folder)."
                )
            weight = self.rows.read(config.name, torch.arange(config.num_embeddings))
            weight = weight.to(_dtype(self.rows.tables[config.name]))
            destination[self._weight_name(prefix, config)] = Weight.of(weight, self._writer(config.name))

    def _writer(self, table: str) -> Write:
        """Writes rows of a table, as rows that were never updated."""

        def write(rows: Tensor, first: int) -> None:
            _write(self._store(table), rows, self.rows.steps, first)

        return write

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """The given rows, as never updated, for keys 0 to num_embeddings - 1; other keys keep theirs."""
        expected = {self._weight_name(prefix, config): config for config in self._configs}
        for name, config in expected.items():
            shape = [config.num_embeddings, config.embedding_dim]
            if name not in state_dict:
                missing_keys += [name] if strict else []
            elif list(state_dict[name].shape) != shape:
                error_msgs.append(f"{name} is {list(state_dict[name].shape)}, but the table's config says {shape}.")
            else:
                _write(self._store(config.name), state_dict[name].detach(), self.rows.steps)
        if strict:
            children = tuple(f"{prefix}{child}." for child in self._modules)
            ours = [name for name in state_dict if name.startswith(prefix) and not name.startswith(children)]
            unexpected_keys += [name for name in ours if name not in expected]


class EmbeddingBagCollection(_Collection, EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """Pooled embeddings: drop-in for `torchrec.EmbeddingBagCollection`, on tables that grow.

    Keys outside 0 to num_embeddings - 1 are fine: they get rows like any other, and only a state dict has no
    place for them. Outputs go to `device`, or where the features are if none is given. Without an `optimizer`
    tables have row-wise Adagrad with learning rate 0.01.
    """

    _section = "embedding_bags"

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: Optimizer | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._open(tables, EmbeddingBagConfig, device, optimizer, seed)
        self._is_weighted = is_weighted
        self._lengths = [config.embedding_dim for config in self._configs for _ in config.feature_names]
        for config in self._configs:
            if is_weighted and config.pooling == PoolingType.MEAN:
                raise SettingsError(
                    f"Table {config.name}: MEAN pooling has no meaning in a weighted collection (TorchRec's "
                    f"own refuses it too); use SUM, with the weights divided as you mean it."
                )

    @opaque
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The pooled features of every sample side by side, in the order of the configs."""
        _is_kjt(features)
        weights = features.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise BatchError(
                "This EmbeddingBagCollection is weighted, but the KeyedJaggedTensor has no weights; "
                "give it one for each key, or make the collection with is_weighted=False."
            )
        vectors = self._embed(features, weights).vectors()
        return KeyedTensor([name for name, _ in self._wanted], self._lengths, vectors)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted


class EmbeddingCollection(_Collection, EmbeddingCollectionInterface):  # type: ignore[misc]
    """Sequences of embeddings: drop-in for `torchrec.EmbeddingCollection`, on tables that grow.

    What `EmbeddingBagCollection` says of keys, `device` and `optimizer` holds here too. As in TorchRec,
    weights of the features are not looked at, and features with inverse indices come out deduplicated.
    """

    _section = "embeddings"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: Optimizer | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._open(tables, EmbeddingConfig, device, optimizer, seed)
        self._need_indices = need_indices
        for one, other in pairwise(self._configs):
            if one.embedding_dim != other.embedding_dim:
                raise SettingsError(
                    f"Table {other.name} has embedding_dim {other.embedding_dim} and table {one.name} "
                    f"{one.embedding_dim}; all tables of an EmbeddingCollection have the same."
                )

    @opaque
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """For each feature the rows of its keys, with the feature's lengths."""
        _is_kjt(features)
        embedded = self._embed(features, None)
        names = features.keys()
        lengths = dict(zip(names, features.lengths().split(features.stride_per_key()), strict=True))
        keys: dict[str, Tensor] = {}
        if self._need_indices:
            keys = dict(zip(names, features.values().split(features.length_per_key()), strict=True))
        return {
            name: JaggedTensor(
                values=embedded.sequence(name).values,
                lengths=lengths[feature],
                weights=keys.get(feature),
            )
            for name, feature in self._wanted
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def embedding_dim(self) -> int:
        return int(self._configs[0].embedding_dim)

    def embedding_names_by_table(self) -> list[list[str]]:
        return self._names_by_table

    def need_indices(self) -> bool:
        return self._need_indices


def _is_kjt(features: object) -> None:
    if not isinstance(features, KeyedJaggedTensor):
        raise BatchError(f"Features must be a KeyedJaggedTensor, not {type(features).__name__}.")


def _dtype(table: Table) -> torch.dtype:
    return torch.bfloat16 if table.dtype == "bfloat16" else torch.float32


def _write(store: RowStore, weight: Tensor, step: int, first: int = 0) -> None:
    """Gives keys from `first` on the rows of `weight`, over those there are, as rows that were never updated."""
    for start in range(0, len(weight), _CHUNK):
        rows = weight[start : start + _CHUNK].to("cpu", torch.float32)
        keys = np.arange(first + start, first + start + len(rows), dtype=np.int64)
        store.write(keys, rows.numpy(), step)


def _rows_outside(store: RowStore, count: int) -> int:
    """How many rows have keys outside 0 to count - 1."""
    inside = sum(
        int(store.contains(np.arange(start, min(start + _CHUNK, count), dtype=np.int64)).sum())
        for start in range(0, count, _CHUNK)
    )
    return len(store) - inside

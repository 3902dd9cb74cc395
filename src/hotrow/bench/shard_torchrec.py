"""TorchRec's side of `hotrow bench shard`: its EmbeddingCollection, sharded row-wise or table-wise, on the same ranks.

Tables, dims, optimizer and initial sizes are those of our side, rows are given by number, and its own plan says who
holds what; table-wise deals tables to the nodes in turn, so that the slow link is shared evenly. Its index
deduplication sends each key of a rank once, as our `dedup="rank"` does. FBGEMM has no CPU kernel for that
(`jagged_unique_indices`), so it gets one here, made of our own: the peer is as quick as it can be.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from hotrow import _native
from hotrow.bench.shard_work import LR, Work
from hotrow.world import World

Lookup = Callable[[Sequence[npt.NDArray[np.int64]]], list[Tensor]]


def sharded(work: Work, world: World, way: str, dedup: bool) -> Lookup:
    """A lookup of a batch's keys that gives the rows of every history; backward trains them. `way` is row or table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torchrec").setLevel(logging.ERROR)
        look_up = _sharded(work, world, way, dedup)
    if dedup and not _registered:
        library = torch.library.Library("fbgemm", "IMPL")  # type: ignore[no-untyped-call]
        library.impl("jagged_unique_indices", _unique_indices, "CPU")  # type: ignore[no-untyped-call]
        _registered.append(library)
    return look_up


_registered: list[Any] = []


def _unique_indices(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each feature's distinct indices, dealt evenly to its samples: their lengths and offsets, they, the inverse."""
    features = len(hash_size_offsets) - 1
    samples = (len(offsets) - 1) // features
    ends, values = offsets[::samples].tolist(), indices.numpy()
    lengths, unique, inverse = [], [], []
    seen = 0
    for begin, end in itertools.pairwise(ends):
        keys, where = _native.unique(np.ascontiguousarray(values[begin:end]))
        lengths.append(len(keys) // samples + (np.arange(samples) < len(keys) % samples))
        unique.append(keys)
        inverse.append(where.astype(np.int64) + seen)
        seen += len(keys)
    length = torch.from_numpy(np.concatenate(lengths))
    at = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(length, 0)])
    return length, at, torch.from_numpy(np.concatenate(unique)), torch.from_numpy(np.concatenate(inverse))


def _sharded(work: Work, world: World, way: str, dedup: bool) -> Lookup:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [table.name for table in work.settings]
    collection = EmbeddingCollection(
        device=torch.device("meta"),
        tables=[EmbeddingConfig(work.rows, work.dim, name=name, feature_names=[name]) for name in names],
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR}, use_index_dedup=dedup
    )
    node = world.node_size
    places = [i % world.nodes * node + i // world.nodes % node for i in range(len(names))]
    kinds = {
        name: row_wise(compute_kernel="fused") if way == "row" else table_wise(rank=places[i], compute_kernel="fused")
        for i, name in enumerate(names)
    }
    plan = construct_module_sharding_plan(
        collection,
        per_param_sharding=kinds,
        sharder=sharder,
        local_size=node,
        world_size=world.size,
        device_type="cpu",
    )
    assert dist.group.WORLD is not None
    model = DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    lengths = torch.full((len(names) * work.batch,), work.length, dtype=torch.int64)

    def look_up(keys: Sequence[npt.NDArray[np.int64]]) -> list[Tensor]:
        values = torch.from_numpy(np.concatenate(keys))
        found: Any = model(KeyedJaggedTensor(names, values, lengths=lengths))
        return [found[name].values().view(work.batch, work.length, work.dim) for name in names]

    return look_up

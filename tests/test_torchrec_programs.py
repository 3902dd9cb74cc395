"""Programs written for TorchRec, on Hotrow's collections: what they do to a collection works, or says what to do."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():  # importing TorchRec without an accelerator warns of kernels that are not there
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("torchrec", reason="torchrec is not installed", exc_type=ImportError)
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist, tracing
    from torchrec.fx import Tracer
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

from hotrow import torchrec as ours
from hotrow.errors import CheckpointError, HotrowError, SettingsError
from hotrow.store.optimizers import SGD

ROWS = 6
KJT = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0, 1]))
WEIGHT = "ebc.embedding_bags.t.weight"


def bags(**settings: Any) -> ours.EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(ROWS, 2, name="t", feature_names=["a"])]
    tables += [EmbeddingBagConfig(ROWS, 2, name="u", feature_names=["b"])]
    return ours.EmbeddingBagCollection(tables, **{"optimizer": SGD(lr=0.5)} | settings)


class Model(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.ebc, self.over = bags(**settings), nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values())


def row(collection: Any, key: int, table: str = "t") -> Tensor:
    return collection.rows.read(table, torch.tensor([key]))[0]


def test_an_optimizer_in_backward_is_refused() -> None:
    model = Model()
    for module in (model, model.ebc):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(
                SettingsError, match=r"no apply_optimizer_in_backward.*optimizer=RowWiseAdagrad.*step\(\)"
            ):
                apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    names = {name: p.requires_grad for name, p in model.named_parameters()}
    assert names.pop("ebc.embedding_bags.t.weight") is False and names.pop("ebc.embedding_bags.u.weight") is False
    assert names == {"over.weight": True, "over.bias": True}
    sequences = ours.EmbeddingCollection([EmbeddingConfig(ROWS, 2, name="t")])
    assert [name for name, _ in sequences.named_parameters()] == ["embeddings.t.weight"]


def test_the_tables_optimizer_stands_in_a_combined_one_with_a_rate_that_can_be_set() -> None:
    model = Model()
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.1)
    )
    both = CombinedOptimizer([("tables", model.ebc.optimizer()), ("dense", dense)])
    assert {"tables.embedding_bags.t.weight", "dense.over.bias"} <= set(both.params)
    both.init_state()
    schedule = torch.optim.lr_scheduler.ExponentialLR(model.ebc.optimizer(), gamma=0.5)
    assert [group["lr"] for group in both.param_groups] == [0.5, 0.5, 0.1]
    for rate in (0.5, 0.25):
        before, other, bias = row(model.ebc, 1), row(model.ebc, 3, "u"), model.over.bias.detach().clone()
        weight = model.over.weight.detach().clone()
        both.zero_grad()
        model(KJT)[0].sum().backward()
        both.step()
        torch.testing.assert_close(row(model.ebc, 1), before - rate * weight[0, :2])
        assert torch.equal(row(model.ebc, 3, "u"), other)
        assert not torch.equal(model.over.bias, bias)
        schedule.step()
    both.load_state_dict(both.state_dict())

    model.ebc.optimizer().param_groups[0]["lr"] = 0.0
    before, other = row(model.ebc, 1), row(model.ebc, 3, "u")
    model(KJT).sum().backward()
    model.ebc.step()
    assert torch.equal(row(model.ebc, 1), before) and not torch.equal(row(model.ebc, 3, "u"), other)
    model.ebc.optimizer().param_groups[1]["lr"] = float("nan")
    with pytest.raises(SettingsError, match="Table u: the learning rate was set to nan"):
        model.ebc.step()


def test_a_gradient_scaler_steps_the_tables() -> None:
    model, scaler = Model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight, before = model.over.weight.detach().clone(), row(model.ebc, 1)
    scaler.scale(model(KJT)[0].sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(model.ebc.optimizer())
    scaler.update()
    torch.testing.assert_close(row(model.ebc, 1), before - 0.5 * weight[0, :2])
    scaler.scale(model(KJT)[0].sum()).backward()
    model.ebc.step(scaler)
    scaler.update()
    torch.testing.assert_close(row(model.ebc, 1), before - 2 * 0.5 * weight[0, :2])


def test_forwards_without_a_step_are_said_and_bounded() -> None:
    model = Model()
    with (
        pytest.warns(UserWarning, match="no step has applied"),
        pytest.raises(HotrowError, match="no step has applied"),
    ):
        for _ in range(300):
            model(KJT).sum().backward()


def gather(state: dict[str, Any], into: dict[str, Any]) -> None:
    """What `ShardedTensor.gather(out=...)` does: each shard into a view of the whole."""
    for name, weight in state.items():
        for begin in range(0, len(weight), 4):
            into[name].narrow(0, begin, min(4, len(weight) - begin)).copy_(weight[begin : begin + 4])


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy": lambda w, given: w.copy_(given),
    "whole": lambda w, given: w.__setitem__(slice(None), given),
    "rows": lambda w, given: [w.__setitem__(i, given[i]) for i in range(len(given))],
    "columns": lambda w, given: [w[:, i].copy_(given[:, i]) for i in range(given.shape[1])],
    "data": lambda w, given: w.data.copy_(given),
    "detached": lambda w, given: w.detach().zero_().add_(given),
    "flat": lambda w, given: w.view(-1).copy_(given.reshape(-1)),
    "out": lambda w, given: torch.add(given, 0, out=w),
    "split": lambda w, given: [part.copy_(g) for part, g in zip(w.split(4), given.split(4), strict=True)],
    "transposed": lambda w, given: w.t().copy_(given.t()),
    "index": lambda w, given: w.index_copy_(0, torch.arange(len(given)), given),
    "foreach": lambda w, given: torch._foreach_copy_([w], [given]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_into_a_state_dict_is_written_to_the_rows(write: Callable[[Tensor, Tensor], Any]) -> None:
    model, given = Model(), torch.randn(ROWS, 2)
    write(model.state_dict()[WEIGHT], given)
    assert torch.equal(model.ebc.rows.read("t", torch.arange(ROWS)), given)
    assert torch.equal(model.state_dict()[WEIGHT], given)


def test_memory_that_is_shared_past_torch_cannot_be_written() -> None:
    model = Model()
    weight = model.state_dict()[WEIGHT]
    for array in (weight.numpy(), np.asarray(weight), weight.detach().cpu().numpy()):
        assert torch.equal(torch.tensor(array), weight.clone())
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(BufferError, match=r"give a clone"):
        torch.from_dlpack(weight)


def test_gathering_in_place_leaves_a_model_trained() -> None:
    trained, fresh = Model(), Model(seed=7)
    for _ in range(3):
        trained(KJT).sum().backward()
        trained.ebc.step()
    gather(trained.state_dict(), fresh.state_dict())
    assert torch.equal(fresh(KJT), trained(KJT))


def test_only_rows_that_were_written_are_touched() -> None:
    collection = bags()
    stale = collection.state_dict()["embedding_bags.t.weight"]
    collection(KJT).values().sum().backward()
    collection.step()
    trained = row(collection, 1)
    stale[4] = 1.0
    assert torch.equal(row(collection, 1), trained) and row(collection, 4).tolist() == [1, 1]
    assert collection.rows.stats()["t"]["rows"] == 3


def test_copies_and_files_of_a_state_dict_are_plain_tensors() -> None:
    collection = bags()
    state = collection.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    weight = state["embedding_bags.t.weight"]
    plain = [
        torch.load(file, weights_only=True)["embedding_bags.t.weight"],
        copy.deepcopy(state)["embedding_bags.t.weight"],
    ]
    plain += [weight.clone(), weight * 1, weight.bfloat16().float(), torch.from_numpy(weight.numpy().copy())]
    before = row(collection, 1)
    for one in plain:
        assert type(one) is Tensor
        one.zero_()
    assert torch.equal(row(collection, 1), before) and weight.tolist() and "tensor(" in repr(weight)


def test_tables_made_on_meta_are_there_when_used() -> None:
    meta = bags(device=torch.device("meta"))
    with torch.device("meta"):
        inside = bags()
    for collection in (meta, inside):
        assert torch.equal(collection(KJT).values(), bags()(KJT).values())
    model = Model(device="meta").to_empty(device="cpu")
    assert model(KJT).shape == (2, 1)
    with pytest.raises(SettingsError, match="no apply_optimizer_in_backward"):
        torch.distributed.optim._apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1})


def test_a_copy_has_rows_and_an_optimizer_of_its_own() -> None:
    model = Model()
    model.ebc.optimizer().param_groups[0]["lr"] = 0.25
    other = copy.deepcopy(model)
    before = row(model.ebc, 1)
    weight = other.over.weight.detach().clone()
    other(KJT)[0].sum().backward()
    other.ebc.optimizer().step()
    assert torch.equal(row(model.ebc, 1), before)
    torch.testing.assert_close(row(other.ebc, 1), before - 0.25 * weight[0, :2])
    with pytest.raises(CheckpointError, match="not pickled"):
        pickle.dumps(model)


@pytest.mark.parametrize("tracer", [torch.fx.Tracer, Tracer, tracing.Tracer])
def test_a_model_is_traced_with_its_collection_as_a_leaf(tracer: Any) -> None:
    model = Model()
    graph = tracer().trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["ebc", "over"]
    assert torch.equal(torch.fx.GraphModule(model, graph)(KJT), model(KJT))


def test_a_model_is_compiled_around_its_collection() -> None:
    model = Model()
    compiled, before = torch.compile(model, backend="eager"), row(model.ebc, 1)
    out = compiled(KJT)
    torch.testing.assert_close(out, model(KJT))
    out.sum().backward()
    model.ebc.step()
    assert not torch.equal(row(model.ebc, 1), before)


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Model()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    for use in (bags, lambda: before(KJT)):
        with pytest.raises(SettingsError, match=r"one process: each of the 2 ranks.*World.here\(\)"):
            use()


class WithLoss(nn.Module):
    """As TorchRec's pipelines want a model: a loss, and what else it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.model(features)
        return out.sum(), out.detach()


@pytest.mark.parametrize("pipeline", [TrainPipelineBase, TrainPipelineSparseDist])
def test_one_rank_trains_in_torchrecs_pipelines_as_by_hand(tmp_path: Path, pipeline: Any) -> None:
    torch.manual_seed(0)
    plain = WithLoss()
    expected = copy.deepcopy(plain)
    sgd = torch.optim.SGD(expected.model.over.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        expected(KJT)[0].backward()
        sgd.step()
        expected.model.ebc.step()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel = DistributedModelParallel(plain, device=torch.device("cpu"))
            learned = {name: p for name, p in parallel.named_parameters() if p.requires_grad}
            rest = KeyedOptimizerWrapper(learned, lambda params: torch.optim.SGD(params, lr=0.1))
            both = CombinedOptimizer([("tables", plain.model.ebc.optimizer()), ("dense", rest)])
            running, batches = pipeline(parallel, both, torch.device("cpu")), iter([KJT] * 3)
            for _ in range(3):
                running.progress(batches)
    finally:
        dist.destroy_process_group()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[name], weight)

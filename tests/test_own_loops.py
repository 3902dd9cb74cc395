"""A user's own loop around a module that holds `Embeddings`: state dicts, copies, scalers, compilers, tracers."""

import contextlib
import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import CheckpointError, HotrowError
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import SGD, Adam, Optimizer
from hotrow.table import ByCount, Fill

KEYS = torch.tensor([1, 2, 3])
BATCH = Batch.plain({"t": KEYS})


class Model(nn.Module):
    """A layer over a table of two values a row."""

    def __init__(self, optimizer: Optimizer | None = None, seed: int = 0) -> None:
        super().__init__()
        table = Table(name="t", dim=2, optimizer=optimizer or SGD(lr=0.5), admission=ByCount(count=2))
        self.rows = Embeddings([table], [Feature(name="t")], seed=seed)
        self.over = nn.Linear(2, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.over(self.rows(batch).vectors())


def trained(steps: int, optimizer: Optimizer | None = None) -> Model:
    model = Model(optimizer)
    for _ in range(steps):
        model(BATCH).sum().backward()
        model.rows.step()
    return model


def read(model: Model) -> Tensor:
    return model.rows.read("t", KEYS)


def saved(model: Model) -> dict[str, Tensor]:
    """A state dict as it comes back from a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state: dict[str, Tensor] = torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize("use", ["forward", "read", "snapshot", "evaluate"])
def test_weights_beside_rows_they_were_not_trained_with_are_refused(tmp_path: Path, use: str) -> None:
    other = Model()
    other.load_state_dict(saved(trained(3)))
    uses = {
        "forward": lambda: other(BATCH),
        "read": lambda: read(other),
        "snapshot": lambda: other.rows.snapshot(tmp_path / "rows"),
        "evaluate": lambda: other.eval()(BATCH),
    }
    with pytest.raises(CheckpointError, match=r"weights of step 3, .* of step 0.*restore\(folder\).*strict=False"):
        uses[use]()


@pytest.mark.parametrize("rows_first", [True, False])
def test_weights_and_rows_come_back_in_either_order(tmp_path: Path, rows_first: bool) -> None:
    model = trained(3)
    model.rows.snapshot(tmp_path / "rows").write()
    state, other = saved(model), Model()
    if rows_first:
        other.rows.restore(tmp_path / "rows")
    other.load_state_dict(state)
    if not rows_first:
        other.rows.restore(tmp_path / "rows")
    assert torch.equal(other(BATCH), model(BATCH))
    other(BATCH).sum().backward()
    other.rows.step()
    other.load_state_dict(saved(other))
    assert other(BATCH).shape == (3, 1)


def test_rows_of_another_step_or_training_are_refused(tmp_path: Path) -> None:
    model = trained(3)
    state = saved(model)
    same_step = trained(3)
    same_step.load_state_dict(state)
    with pytest.raises(CheckpointError, match="weights of step 3"):
        same_step(BATCH)

    model(BATCH).sum().backward()
    model.rows.step()
    model.rows.snapshot(tmp_path / "later").write()
    model.load_state_dict(state)
    with pytest.raises(CheckpointError, match="of step 4"):
        model(BATCH)
    other = Model()
    other.load_state_dict(state)
    other.rows.restore(tmp_path / "later")
    with pytest.raises(CheckpointError, match="of step 4"):
        other(BATCH)


def test_weights_alone_can_be_had_and_untrained_rows_are_the_same() -> None:
    Model().load_state_dict(saved(model := Model()))
    other = Model()
    other.load_state_dict(saved(model))
    other(BATCH)
    state = saved(trained(3))
    assert state.pop("rows._extra_state").dtype == torch.int64
    other.load_state_dict(state, strict=False)
    other(BATCH)
    another_seed = Model(seed=1)
    another_seed.load_state_dict(saved(Model()))
    with pytest.raises(CheckpointError, match="weights of step 0"):
        another_seed(BATCH)


def test_a_copy_has_rows_of_its_own_that_train_on_alike() -> None:
    model = trained(3, Adam(lr=0.1))
    once = Batch.plain({"t": torch.tensor([9])})
    model(once)  # looked up once: a row at the second time
    other = copy.deepcopy(model)
    assert torch.equal(read(other), read(model)) and other.rows.steps == 3
    before = read(model)
    for batch in (BATCH, once):
        other(batch).sum().backward()
        other.rows.step()
    assert torch.equal(read(model), before)
    for batch in (BATCH, once):
        model(batch).sum().backward()
        model.rows.step()
    assert torch.equal(read(other), read(model)) and not torch.equal(read(model), before)
    assert other.rows.stats()["t"]["rows"] == model.rows.stats()["t"]["rows"] == 4
    other.load_state_dict(saved(other))
    other.eval()(BATCH)


def test_rows_that_cannot_be_copied_or_pickled_say_what_to_do() -> None:
    model = Model()
    for dump in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(CheckpointError, match=r"not pickled.*snapshot\(folder\).*restore\(folder\)"):
            dump(model)
    table = Table(name="t", dim=2)
    plan = Plan({"t": (Share("device", KEYS.numpy()), Share("host"))})
    with pytest.raises(HotrowError, match=r"rows on device, host cannot be copied.*snapshot\(folder\)"):
        copy.deepcopy(Embeddings([table], [Feature(name="t")], plan=plan))


def test_a_model_over_rows_is_traced_and_compiled_around_them() -> None:
    model = trained(3)
    expected = model(BATCH)
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["rows", "over"]
    assert torch.equal(graph(BATCH), expected)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(BATCH), expected)
    before = read(model)
    compiled(BATCH).sum().backward()
    model.rows.step()
    assert not torch.equal(read(model), before)


class Scaled:
    """A row of zeros under a scaled loss; what a loss of `value` times the row does to it."""

    def __init__(self, **settings: object) -> None:
        table = Table(name="t", dim=2, optimizer=SGD(lr=0.5), init=Fill(value=0.0))
        self.rows = Embeddings([table], [Feature(name="t")], **settings)  # type: ignore[arg-type]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

    def backward(self, value: float) -> None:
        self.scaler.scale((self.rows(BATCH).vectors() * value).sum()).backward()

    def row(self) -> list[float]:
        return self.rows.read("t", KEYS)[0].tolist()


PLANS = {"host": {}, "device": {"plan": Plan({"t": (Share("device", KEYS.numpy()[:1]), Share("host"))})}}


@pytest.mark.parametrize("where", PLANS.values(), ids=PLANS)
def test_gradients_are_unscaled_and_steps_that_overflow_left_out(where: dict[str, Plan]) -> None:
    ours = Scaled(**where)
    ours.backward(3.0)
    ours.rows.step(ours.scaler)
    ours.scaler.update()
    assert ours.row() == [-1.5, -1.5] and ours.scaler.get_scale() == 1024
    for _ in range(2):
        ours.backward(1e37)  # infinite once scaled, in rows alone
        ours.rows.step(ours.scaler)
        ours.scaler.update()
    assert ours.row() == [-1.5, -1.5] and ours.scaler.get_scale() == 256 and ours.rows.steps == 1
    ours.backward(1.0)
    ours.backward(1.0)
    ours.rows.step(ours.scaler)
    ours.scaler.update()
    assert ours.row() == [-2.5, -2.5]


@pytest.mark.parametrize("where", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("given", [{"device": "meta"}, {}], ids=["given", "around"])
def test_rows_made_on_meta_are_there_when_used(given: dict[str, str], where: dict[str, Plan]) -> None:
    with contextlib.nullcontext() if given else torch.device("meta"):
        ours = Scaled(**given, **where)
    ours.backward(3.0)
    ours.rows.step(ours.scaler)
    assert ours.row() == [-1.5, -1.5]


def test_gradients_that_were_given_to_backward_are_not_unscaled_in_place() -> None:
    ours = Scaled()
    given = torch.full((3, 2), 1024.0)
    ours.scaler.scale(torch.zeros(()))  # which makes the scale
    ours.rows(BATCH).vectors().backward(given)
    ours.rows.step(ours.scaler)
    assert ours.row() == [-0.5, -0.5] and given.unique().tolist() == [1024.0]


def test_a_scaler_that_step_is_not_told_of_is_refused() -> None:
    ours = Scaled()
    ours.backward(3.0)
    with pytest.raises(HotrowError, match=r"scale 1024:.*Call step\(scaler\).*before scaler.update\(\)"):
        ours.rows.step()
    assert ours.row() == [0, 0]
    ours.rows.step(ours.scaler)
    assert ours.row() == [-1.5, -1.5]
    ours.rows(BATCH).vectors().sum().backward()
    ours.rows.finish().apply()  # whose loss is not scaled
    assert ours.row() == [-2, -2]


def test_scalers_are_found_whenever_they_are_made_and_not_when_they_are_gone_or_off() -> None:
    ours = Scaled()
    for enabled in (False, True):
        ours.scaler = torch.amp.GradScaler("cpu", enabled=False)
        for told in (None, ours.scaler):
            ours.backward(1.0)
            ours.rows.step(told)
        del told
        ours.scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        ours.backward(1.0)
        if enabled:
            with pytest.raises(HotrowError, match=r"Call step\(scaler\)"):
                ours.rows.step()
        else:
            ours.rows.step()
    assert ours.row() == [-2.5, -2.5]

"""The dense optimizer: PyTorch's own, with a rate from the step count and state that can be saved."""

import pytest
import torch
from torch import nn

from hotrow.errors import CheckpointError
from hotrow.schedule import Linear
from hotrow.train.dense import DenseAdagrad, DenseAdam, DenseAdamW, DenseMomentum, DenseSGD, DenseStep

SETTINGS = [
    DenseSGD(lr=0.1),
    DenseMomentum(lr=0.1, nesterov=True),
    DenseAdagrad(lr=0.1, initial=0.1),
    DenseAdam(lr=0.1, weight_decay=0.01),
    DenseAdamW(lr=0.1),
]


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def make_steps(net, dense, first, count):
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(i)
        net(torch.randn(5, 3, generator=generator)).square().mean().backward()
        dense.step()


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.name)
def test_a_saved_and_loaded_optimizer_goes_on_bit_for_bit(settings):
    settings = settings.model_copy(update={"schedule": Linear(steps=10, warmup=2)})
    whole = model()
    make_steps(whole, DenseStep(whole, settings), 0, 6)

    first = model()
    dense = DenseStep(first, settings)
    make_steps(first, dense, 0, 3)
    second = model()
    second.load_state_dict(first.state_dict())
    loaded = DenseStep(second, settings)
    loaded.load(dense.state())
    assert loaded.steps == 3
    make_steps(second, loaded, 3, 3)
    assert torch.equal(weights(second), weights(whole))


def test_saved_state_does_not_change_when_training_goes_on():
    net = model()
    dense = DenseStep(net, DenseAdam())
    make_steps(net, dense, 0, 1)
    state = dense.state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    make_steps(net, dense, 1, 2)
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_the_gradient_norm_is_held():
    net = model()
    dense = DenseStep(net, DenseSGD(lr=1.0, clip_norm=0.001))
    before = weights(net)
    make_steps(net, dense, 0, 1)
    assert float((weights(net) - before).norm()) == pytest.approx(0.001, rel=1e-3)


def test_the_learning_rate_follows_the_schedule():
    net = model()
    dense = DenseStep(net, DenseSGD(lr=1.0, schedule=Linear(steps=4, final=0.0)))
    rates = []
    for i in range(4):
        rates.append(dense.lr)
        make_steps(net, dense, i, 1)
    assert rates == [1.0, 0.75, 0.5, 0.25]


def test_state_for_another_model_is_refused():
    net = model()
    dense = DenseStep(net, DenseAdam())
    make_steps(net, dense, 0, 1)
    other = DenseStep(nn.Linear(3, 1), DenseAdam())
    with pytest.raises(CheckpointError, match=r'optimizer state for "0\.weight"'):
        other.load(dense.state())

"""One forward and its gradient: layouts, failures, and what is let go of."""

import gc
import weakref

import pytest
import torch
from torch import nn

import eata
from eata.passes import Runner
from eata.rows import batchnorm


class Layout(nn.Module):
    """Notes whether images come pixel by pixel."""

    def __init__(self, net):
        super().__init__()
        self.net, self.seen = net, []

    def forward(self, x):
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
        return self.net(x)


def three_channels(net):
    net[0] = nn.Conv2d(3, 8, 3, padding=1)
    return net


def test_a_batch_of_a_wrong_shape_does_not_change_the_layout_of_later_ones(trained):
    torch.manual_seed(0)
    net = Layout(three_channels(trained()))
    model = eata.Tent(net, lr=0.01)
    with pytest.raises(eata.InputError):
        model(torch.randn(4, 2, 8, 8))
    net.seen.clear()
    model(torch.randn(4, 3, 8, 8))
    assert net.seen == [True]


def test_a_net_that_needs_the_usual_layout_gets_it(trained):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(3 * 16), nn.Linear(3 * 16, 2)

        def forward(self, x):
            return self.head(self.norm(x.view(len(x), -1)))

    model = eata.Tent(Views(), lr=0.01)
    for _ in range(2):
        assert model(torch.randn(4, 3, 4, 4)).shape == (4, 2)
    assert model.stats.steps == 2


def test_a_failure_while_rows_are_chosen_gives_the_full_gradient(trained, stream, monkeypatch):
    def broken(*arguments):
        raise ArithmeticError("singular")

    monkeypatch.setattr(batchnorm, "stand_ins", broken)
    settings = {"e0": 0.5, "epsilon": 1.0, "lr": 0.01}
    rows, full = eata.ETA(trained(), backward="rows", **settings), eata.ETA(trained(), backward="full", **settings)
    first, second = stream([32, 32])
    with pytest.warns(UserWarning, match="row-sparse backward does not work"):
        rows(first)
    full(first)
    torch.testing.assert_close(list(rows.parameters.values()), list(full.parameters.values()), atol=1e-6, rtol=1e-5)
    rows(second)  # no further warning
    assert rows.stats.steps == 2


@pytest.mark.parametrize("e0", [1e-9, 1.0])
def test_nothing_of_a_batch_is_kept_after_it(e0, trained, stream, monkeypatch):
    """Neither by a cycle nor by the engine: memory has to be free before the collector runs."""
    seen = []
    call = Runner.__call__

    def spy(self, *arguments, **named):
        batch = call(self, *arguments, **named)
        seen.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(Runner, "__call__", spy)
    model = eata.ETA(trained(), e0=e0, epsilon=1.0, lr=0.01)
    x = stream([16])[0]
    inner = weakref.ref(x)
    gc.disable()
    try:
        model(x)
        del x
        assert [reference() for reference in seen] == [None]
        assert inner() is None
    finally:
        gc.enable()
    assert model.stats.steps == (e0 == 1.0)


def test_a_gradient_is_taken_once(trained, stream):
    model = eata.Tent(trained(), lr=0.01)
    x = eata.Inputs(stream([8])[0])
    batch = model.forward(x, grad=True)
    batch.gradients(torch.arange(8), lambda z: z.sum())
    for spent in (batch, model.forward(x)):
        with pytest.raises(RuntimeError, match="no gradient"):
            spent.gradients(torch.arange(8), lambda z: z.sum())


def test_features_are_the_input_of_the_last_linear_layer(trained, stream):
    net = trained()
    x = stream([8])[0]

    class Watching(eata.Source):
        needs_features = True

        def answer(self, batch):
            return net[-1](batch.features)

    model = Watching(net)
    torch.testing.assert_close(model(x), net(x))
    with pytest.raises(eata.EataError, match="No linear layer"):
        Watching(nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()))(x)

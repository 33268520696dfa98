"""The public hooks are enough: SAR, DeYO, ROID and CoTTA sketched from their rules, without touching the loop.

Sketches, not the methods: each does the part of its rules that needs a hook, and is checked against plain PyTorch.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eata
from eata import functional

E0 = 0.6


class SAR(eata.GradientAdapter):
    """Climb along the gradient of reliable samples; step by the gradient found there."""

    def select(self, batch):
        reliable = functional.entropy(batch.logits) < E0 * math.log(batch.logits.shape[1])
        return eata.Choice.of(reliable, torch.ones_like(batch.logits[:, 0]), reliable)

    def update(self, batch, choice):
        first = self.gradients(batch, choice)
        norm = torch.stack([g.norm() for g in first]).norm()
        climb = [0.05 * g / (norm + 1e-12) for g in first]
        with torch.no_grad():
            for parameter, up in zip(self.parameters.values(), climb, strict=True):
                parameter.add_(up)
        again = self.forward(batch.inputs, grad=True)
        second = again.gradients(choice.index, lambda logits: self.loss(logits, again, choice))
        with torch.no_grad():
            for parameter, up in zip(self.parameters.values(), climb, strict=True):
                parameter.sub_(up)
        return self.step(second, 2 * choice.count)


class DeYO(eata.GradientAdapter):
    """Keep samples whose prediction falls when the image is destroyed: select looks at the input."""

    def select(self, batch):
        p = functional.probabilities(batch.logits)
        label = p.argmax(1, keepdim=True)
        turned = self.forward(batch.inputs.with_images(batch.inputs.images.flip(2))).logits
        drop = (p.gather(1, label) - functional.probabilities(turned).gather(1, label))[:, 0]
        kept = drop > 0.05
        return eata.Choice.of(kept, drop.exp(), kept)


class ROID(eata.GradientAdapter):
    """Two passes alive at once, another loss, weights pulled to the source, another answer."""

    def __init__(self, net, **shared):
        super().__init__(net, **shared)
        self.remember("prior_seen", None)

    def loss(self, logits, batch, choice):
        p = logits.softmax(1).clamp(max=0.99)
        return -(p * (p / (1 - p) + 1e-5).log()).sum() / choice.count

    def update(self, batch, choice):
        view = self.forward(batch.inputs.with_images(batch.inputs.images.flip(3)), grad=True)
        here, there = batch.logits.softmax(1), view.logits.softmax(1)

        def consistency(p, q):
            return -((p * q.log()).sum() + (q * p.log()).sum()) / (2 * choice.count)

        ours = batch.gradients(choice.index, lambda z: self.loss(z, batch, choice) + consistency(z.softmax(1), there))
        theirs = view.gradients(choice.index, lambda z: consistency(here, z.softmax(1)))
        return self.step(tuple(a + b for a, b in zip(ours, theirs, strict=True)), choice.count)

    def after_step(self, batch, choice):
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.lerp_(self.source[name], 0.01)
        self.prior_seen = batch.logits.softmax(1).mean(0)

    def answer(self, batch):
        prior = batch.logits.softmax(1).mean(0)
        return batch.logits * (prior + 0.1) / (1 + 0.1 * len(prior))


class CoTTA(eata.GradientAdapter):
    """All parameters, a teacher, stochastic restore, the teacher's answer."""

    def __init__(self, net, **shared):
        super().__init__(net, **shared)
        self.remember("teacher", {name: p.detach().clone() for name, p in self.parameters.items()})
        self.remember("generator", torch.Generator().manual_seed(0))

    def free_parameters(self, net, layers):
        return dict(net.named_parameters())

    def loss(self, logits, batch, choice):
        with self.using(self.teacher):
            batch.notes["target"] = self.forward(batch.inputs).logits
        return F.cross_entropy(logits, batch.notes["target"].softmax(1))

    def after_step(self, batch, choice):
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.teacher[name].lerp_(parameter, 0.1)
                back = torch.rand(parameter.shape, generator=self.generator) < 0.01
                parameter.copy_(torch.where(back, self.source[name], parameter))

    def answer(self, batch):
        return batch.notes.get("target", batch.logits)


def by_batch(net):
    """PyTorch's own way to batch statistics: training mode of the layers, buffers left alone."""
    net = copy.deepcopy(net).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.momentum = 0.0
    return net


def affine(net):
    return [p for m in net.modules() if isinstance(m, nn.BatchNorm2d) for p in (m.weight, m.bias)]


def assert_same_weights(model, net):
    torch.testing.assert_close(list(model.parameters.values()), [p.detach() for p in affine(net)])


def test_sar_two_gradients_one_step(trained, stream):
    (x,) = stream([24], torch.float64)
    net = trained("bn", torch.float64)
    plain = by_batch(net)
    model = SAR(net, optimizer=lambda p: torch.optim.SGD(p, 0.1), backward="full")
    model(x)
    parameters = affine(plain)
    logits = plain(x)
    reliable = functional.entropy(logits) < E0 * math.log(10)
    assert 0 < reliable.sum() < 24
    first = torch.autograd.grad(functional.entropy(logits)[reliable].mean(), parameters)
    norm = sum(g.square().sum() for g in first).sqrt()
    with torch.no_grad():
        for p, g in zip(parameters, first, strict=True):
            p += 0.05 * g / norm
    second = torch.autograd.grad(functional.entropy(plain(x))[reliable].mean(), parameters)
    with torch.no_grad():
        for p, up, g in zip(parameters, first, second, strict=True):
            p += -0.05 * up / norm - 0.1 * g
    assert_same_weights(model, plain)
    assert (model.stats.forwards, model.stats.backwards) == (48, 2 * int(reliable.sum()))


def test_deyo_selects_by_the_input(trained, stream):
    (x,) = stream([24], torch.float64)
    net = trained("bn", torch.float64)
    plain = by_batch(net)
    model = DeYO(net, optimizer=lambda p: torch.optim.SGD(p, 0.1), backward="full")
    model(x)
    p, q = plain(x).softmax(1), plain(x.flip(2)).softmax(1)
    drop = (p.max(1).values - q[range(24), p.argmax(1)]).detach()
    kept = drop > 0.05
    assert 0 < kept.sum() < 24
    loss = (drop.exp() * functional.entropy(plain(x)))[kept].mean()
    for parameter, g in zip(affine(plain), torch.autograd.grad(loss, affine(plain)), strict=True):
        parameter.data -= 0.1 * g
    assert_same_weights(model, plain)


def test_roid_joins_the_gradients_of_two_passes(trained, stream):
    (x,) = stream([24], torch.float64)
    net = trained("bn", torch.float64)
    plain = by_batch(net)
    source = [p.detach().clone() for p in affine(plain)]
    model = ROID(net, optimizer=lambda p: torch.optim.SGD(p, 0.1), backward="full")
    answer = model(x)
    p, q = plain(x).softmax(1), plain(x.flip(3)).softmax(1)
    clipped = p.clamp(max=0.99)
    loss = -(clipped * (clipped / (1 - clipped) + 1e-5).log()).sum() / 24
    loss = loss - ((p * q.log()).sum() + (q * p.log()).sum()) / 48
    for parameter, old, g in zip(affine(plain), source, torch.autograd.grad(loss, affine(plain)), strict=True):
        parameter.data = 0.99 * (parameter.data - 0.1 * g) + 0.01 * old
    assert_same_weights(model, plain)
    assert not torch.equal(answer, model.forward(eata.Inputs(x)).logits)
    torch.testing.assert_close(model.prior_seen, p.mean(0).detach())


def test_cotta_teaches_and_answers_as_the_teacher(trained, stream):
    batches = stream([24] * 4, torch.float64)
    model = CoTTA(trained("bn", torch.float64), optimizer=lambda p: torch.optim.Adam(p, 1e-3))
    for x in batches:
        teacher = {name: value.clone() for name, value in model.teacher.items()}
        answer = model(x)
        plain = by_batch(model.net)
        plain.load_state_dict({**plain.state_dict(), **teacher})
        torch.testing.assert_close(answer, plain(x).detach())
    assert any(not torch.equal(value, model.source[name]) for name, value in model.teacher.items())


@pytest.mark.parametrize("kind", [SAR, DeYO, ROID, CoTTA])
def test_a_new_method_resets_saves_resumes_and_fits_a_window(kind, trained, stream, tmp_path):
    batches = stream([16] * 6)
    model = kind(trained(), lr=0.01)
    fresh = [model(x) for x in batches]
    model.reset()
    for x, first in zip(batches[:3], fresh, strict=False):
        assert torch.equal(model(x), first)
    model.save(tmp_path / "state")
    other = kind(trained(), lr=0.01)
    other.load(tmp_path / "state")
    for x, first in zip(batches[3:], fresh[3:], strict=True):
        assert torch.equal(other(x), first)
    window = eata.Window(kind(trained(), lr=0.01), length=8)
    for image in batches[0]:
        assert window(image[None]).shape == (1, 10)
    assert window.stats.steps >= 1

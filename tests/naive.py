"""The paper's step written out with loops over samples, from eata.tex and facts.md. Shares no code with src."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    exps = [math.exp(v - top) for v in row]
    return [e / sum(exps) for e in exps]


def entropy(row: list[float]) -> float:
    return -sum(p * math.log(p) for p in softmax(row) if p > 0)


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b)))


class Naive:
    """Tent, ETA and EATA by turns: ``filters`` switches selection on, ``fisher`` the penalty."""

    def __init__(self, net, lr, filters=None, fisher=None, beta=0.0):
        self.net = copy.deepcopy(net)
        self.net.eval()
        self.parameters = {}
        for name, module in self.net.named_modules():
            if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)):
                if isinstance(module, nn.BatchNorm2d):
                    module.train()  # PyTorch's own way to use the batch's statistics
                    module.momentum = 0.0
                self.parameters[name + ".weight"] = module.weight
                self.parameters[name + ".bias"] = module.bias
        self.source = {k: v.detach().clone() for k, v in self.parameters.items()}
        self.velocity = {}
        self.lr, self.filters, self.fisher, self.beta = lr, filters, fisher, beta
        self.average = None
        self.forwards = self.backwards = self.reliable = self.steps = 0
        self.selected_per_batch = []

    def select(self, rows):
        """[(position, weight)] of the samples that count."""
        if self.filters is None:
            return [(i, 1.0) for i in range(len(rows))], len(rows)
        e0, epsilon, alpha = self.filters
        threshold = e0 * math.log(len(rows[0]))
        reliable = [i for i, row in enumerate(rows) if entropy(row) < threshold]
        chosen = []
        for i in reliable:
            if self.average is None or abs(cosine(softmax(rows[i]), self.average)) < epsilon:
                chosen.append((i, math.exp(threshold - entropy(rows[i]))))
        if chosen:
            classes = len(rows[0])
            mean = [sum(softmax(rows[i])[c] for i, _ in chosen) / len(chosen) for c in range(classes)]
            if self.average is None:
                self.average = mean
            else:
                self.average = [alpha * new + (1 - alpha) * old for new, old in zip(mean, self.average, strict=True)]
        return chosen, len(reliable)

    def __call__(self, x):
        logits = self.net(x)
        chosen, reliable = self.select(logits.detach().double().tolist())
        self.forwards += len(x)
        self.reliable += reliable
        self.selected_per_batch.append(len(chosen))
        if chosen:
            self.backwards += len(chosen)
            self.steps += 1
            loss = 0.0
            for i, weight in chosen:
                p = torch.softmax(logits[i], 0)
                loss = loss + weight * -(p * torch.log(p + 1e-300 if p.dtype == torch.float64 else p)).sum()
            loss = loss / len(chosen)
            if self.fisher is not None:
                for name, theta in self.parameters.items():
                    loss = loss + self.beta * (self.fisher[name] * (theta - self.source[name]) ** 2).sum()
            self.net.zero_grad()
            loss.backward()
            with torch.no_grad():
                for name, theta in self.parameters.items():
                    self.velocity[name] = 0.9 * self.velocity.get(name, 0.0) + theta.grad
                    theta -= self.lr * self.velocity[name]
        return logits.detach()


def fisher_of_batches(net, images, size=64):
    """Mean over batches of the squared gradient of the batch-mean loss, batch statistics, pseudo labels."""
    reference = Naive(net, lr=0.0)
    total, count = dict.fromkeys(reference.parameters, 0.0), 0
    for start in range(0, len(images), size):
        logits = reference.net(images[start : start + size])
        loss = 0.0
        for row in logits:
            loss = loss - torch.log_softmax(row, 0)[row.argmax()] / len(logits)
        reference.net.zero_grad()
        loss.backward()
        count += 1
        for name, theta in reference.parameters.items():
            total[name] = total[name] + theta.grad**2
    return {name: value / count for name, value in total.items()}


def fisher_of_samples(net, images):
    """Eq. 9 to the letter: one sample at a time, source statistics, pseudo labels."""
    net = copy.deepcopy(net).eval()
    parameters = Naive(net, lr=0.0).parameters
    own = dict(net.named_parameters())
    total = dict.fromkeys(parameters, 0.0)
    for image in images:
        row = net(image[None])[0]
        net.zero_grad()
        (-torch.log_softmax(row, 0)[row.argmax()]).backward()
        for name in total:
            total[name] = total[name] + own[name].grad ** 2
    return {name: value / len(images) for name, value in total.items()}

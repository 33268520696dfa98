"""The methods since EATA written out with loops, from since.md. Shares no code with src.

Random numbers are drawn as the methods say (one generator, the same calls), everything made of them is made here.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from naive import cosine, entropy, softmax

NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)


def come(row: torch.Tensor) -> torch.Tensor:
    """COME's entropy of one row of logits."""
    length = torch.sqrt((row * row).sum())
    row = row / length * length.detach()
    total = sum(torch.exp(v) for v in row) + len(row)
    opinions = [torch.exp(v) / total for v in row] + [len(row) / total]
    return -sum((b + 1e-7) * torch.log(b + 1e-7) for b in opinions)


def shannon(row: torch.Tensor) -> torch.Tensor:
    p = torch.softmax(row, 0)
    return -(p * torch.log_softmax(row, 0)).sum()


class Naive:
    """A copy of a net with batch statistics, free parameters, and an optimizer of our own."""

    def __init__(self, net, lr, optimizer="sgd", fixed=(), everything=False, batch_statistics=True):
        self.net = copy.deepcopy(net)
        self.net.eval()
        self.parameters = {}
        for name, module in self.net.named_modules():
            if isinstance(module, nn.BatchNorm2d) and batch_statistics:
                module.train()
                module.momentum = 0.0
            if isinstance(module, NORMS) and name not in fixed:
                self.parameters[name + ".weight"] = module.weight
                self.parameters[name + ".bias"] = module.bias
        if everything:
            self.parameters = dict(self.net.named_parameters())
        self.source = {k: v.detach().clone() for k, v in self.parameters.items()}
        self.lr, self.optimizer = lr, optimizer
        self.forwards = self.backwards = self.reliable = self.steps = 0
        self.events = []
        self.fresh()

    def fresh(self):
        self.first, self.second, self.count = {}, {}, 0

    def back(self):
        with torch.no_grad():
            for k, v in self.parameters.items():
                v.copy_(self.source[k])
        self.fresh()

    def gradient(self, loss):
        self.net.zero_grad()
        loss.backward()
        return {k: torch.zeros_like(v) if v.grad is None else v.grad.clone() for k, v in self.parameters.items()}

    def descend(self, gradient):
        self.steps += 1
        self.count += 1
        with torch.no_grad():
            for k, v in self.parameters.items():
                g = gradient[k]
                if self.optimizer == "adam":
                    self.first[k] = 0.9 * self.first.get(k, 0.0) + 0.1 * g
                    self.second[k] = 0.999 * self.second.get(k, 0.0) + 0.001 * g * g
                    m = self.first[k] / (1 - 0.9**self.count)
                    s = self.second[k] / (1 - 0.999**self.count)
                    v -= self.lr * m / (torch.sqrt(s) + 1e-8)
                else:
                    self.first[k] = 0.9 * self.first.get(k, 0.0) + g
                    v -= self.lr * (g + 0.9 * self.first[k] if self.optimizer == "nesterov" else self.first[k])


class RDumb(Naive):
    def __init__(self, net, lr, e0, epsilon, every):
        super().__init__(net, lr)
        self.e0, self.epsilon, self.every, self.average, self.batches = e0, epsilon, every, None, 0

    def __call__(self, x):
        logits = self.net(x)
        rows = logits.detach().double().tolist()
        threshold = self.e0 * math.log(len(rows[0]))
        self.forwards += len(x)
        self.batches += 1
        chosen = []
        for i, row in enumerate(rows):
            if entropy(row) < threshold:
                self.reliable += 1
                if self.average is None or abs(cosine(softmax(row), self.average)) < self.epsilon:
                    chosen.append(i)
        self.events.append("empty" if not chosen else "step")
        if chosen:
            loss = sum(math.exp(threshold - entropy(rows[i])) * shannon(logits[i]) for i in chosen) / len(chosen)
            self.descend(self.gradient(loss))
            self.backwards += len(chosen)
            mean = [sum(softmax(rows[i])[c] for i in chosen) / len(chosen) for c in range(len(rows[0]))]
            old = self.average
            self.average = mean if old is None else [0.1 * n + 0.9 * o for n, o in zip(mean, old, strict=True)]
        if self.batches % self.every == 0:
            self.back()
            self.average = None
            self.events.append("reset")
        return logits.detach()


class SAR(Naive):
    def __init__(self, net, lr, e0, rho=0.05, recover=0.2, fixed=(), score=shannon, optimizer="sgd"):
        super().__init__(net, lr, optimizer, fixed)
        self.e0, self.rho, self.recover, self.score, self.average = e0, rho, recover, score, None

    def __call__(self, x):
        logits = self.net(x)
        threshold = self.e0 * math.log(logits.shape[1])
        reliable = [i for i in range(len(x)) if float(self.score(logits[i].detach())) < threshold]
        self.forwards += len(x)
        self.reliable += len(reliable)
        if not reliable:
            self.events.append("empty")
            return logits.detach()
        gradient = self.gradient(sum(self.score(logits[i]) for i in reliable) / len(reliable))
        length = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradient.values()))
        before = {k: v.detach().clone() for k, v in self.parameters.items()}
        with torch.no_grad():
            for k, v in self.parameters.items():
                v += self.rho * gradient[k] / (length + 1e-12)
        above = self.net(x)
        self.forwards += len(x)
        kept = [i for i in reliable if float(self.score(above[i].detach())) < threshold]
        loss = sum((self.score(above[i]) for i in kept), torch.zeros(())) / max(1, len(kept))
        gradient = self.gradient(loss) if kept else None
        with torch.no_grad():
            for k, v in self.parameters.items():
                v.copy_(before[k])
        if not kept:
            self.events.append("none kept")
            return logits.detach()
        self.descend(gradient)
        self.backwards += len(reliable) + len(kept)
        value = float(loss.detach())
        self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        self.events.append("step")
        if self.average < self.recover:
            self.back()
            self.average = None
            self.events.append("reset")
        return logits.detach()


def taken_apart(image, order, patches=4):
    """One image (C, H, W) whose patches are put into this order."""
    side, across = image.shape[1] // patches, image.shape[2] // patches
    out = torch.empty_like(image)
    for place, piece in enumerate(order):
        r, c = divmod(place, patches)
        i, j = divmod(piece, patches)
        out[:, r * side : (r + 1) * side, c * across : (c + 1) * across] = image[
            :, i * side : (i + 1) * side, j * across : (j + 1) * across
        ]
    return out


class DeYO(Naive):
    def __init__(self, net, lr, e0, plpd, margin=0.4, fixed=(), seed=0):
        super().__init__(net, lr, fixed=fixed)
        self.e0, self.plpd, self.margin = e0, plpd, margin
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x):
        logits = self.net(x)
        rows = logits.detach().double().tolist()
        nats = math.log(len(rows[0]))
        sure = [i for i, row in enumerate(rows) if entropy(row) < self.e0 * nats]
        self.forwards += len(x) + len(sure)
        self.reliable += len(sure)
        chosen = []
        if sure:
            orders = torch.rand(len(sure), 16, generator=self.generator).argsort(1).tolist()
            apart = torch.stack([taken_apart(x[i], order) for i, order in zip(sure, orders, strict=True)])
            with torch.no_grad():
                others = self.net(apart).double().tolist()
            for i, other in zip(sure, others, strict=True):
                p = softmax(rows[i])
                y = p.index(max(p))
                lost = p[y] - softmax(other)[y]
                if lost > self.plpd:
                    chosen.append((i, math.exp(self.margin * nats - entropy(rows[i])) + math.exp(lost)))
        self.events.append("step" if chosen else "none left" if sure else "empty")
        if chosen:
            self.backwards += len(chosen)
            self.descend(self.gradient(sum(w * shannon(logits[i]) for i, w in chosen) / len(chosen)))
        return logits.detach()


# --- views ------------------------------------------------------------------------------------------------------------


def view(image, numbers, noise, mean, std, flip):
    """Another view of one image (C, H, W), pixel by pixel, from its random numbers."""
    low = (0.6, 0.7, 0.5, 0.7, -0.06, -15.0, -1 / 16, -1 / 16, 0.9, 0.001)
    high = (1.4, 1.3, 1.5, 1.3, 0.06, 15.0, 1 / 16, 1 / 16, 1.1, 0.5)
    brightness, contrast, _, gamma, _, angle, across, down, scale, sigma = (
        a + (b - a) * float(u) for a, b, u in zip(low, high, numbers[:-1], strict=True)
    )
    mirrored = flip and float(numbers[-1]) < 0.5
    channels, height, width = image.shape
    assert channels == 1  # the tests' images are grey
    cut = lambda v: min(1.0, max(0.0, v))  # noqa: E731
    pixels = [[cut(cut(v * std + mean) * brightness) for v in line] for line in image[0].double().tolist()]
    grey = sum(sum(line) for line in pixels) / (height * width)
    pixels = [[(cut(grey + contrast * (v - grey)) + 1e-8) ** gamma for v in line] for line in pixels]

    def at(row, column):
        return pixels[min(height - 1, max(0, row))][min(width - 1, max(0, column))]

    cos, sin = math.cos(math.radians(angle)) / scale, math.sin(math.radians(angle)) / scale
    moved = []
    for r in range(height):
        line = []
        for c in range(width):
            u, v = (2 * c + 1) / width - 1, (2 * r + 1) / height - 1
            u = -u if mirrored else u
            s, t = cos * u + sin * v * height / width + 2 * across, -sin * u * width / height + cos * v + 2 * down
            column, row = ((s + 1) * width - 1) / 2, ((t + 1) * height - 1) / 2
            column, row = min(width - 1.0, max(0.0, column)), min(height - 1.0, max(0.0, row))
            i, j = math.floor(row), math.floor(column)
            a, b = row - i, column - j
            line.append(
                (1 - a) * ((1 - b) * at(i, j) + b * at(i, j + 1)) + a * ((1 - b) * at(i + 1, j) + b * at(i + 1, j + 1))
            )
        moved.append(line)
    if noise is not None:
        weights = [math.exp(-(d**2) / (2 * sigma**2)) for d in (-2, -1, 0, 1, 2)]
        total = sum(weights)

        def blur(line):
            far = len(line) - 1
            return [
                sum(weights[d + 2] / total * line[min(far, max(0, k + d))] for d in (-2, -1, 0, 1, 2))
                for k in range(len(line))
            ]

        moved = [blur(line) for line in moved]
        columns = [blur([line[c] for line in moved]) for c in range(width)]
        moved = [[columns[c][r] + 0.005 * float(noise[0, r, c]) for c in range(width)] for r in range(height)]
    out = [[(cut(v) - mean) / std for v in line] for line in moved]
    return torch.tensor([out], dtype=image.dtype)


class Viewer:
    def __init__(self, soften, flip=True, seed=0, mean=0.5, std=0.5):
        self.generator = torch.Generator().manual_seed(seed)
        self.soften, self.flip, self.mean, self.std = soften, flip, mean, std

    def __call__(self, x):
        numbers = torch.rand(len(x), 11, generator=self.generator).to(x.dtype)
        noise = torch.randn(x.shape, generator=self.generator).to(x.dtype) if self.soften else [None] * len(x)
        return torch.stack([view(x[i], numbers[i], noise[i], self.mean, self.std, self.flip) for i in range(len(x))])


def scaled(values):
    low, high = min(values), max(values)
    return [(v - low) / (high - low) if high > low else 0.0 for v in values]


class ROID(Naive):
    def __init__(self, net, lr, ensemble=0.01, optimizer="adam"):
        super().__init__(net, lr, optimizer)
        self.ensemble, self.views, self.average = ensemble, Viewer(soften=False), None

    def __call__(self, x):
        logits = self.net(x)
        rows = logits.detach().double().tolist()
        classes = len(rows[0])
        average = self.average or [1 / classes] * classes
        diversity = scaled([1 - cosine(average, softmax(row)) for row in rows])
        certainty = scaled([-entropy(row) for row in rows])
        mean = sum(diversity) / len(diversity)
        kept = [i for i in range(len(x)) if diversity[i] >= mean]
        weight = {i: math.exp(3 * diversity[i] * certainty[i]) for i in kept}
        prior = [sum(softmax(row)[c] for row in rows) / len(rows) for c in range(classes)]
        self.average = [0.9 * a + 0.1 * p for a, p in zip(average, prior, strict=True)]
        other = self.net(self.views(x[kept]))
        loss = 0.0
        for number, i in enumerate(kept):
            p = torch.softmax(logits[i], 0)
            clipped = torch.where(p > 0.99, torch.full_like(p, 0.99), p)
            ratio = -(clipped * torch.log(clipped / (1 - clipped) + 1e-5)).sum()
            r = torch.softmax(other[number], 0)
            both = (
                -0.5 * (p * torch.log_softmax(other[number], 0)).sum()
                - 0.5 * (r * torch.log_softmax(logits[i], 0)).sum()
            )
            loss = loss + weight[i] * (ratio + both) / len(x)
        self.forwards += len(x) + len(kept)
        self.backwards += 2 * len(kept)
        self.reliable += len(kept)
        self.descend(self.gradient(loss))
        with torch.no_grad():
            for k, v in self.parameters.items():
                v.copy_((1 - self.ensemble) * v + self.ensemble * self.source[k])
        smooth = max(1 / len(rows), 1 / classes) / max(prior)
        correction = [(q + smooth) / (1 + smooth * classes) for q in prior]
        return torch.tensor([[z * q for z, q in zip(row, correction, strict=True)] for row in rows], dtype=x.dtype)


def lame(net, x, neighbours=5, affinity="knn"):
    """Log Y of one batch; the net is a Sequential that ends in a linear layer."""
    net = copy.deepcopy(net).eval()
    with torch.no_grad():
        features = net[:-1](x).double()
        rows = net(x).double().tolist()
    count, classes = len(x), len(rows[0])
    unit = [(f / f.norm()).tolist() for f in features]
    distances = [[math.dist(a, b) for b in unit] for a in unit]
    if affinity == "rbf":
        scale = sum(sorted(row)[: min(neighbours, count)][-1] for row in distances) / count
        pull = [[math.exp(-(d**2) / (2 * scale**2)) if scale else 1.0 for d in row] for row in distances]
    else:
        pull = [[0.0] * count for _ in range(count)]
        for i in range(count):
            for j in sorted((j for j in range(count) if j != i), key=lambda j: distances[i][j])[:neighbours]:
                pull[i][j] = 1.0
    p = [softmax(row) for row in rows]
    y, energies = [list(row) for row in p], []
    while len(energies) < 100:
        pairs = [[sum(pull[i][j] * y[j][c] for j in range(count)) for c in range(classes)] for i in range(count)]
        y = [softmax([math.log(p[i][c] + 1e-10) + pairs[i][c] for c in range(classes)]) for i in range(count)]
        energy = sum(
            -math.log(p[i][c] + 1e-10) * y[i][c]
            - pairs[i][c] * y[i][c]
            + (y[i][c] * math.log(y[i][c]) if y[i][c] else 0)
            for i in range(count)
            for c in range(classes)
        )
        energies.append(energy)
        if len(energies) > 2 and abs(energy - energies[-2]) <= 1e-8 * abs(energies[-2]):
            break
    return torch.tensor(y, dtype=torch.float64)


class CoTTA(Naive):
    def __init__(self, net, lr, copies, momentum, restore, confidence, optimizer="adam"):
        super().__init__(net, lr, optimizer, everything=True)
        self.teacher, self.anchor = copy.deepcopy(self.net), copy.deepcopy(self.net)
        self.copies, self.momentum, self.restore, self.confidence = copies, momentum, restore, confidence
        self.views = Viewer(soften=True)

    def __call__(self, x):
        logits = self.net(x)
        with torch.no_grad():
            sure = sum(max(softmax(row)) for row in self.anchor(x).double().tolist()) / len(x)
            self.events.append("plain" if sure >= self.confidence else "views")
            if sure >= self.confidence:
                target = self.teacher(x)
            else:
                target = sum(self.teacher(self.views(x)) for _ in range(self.copies)) / self.copies
        self.forwards += len(x) * (3 if sure >= self.confidence else 2 + self.copies)
        self.backwards += len(x)
        self.reliable += len(x)
        loss = sum(-(torch.softmax(t, 0) * torch.log_softmax(z, 0)).sum() for t, z in zip(target, logits, strict=True))
        self.descend(self.gradient(loss / len(x)))
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.copy_(self.momentum * slow + (1 - self.momentum) * fast)
            for k, v in self.parameters.items():
                mask = torch.rand(v.shape, generator=self.views.generator) < self.restore
                v[mask] = self.source[k][mask]
        return target


class SlowBatchNorm(nn.Module):
    def __init__(self, old, momentum):
        super().__init__()
        self.weight, self.bias, self.eps, self.share = old.weight, old.bias, old.eps, momentum
        self.mean, self.var = old.running_mean.clone(), old.running_var.clone()

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training:
            mean = (1 - self.share) * mean + self.share * x.mean((0, 2, 3))
            var = (1 - self.share) * var + self.share * x.var((0, 2, 3), correction=0)
            self.mean, self.var = mean.detach(), var.detach()
        out = (x - mean[:, None, None]) / torch.sqrt(var[:, None, None] + self.eps)
        return out * self.weight[:, None, None] + self.bias[:, None, None]


class RoTTA(Naive):
    def __init__(self, net, lr, capacity, momentum=0.05, keep=0.999, optimizer="adam"):
        super().__init__(net, lr, optimizer, batch_statistics=False)
        self.teacher = copy.deepcopy(self.net)
        for one in (self.net, self.teacher):
            for place, module in enumerate(one):
                if isinstance(module, nn.BatchNorm2d):
                    one[place] = SlowBatchNorm(module, momentum)
        self.capacity, self.keep = capacity, keep
        self.bank, self.seen, self.views = {}, 0, Viewer(soften=True)

    def mode(self, training):
        for one in (self.net, self.teacher):
            for module in one:
                if isinstance(module, SlowBatchNorm):
                    module.train(training)

    def score(self, age, nats, classes):
        return 1 / (1 + math.exp(-age / self.capacity)) + nats / math.log(classes)

    def admit(self, image, label, nats, classes):
        room = True
        lists = [self.bank.setdefault(c, []) for c in range(classes)]
        candidates = None
        if len(lists[label]) >= self.capacity / classes:
            candidates = [label]
        elif sum(map(len, lists)) >= self.capacity:
            largest = max(map(len, lists))
            candidates = [c for c in range(classes) if len(lists[c]) == largest]
            self.events.append("full")
        if candidates:
            worst = None
            for c in candidates:
                for k, item in enumerate(lists[c]):
                    value = self.score(item[2], item[1], classes)
                    if worst is None or value >= worst[0]:
                        worst = (value, c, k)
            room = worst[0] > self.score(0, nats, classes)
            if room:
                lists[worst[1]].pop(worst[2])
            self.events.append("replaced" if room else "refused")
        if room:
            lists[label].append([image, nats, 0])
        for some in lists:
            for item in some:
                item[2] += 1

    def __call__(self, x):
        self.mode(False)
        with torch.no_grad():
            answer = self.teacher(x)
        self.forwards += len(x)
        self.reliable += len(x)
        classes = answer.shape[1]
        for image, row in zip(x, answer.double().tolist(), strict=True):
            self.admit(image, row.index(max(row)), entropy(row), classes)
            self.seen += 1
            if self.seen % self.capacity == 0:
                self.learn([item for c in range(classes) for item in self.bank[c]])
        return answer

    def learn(self, items):
        self.mode(True)
        images = torch.stack([item[0] for item in items])
        other = self.views(images)
        with torch.no_grad():
            target = self.teacher(images)
        logits = self.net(other)
        loss = 0.0
        for item, t, z in zip(items, target, logits, strict=True):
            age = item[2] / self.capacity
            weight = math.exp(-age) / (1 + math.exp(-age))
            loss = loss - weight * (torch.softmax(t, 0) * torch.log_softmax(z, 0)).sum() / len(items)
        self.descend(self.gradient(loss))
        self.forwards += 2 * len(items)
        self.backwards += len(items)
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.copy_(self.keep * slow + (1 - self.keep) * fast)

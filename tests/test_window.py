"""Streams of single samples, against windows forwarded anew in plain loops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import eata
from eata import window as windows
from eata.gradient import Choice


def naive_forward(net, window, length, prior=0.0):
    """Logits of a window of n <= L samples: statistics (N+L-n)/(N+L) source + n/(N+L) window, channel by channel."""
    x = torch.stack(window)
    share = (prior + length - len(window)) / (prior + length)
    for module in net:
        if isinstance(module, nn.BatchNorm2d):
            out = torch.empty_like(x)
            for c in range(x.shape[1]):
                mean = share * module.running_mean[c] + (1 - share) * x[:, c].mean()
                var = share * module.running_var[c] + (1 - share) * x[:, c].var(correction=0)
                out[:, c] = (x[:, c] - mean) / (var + module.eps).sqrt() * module.weight[c] + module.bias[c]
            x = out
        else:
            x = module(x)
    return x


def singles(stream, count, dtype=torch.float64):
    return list(stream([count], dtype)[0])


def one_layer(classes=10):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, classes),
    )  # fmt: skip
    net(torch.randn(64, 1, 8, 8))  # running statistics
    return net.eval()


@pytest.mark.parametrize(("method", "prior"), [("tent", 0.0), ("bn", 16.0)])
@pytest.mark.parametrize("exact", [True, False])
def test_one_batch_norm_layer_predicts_as_the_whole_window(stream, method, prior, exact):
    net = one_layer()
    plain = copy.deepcopy(net)
    inner = eata.BN(net, prior=prior) if method == "bn" else eata.Tent(net, lr=1e-12)
    model = eata.Window(inner, length=6, exact=exact)
    images = singles(stream, 20, torch.float32)
    for i, image in enumerate(images):
        expected = naive_forward(plain, images[max(0, i - 5) : i + 1], 6, prior)[-1]
        torch.testing.assert_close(model(image[None])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("method", ["bn", "eta"])
def test_small_batches_are_normalized_by_the_last_samples_and_the_prior(stream, method, size):
    net = one_layer()
    plain = copy.deepcopy(net)
    inner = eata.BN(net, prior=32.0) if method == "bn" else eata.ETA(net, lr=1e-12, prior=32.0)
    model = eata.Window(inner, length=32)
    images = singles(stream, 5 * 32, torch.float32)
    for start in range(0, len(images), size):
        end = start + size
        expected = naive_forward(plain, images[max(0, end - 32) : end], 32, 32.0)[-size:]
        torch.testing.assert_close(model(torch.stack(images[start:end])), expected, rtol=0, atol=1e-5)
    assert model.share == 0.5


def test_the_exact_window_is_the_papers(trained, stream):
    net = trained("bn", torch.float64)
    plain = copy.deepcopy(net).eval()
    model = eata.Window(eata.BN(net, prior=0), length=5, exact=True)
    images = singles(stream, 12)
    for i, image in enumerate(images):
        expected = naive_forward(plain, images[max(0, i - 4) : i + 1], 5)[-1]
        torch.testing.assert_close(model(image[None])[0], expected)
    assert model.stats.forwards == sum(min(i + 1, 5) for i in range(12))


class Spy(TorchFunctionMode):
    """Tells what torch.batch_norm is given: x, weight, bias, running mean and variance."""

    def __init__(self, tell):
        super().__init__()
        self.tell = tell

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.batch_norm:
            x, weight, bias, mean, variance, *rest = args
            self.tell(x, mean.clone(), variance.clone(), weight, bias, *rest)
        return func(*args, **(kwargs or {}))


def test_the_first_layers_statistics_equal_the_exact_windows(trained, stream):
    net = trained()
    first, second = (m for m in net if isinstance(m, nn.BatchNorm2d))
    conv = copy.deepcopy(net[0])
    model = eata.Window(eata.Tent(net, lr=1e-12), length=8)
    images = singles(stream, 30, torch.float32)
    seen = {}

    def spy(x, running_mean, running_var, weight, bias, eps, *rest):
        seen[id(weight)] = (running_mean, running_var)

    with Spy(spy):
        for i, image in enumerate(images):
            model(image[None])
            if i >= 8 and model.since_step:  # full; not overwritten by the gradient step
                window = conv(torch.stack(images[i - 7 : i + 1])).detach().double()
                mean, variance = seen[id(first.weight)]
                torch.testing.assert_close(mean.double(), window.mean((0, 2, 3)), rtol=0, atol=1e-6)
                torch.testing.assert_close(variance.double(), window.var((0, 2, 3), correction=0), rtol=1e-6, atol=1e-6)
    assert id(second.weight) in seen


def test_statistics_far_from_zero_lose_nothing(stream):
    """Activations of mean 1000 and deviation 1: the mean square minus the squared mean would lose all digits."""
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3)).eval()
    net[0].running_mean.fill_(1000)
    plain = copy.deepcopy(net).double()
    model = eata.Window(eata.BN(net, prior=0), length=4)
    images = [1000 + torch.randn(1, 8, 8) for _ in range(8)]
    for i, image in enumerate(images):
        expected = naive_forward(plain, [one.double() for one in images[max(0, i - 3) : i + 1]], 4)[-1]
        torch.testing.assert_close(model(image[None])[0].double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("length", "own_share", "shift"), [(6, 1 / 6, False), (40, 0, False), (40, 1 / 40, True)])
@pytest.mark.parametrize("prior", [0, 0.5])
def test_a_deeper_layer_uses_a_slow_average(trained, stream, length, own_share, shift, prior):
    """After one batch that fills the window, image by image in plain loops: mean and mean square of each channel.

    Beside many others, an image's own moments count from the next one on; unless it is far from them, as the first one
    after a black window is.
    """
    net = trained("bn", torch.float64)
    plain = copy.deepcopy(net).eval()
    images = singles(stream, length + 12)
    if shift:
        images = [1e-3 * image for image in images[:length]] + images[length : length + 1]
    model = eata.Window(eata.BN(net, prior=prior), length=length)
    model(torch.stack(images[:length]))
    average = None
    for i in range(length - 1, len(images)):
        x, depth = torch.stack(images[i - length + 1 : i + 1]), 0
        for module in plain:
            if isinstance(module, nn.BatchNorm2d):
                mean, square = x.mean((0, 2, 3)), x.square().mean((0, 2, 3))
                if depth and average is None:
                    average = mean, square
                elif depth:
                    own = mean, square
                    mean, square = (a + (b - a) * own_share for a, b in zip(average, own, strict=True))
                    average = tuple(a + (b - a) / (2 * length) for a, b in zip(average, own, strict=True))
                source = prior / (prior + length)
                variance = source * module.running_var + (1 - source) * (square - mean**2)
                mean = source * module.running_mean + (1 - source) * mean
                deviation = (variance + module.eps).sqrt()
                x = (x - mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1)
                x = x * module.weight.view(-1, 1, 1) + module.bias.view(-1, 1, 1)
                if i >= length:
                    x = x[-1:]
                depth += 1
            else:
                x = module(x)
        if i >= length:
            before = model.stats.forwards
            torch.testing.assert_close(model(images[i][None]), x)
            assert model.stats.forwards - before == 1 + shift


def test_deeper_layers_differ_little(trained, stream):
    images = singles(stream, 60)
    exact = eata.Window(eata.BN(trained("bn", torch.float64), prior=0), length=16, exact=True)
    cached = eata.Window(eata.BN(trained("bn", torch.float64), prior=0), length=16)
    a = torch.cat([exact(image[None]) for image in images])
    b = torch.cat([cached(image[None]) for image in images])
    assert 0 < (a - b).norm() / a.norm() < 0.05
    assert (a.argmax(1) == b.argmax(1)).double().mean() >= 0.8
    assert cached.stats.forwards == 60 + 1 + 3 + 7 + 15  # whole at 2, 4, 8 and 16
    assert exact.stats.forwards > 10 * cached.stats.forwards / 1.5


def test_the_step_is_once_per_window_and_exact_is_the_batchs_own(trained, stream):
    """L images one by one, exact: the last one's logits and the weights are those of one batch of L."""
    batches = stream([8, 8, 8], torch.float64)
    plain = eata.ETA(trained("bn", torch.float64), e0=0.9, epsilon=0.9, lr=0.05, backward="full")
    inner = eata.ETA(trained("bn", torch.float64), e0=0.9, epsilon=0.9, lr=0.05, backward="full")
    model = eata.Window(inner, length=8, exact=True)
    for x in batches:
        logits = plain(x)
        last = [model(image[None]) for image in x][-1]
        torch.testing.assert_close(last[0], logits[-1])
    assert model.stats.steps == plain.stats.steps == 3
    assert model.stats.backwards == plain.stats.backwards
    for name, parameter in plain.parameters.items():
        torch.testing.assert_close(parameter, inner.parameters[name])


def naive_step(net, chosen, window, weights, lr):
    """Gradient over the chosen: values by the window's statistics, gradient through those of the chosen alone."""
    x, everything = chosen, window
    for module in net:
        if isinstance(module, nn.BatchNorm2d):
            shape = (1, -1, 1, 1)
            fixed_mean, fixed_var = (
                everything.mean((0, 2, 3)).detach(),
                everything.var((0, 2, 3), correction=0).detach(),
            )
            own_mean, own_var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            own = (x - own_mean.view(shape)) / (own_var + module.eps).sqrt().view(shape)
            scale = ((own_var + module.eps) / (fixed_var + module.eps)).sqrt().detach()
            shift = ((own_mean - fixed_mean) / (fixed_var + module.eps).sqrt()).detach()
            x = (own * scale.view(shape) + shift.view(shape)) * module.weight.view(shape) + module.bias.view(shape)
            everything = (everything - fixed_mean.view(shape)) / (fixed_var + module.eps).sqrt().view(shape)
            everything = everything * module.weight.view(shape) + module.bias.view(shape)
        else:
            x, everything = module(x), module(everything)
    log_p = torch.log_softmax(x, 1)
    loss = (weights * -(log_p.exp() * log_p).sum(1)).mean()
    affine = [p for m in net if isinstance(m, nn.BatchNorm2d) for p in (m.weight, m.bias)]
    return [-lr * g for g in torch.autograd.grad(loss, affine)]


def test_the_cached_step_is_on_the_chosen_with_batch_norms_own_gradient(trained, stream):
    net = trained("bn", torch.float64)
    plain = copy.deepcopy(net).eval()
    inner = eata.Tent(net, lr=0.05)
    chosen = [0, 2, 3, 7]
    weights = torch.tensor([1.0, 2.0, 1.5, 1.2], dtype=torch.float64)
    inner.select = lambda batch: Choice(torch.tensor(chosen), weights, 5)
    model = eata.Window(inner, length=8)
    images = torch.stack(singles(stream, 8))
    for image in images:
        model(image[None])
    # At the eighth the window was forwarded whole, so all moments are those of the batch.
    steps = naive_step(plain, images[chosen], images, weights, 0.05)
    before = [p for m in plain if isinstance(m, nn.BatchNorm2d) for p in (m.weight, m.bias)]
    after = [p for m in net if isinstance(m, nn.BatchNorm2d) for p in (m.weight, m.bias)]
    for old, new, step in zip(before, after, steps, strict=True):
        torch.testing.assert_close(new - old, step, rtol=1e-6, atol=1e-9)
    assert vars(model.stats) == {
        "forwards": 8 + 1 + 3 + 7 + 4,
        "backwards": 4,
        "reliable": 5,
        "steps": 1,
        "rejected": 0,
    }


def test_a_cached_step_is_filled_up_by_others_that_add_nothing_to_the_loss(trained, stream):
    net = trained("bn", torch.float64)
    plain = copy.deepcopy(net).eval()
    inner = eata.Tent(net, lr=0.05)
    chosen, others = [1, 2, 5, 7, 9], [0]  # 6 is a multiple of 16 / 8
    weights = torch.tensor([1.0, 2.0, 1.5, 1.2, 0.7], dtype=torch.float64)
    inner.select = lambda batch: Choice(torch.tensor(chosen), weights, 5)
    model = eata.Window(inner, length=16)
    images = torch.stack(singles(stream, 16))
    for image in images:
        model(image[None])
    as_mean_of_five = torch.cat([weights, weights.new_zeros(1)]) * 6 / 5
    steps = naive_step(plain, images[chosen + others], images, as_mean_of_five, 0.05)
    before = [p for m in plain if isinstance(m, nn.BatchNorm2d) for p in (m.weight, m.bias)]
    after = [p for m in net if isinstance(m, nn.BatchNorm2d) for p in (m.weight, m.bias)]
    for old, new, step in zip(before, after, steps, strict=True):
        torch.testing.assert_close(new - old, step, rtol=1e-6, atol=1e-9)
    assert model.stats.backwards == 5


def test_steps_have_eight_sizes_whatever_is_chosen(trained, stream):
    """With one for each number of chosen samples, a server's memory grew."""
    inner = eata.Tent(trained("bn"), lr=0.001)
    sizes = set()

    def forward(inputs, *, grad=False, forward=inner.forward):
        if grad:
            sizes.add(len(inputs))
        return forward(inputs, grad=grad)

    inner.forward = forward
    model = eata.Window(inner, length=16)
    batch = stream([16])[0]
    for count in range(1, 17):
        inner.select = lambda _, count=count: Choice(torch.arange(count), torch.ones(count), count)
        model(batch)
    assert model.stats.steps == 16
    assert sizes == set(range(2, 17, 2))


@pytest.mark.parametrize("length", [1, 7, 15, 16, 20, 50, 100, 127])
def test_eight_sizes_at_most_for_any_length(length):
    step = -(-length // windows.SIZES)
    sizes = {len(windows._filled_up(torch.arange(count), length, step)) for count in range(1, length + 1)}
    assert len(sizes) <= 8


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "method",
    ["source", "bn", "tent", "eta", "eata", "augment", "memo", "rdumb", "sar", "deyo", "roid", "lame", "cotta"],
)
def test_any_method_resets_saves_and_resumes_bit_for_bit(trained, stream, tmp_path, method, exact):
    def make():
        net = trained()
        net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
        arguments = {"eata": (eata.fisher(net, stream([64])[0]),)}.get(method, ())
        options = {"augment": {"copies": 2}, "memo": {"copies": 2}, "source": {}, "bn": {}}.get(method, {"lr": 0.05})
        if method in ("eta", "eata", "rdumb"):
            options |= {"e0": 1.0, "epsilon": 1.0}
        if method in ("sar", "deyo"):
            options |= {"e0": 1.0, "exclude": ()}
        if method == "lame":
            options = {}
        if method == "cotta":
            options |= {"copies": 2}
        return eata.Window(eata.method(method)(net, *arguments, **options), length=4, exact=exact)

    if method in ("lame", "cotta") and not exact:
        with pytest.raises(ValueError, match="exact=True"):
            make()
        return
    images = singles(stream, 12, torch.float32)
    model = make()
    first = [model(image[None]) for image in images[:6]]
    model.save(tmp_path / "state.safetensors")
    expected = [model(image[None]) for image in images[6:]]
    stats = copy.copy(model.stats)
    other = make()
    other.load(tmp_path / "state.safetensors")
    for image, logits in zip(images[6:], expected, strict=True):
        assert torch.equal(other(image[None]), logits)
    assert other.stats == stats
    model.reset()
    assert model.stats == eata.Stats()
    for image, logits in zip(images[:6], first, strict=True):
        assert torch.equal(model(image[None]), logits)


def test_lame_compares_the_samples_of_an_exact_window(trained, stream):
    net = trained()
    plain = copy.deepcopy(net)
    model = eata.Window(eata.LAME(net), length=8, exact=True)
    images = singles(stream, 12, torch.float32)
    for image in images:
        last = model(image[None])
    whole = eata.LAME(plain)(torch.stack([images[-1], *images[-5:-1][::-1], *images[-8:-5]]))
    torch.testing.assert_close(last[0], whole[0], atol=1e-5, rtol=1e-5)


def test_a_step_on_one_sample_without_positions():
    """One value a channel: the window's statistics stay those of the forward until the backward is done."""

    class First(eata.Tent):
        def select(self, logits):
            choice = super().select(logits)
            return Choice(choice.index[:1], choice.weight[:1], choice.reliable)

    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model = eata.Window(First(net, lr=0.1), length=4)
    for x in torch.randn(8, 1, 4):
        model(x)
    assert (model.stats.steps, model.stats.backwards) == (2, 2)


def test_logits_are_the_callers_own(trained, stream):
    images = singles(stream, 12)
    calm, rough = (
        eata.Window(eata.ETA(trained("bn", torch.float64), e0=1.0, epsilon=1.0, lr=0.1), length=4) for _ in range(2)
    )
    for image in images:
        expected, logits = calm(image[None]), rough(image[None])
        assert torch.equal(logits, expected)
        logits.fill_(float("nan"))
    assert calm.stats == rough.stats
    assert calm.stats.steps == 3


def test_frozen_changes_nothing(trained, stream):
    model = eata.Window(eata.Tent(trained(), lr=0.05), length=4)
    images = singles(stream, 10, torch.float32)
    for image in images[:6]:
        model(image[None])
    before = copy.deepcopy(model.state_dict())
    with model.frozen():
        first = model(images[6][None])
        model(images[7][None])
        assert torch.equal(model(images[6][None]), first)
    after = model.state_dict()
    before, after = before["memory"], after["memory"]
    assert torch.equal(before["moments"], after["moments"])
    assert torch.equal(before["average"], after["average"])
    assert (before["count"], before["next"], before["since_step"]) == (4, 2, 2)
    assert (after["count"], after["next"], after["since_step"]) == (4, 2, 2)
    torch.testing.assert_close(model(images[6][None]), first)


@pytest.mark.filterwarnings("ignore:A batch of 1")
@pytest.mark.parametrize("exact", [True, False])
def test_a_window_of_one(trained, stream, exact):
    model = eata.Window(eata.Tent(trained("bn", torch.float64), lr=0.05), length=1, exact=exact)
    plain = eata.Tent(trained("bn", torch.float64), lr=0.05)
    for image in singles(stream, 3):
        expected = plain(image[None])
        torch.testing.assert_close(model(image[None]), expected)
    assert model.stats.steps == 3


@pytest.mark.parametrize("exact", [True, False])
def test_a_window_of_one_value_per_channel_uses_the_source_statistics(exact):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    net(torch.randn(50, 3))
    plain = copy.deepcopy(net).eval()
    model = eata.Window(eata.Tent(net, lr=1e-12), length=1, exact=exact)
    x = torch.randn(1, 3)
    torch.testing.assert_close(model(x), plain(x).detach())


@pytest.mark.parametrize("exact", [True, False])
def test_a_stream_shorter_than_the_window_takes_no_step(trained, stream, exact):
    net = trained()
    before = copy.deepcopy(net.state_dict())
    model = eata.Window(eata.Tent(net, lr=1.0), length=64, exact=exact)
    for image in singles(stream, 10, torch.float32):
        assert torch.isfinite(model(image[None])).all()
    assert model.stats.steps == 0
    model.unwrap()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("exact", [True, False])
def test_small_batches_and_batches_larger_than_the_window(trained, stream, exact):
    model = eata.Window(eata.Tent(trained("bn", torch.float64), lr=0.05), length=4, exact=exact)
    sizes = [3, 2, 11, 1]
    for x in stream(sizes, torch.float64):
        assert model(x).shape == (len(x), 10)
    assert model.stats.steps == sum(sizes) // 4
    whole = eata.Window(eata.Tent(trained("bn", torch.float64), lr=0.05), length=4, exact=exact)
    parts = eata.Window(eata.Tent(trained("bn", torch.float64), lr=0.05), length=4, exact=exact)
    (x,) = stream([10], torch.float64)
    torch.testing.assert_close(whole(x), torch.cat([parts(part) for part in x.split(4)]))


@pytest.mark.parametrize("exact", [True, False])
def test_changing_image_sizes(trained, stream, exact):
    model = eata.Window(eata.Tent(trained("bn", torch.float64), lr=0.05), length=4, exact=exact)
    for i, image in enumerate(singles(stream, 16)):
        side = (8, 12, 6)[i % 3]
        logits = model(F.interpolate(image[None], size=(side, side)))
        assert torch.isfinite(logits).all()
    assert model.stats.steps == 4


def test_the_statistics_weigh_samples_of_all_sizes_alike():
    net = nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2)).eval()
    model = eata.Window(eata.BN(net, prior=0), length=2)
    small, large = torch.randn(1, 1, 4, 4), 3 + torch.randn(1, 1, 8, 8)
    model(small), model(large)
    logits = model(small)
    mean = (small.mean() + large.mean()) / 2
    var = (small.square().mean() + large.square().mean()) / 2 - mean**2
    torch.testing.assert_close(logits, net[3](((small - mean) / (var + 1e-5).sqrt()).mean().view(1, 1)).detach())


@pytest.mark.parametrize("length", [4, 40])
def test_a_net_without_batch_norm_steps_once_per_window(trained, stream, length):
    model = eata.Window(eata.Tent(trained("gn", torch.float64), lr=0.05), length=length)
    plain = eata.Tent(trained("gn", torch.float64), lr=0.05)
    for x in stream([length, length], torch.float64):
        expected = plain(x)
        torch.testing.assert_close(torch.cat([model(image[None]) for image in x]), expected)


def test_episodic_works_exactly_only(trained, stream):
    with pytest.raises(ValueError, match="exact=True"):
        eata.Window(eata.Tent(trained(), episodic=True))
    model = eata.Window(eata.Tent(trained("bn", torch.float64), lr=0.05, episodic=True), length=4, exact=True)
    plain = eata.Tent(trained("bn", torch.float64), lr=0.05, episodic=True)
    images = torch.stack(singles(stream, 4))
    last = [model(image[None]) for image in images][-1]
    torch.testing.assert_close(last[0], plain(images)[-1])


def test_an_overflow_stays_out_of_the_window(trained, stream):
    net = trained()
    model = eata.Window(eata.BN(net, prior=0), length=4)
    images = singles(stream, 8, torch.float32)
    for image in images[:5]:
        model(image[None])
    moments, average = model.moments.clone(), model.average.clone()
    with pytest.warns(UserWarning, match="stay out of the window"):
        model(torch.full((1, 1, 8, 8), 3e38))
    assert torch.equal(model.moments, moments)
    assert torch.equal(model.average, average)
    assert torch.isfinite(model(images[5][None])).all()
    bad = torch.full((1, 1, 8, 8), float("nan"))
    assert torch.isnan(model(bad)).all()
    assert torch.isfinite(model(images[6][None])).all()


def test_unwrap_gives_the_net_back(trained, stream):
    net = trained().train()
    before = copy.deepcopy(net.state_dict())
    model = eata.Window(eata.BN(net), length=4)
    for image in singles(stream, 6, torch.float32):
        model(image[None])
    assert model.unwrap() is net
    assert net.training
    assert all("forward" not in module.__dict__ for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with pytest.raises(RuntimeError, match="unwrapped"):
        model(torch.zeros(1, 1, 8, 8))


def test_what_cannot_be_windowed_is_said(trained):
    with pytest.raises(TypeError, match="wraps an adapter, not a Sequential"):
        eata.Window(trained())
    with pytest.raises(TypeError, match="not a Window"):
        eata.Window(eata.Window(eata.Source(trained())))
    for length in (0, -3, 2.5):
        with pytest.raises(ValueError, match="length"):
            eata.Window(eata.Tent(trained()), length=length)
    net = trained()
    net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    with pytest.raises(ValueError, match="leave the window out"):
        eata.Window(eata.RoTTA(net))
    bare = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 3))
    with pytest.raises(ValueError, match="no running statistics"):
        eata.Window(eata.Tent(bare))


def test_a_state_of_other_settings_or_method_is_refused(trained, stream):
    saved = eata.Window(eata.Tent(trained(), lr=0.05), length=4).state_dict()
    with pytest.raises(ValueError, match="length"):
        eata.Window(eata.Tent(trained(), lr=0.05), length=5).load_state_dict(saved)
    with pytest.raises(ValueError, match="Tent"):
        eata.Window(eata.BN(trained()), length=4).load_state_dict(saved)
    del saved["memory"]["average"]
    with pytest.raises(ValueError, match="no 'average', so it is of another version"):
        eata.Window(eata.Tent(trained(), lr=0.05), length=4).load_state_dict(saved)


def test_a_layer_used_twice_is_refused_by_the_cache_only(stream):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(2), nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(self.norm(torch.relu(self.norm(x))))

    with pytest.raises(eata.EataError, match="exact=True"):
        eata.Window(eata.BN(Twice()), length=4)(torch.randn(1, 2))
    assert eata.Window(eata.BN(Twice()), length=4, exact=True)(torch.randn(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("exact", [True, False])
def test_the_inner_models_frozen_counts(trained, stream, exact):
    inner = eata.Tent(trained(), lr=0.05)
    model = eata.Window(inner, length=4, exact=exact)
    images = singles(stream, 12, torch.float32)
    for image in images[:6]:
        model(image[None])
    steps, next_place = model.stats.steps, model.next
    with inner.frozen():
        for image in images[6:]:
            model(image[None])
    assert (model.stats.steps, model.next) == (steps, next_place)


@pytest.mark.parametrize("exact", [True, False])
def test_a_sample_that_fails_is_not_counted(trained, stream, exact):
    model = eata.Window(eata.Tent(trained(), lr=0.05), length=4, exact=exact)
    images = singles(stream, 8, torch.float32)
    for image in images[:3]:
        model(image[None])
    before = copy.deepcopy(model.state_dict()["memory"])
    with pytest.raises(eata.InputError):
        model(torch.zeros(1, 3, 8, 8))
    after = model.state_dict()["memory"]
    assert (before["since_step"], before["next"], before["count"]) == (3, 3, 3)
    assert (after["since_step"], after["next"], after["count"]) == (3, 3, 3)
    model(images[3][None])
    assert model.stats.steps == 1


def test_a_layer_with_an_activation_of_its_own_keeps_it(stream):
    """As timm's BatchNormAct2d: a BatchNorm whose forward does more than normalize."""

    class Activated(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), Activated(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model = eata.Window(eata.BN(net, prior=0), length=4)
    x = stream([4])[0]
    torch.testing.assert_close(model(x), eata.BN(copy.deepcopy(net), prior=0)(x))


def test_a_snapshot_of_a_window_has_its_statistics(trained, stream):
    model = eata.Window(eata.Tent(trained(), lr=0.05), length=4)
    images = singles(stream, 9, torch.float32)
    for image in images:
        model(image[None])
    net = model.snapshot()
    with model.frozen():
        torch.testing.assert_close(net(images[-1][None]), model(images[-1][None]), atol=1.0, rtol=1.0)
    first = next(m for m in net if isinstance(m, nn.BatchNorm2d))
    window = net[0](torch.stack(images[-4:])).detach()
    torch.testing.assert_close(first.running_mean, window.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)

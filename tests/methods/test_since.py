"""The methods since EATA beside the naive ones of naive_since.py, and what each promises on its own."""

import copy
import importlib.util
import math
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import eata
import naive
from eata import functional
from eata.views import Views

_spec = importlib.util.spec_from_file_location("naive_since", Path(__file__).parent / "naive_since.py")
since = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(since)

SIZES = [random.Random(5).choice([2, 3, 5, 9, 16, 33]) for _ in range(24)]
EXACT, CLOSE = (torch.float64, 1e-10), (torch.float32, 1e-5)
# Adam divides by the gradient's size, and so makes much of the rounding of gradients near 0: float64 only, small steps.
OPTIMIZERS = [("sgd", 0.01, *EXACT), ("sgd", 0.01, *CLOSE), ("nesterov", 0.01, *EXACT), ("adam", 0.0001, *EXACT)]
each_optimizer = pytest.mark.parametrize(("optimizer", "lr", "dtype", "tolerance"), OPTIMIZERS)


@pytest.fixture
def pictured(trained):
    """A trained net that says how its input is normalized."""

    def make(norm="bn", dtype=torch.float32):
        net = trained(norm, dtype)
        net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
        return net

    return make


def assert_same(model, reference, batches, tolerance):
    for x in batches:
        torch.testing.assert_close(model(x), reference(x), atol=tolerance, rtol=tolerance)
        for name, parameter in model.parameters.items():
            torch.testing.assert_close(parameter, reference.parameters[name], atol=tolerance, rtol=tolerance)
        got = model.stats
        assert (got.forwards, got.backwards, got.reliable, got.steps) == (
            reference.forwards, reference.backwards, reference.reliable, reference.steps,
        )  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [EXACT, CLOSE])
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_rdumb(norm, dtype, tolerance, trained, stream):
    net = trained(norm, dtype)
    reference = since.RDumb(net, 0.01, e0=0.3, epsilon=0.45, every=4)
    model = eata.RDumb(net, lr=0.01, e0=0.3, epsilon=0.45, every=4, backward="full")
    assert_same(model, reference, stream(SIZES, dtype), tolerance)
    if norm == "bn":
        assert {"empty", "step", "reset"} <= set(reference.events)


def test_rdumb_starts_anew_when_no_sample_is_chosen_any_more(trained, stream):
    """A collapsed model leaves all samples out; it is the batches that count."""
    model = eata.RDumb(trained("gn"), e0=0.3, epsilon=0.45, every=3)
    for parameter in model.parameters.values():
        parameter.data = 0 * parameter.data
    for x in stream([8, 8, 8]):
        model(x)
    assert model.stats.steps == 0
    assert all(torch.equal(parameter, model.source[name]) for name, parameter in model.parameters.items())


@each_optimizer
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_sar(optimizer, lr, norm, dtype, tolerance, trained, stream):
    net = trained(norm, dtype)
    settings = {"e0": 0.25, "rho": 0.3, "recover": 0.5}
    reference = since.SAR(net, lr, **settings, fixed=("4",), optimizer=optimizer)
    model = eata.SAR(net, lr=lr, **settings, exclude=["4"], optimizer=optimizer, backward="full")
    assert_same(model, reference, stream(SIZES, dtype), tolerance)
    assert list(model.parameters) == ["1.weight", "1.bias"]
    assert {"step", "reset"} <= set(reference.events)
    if norm == "bn":
        assert "empty" in reference.events or "none kept" in reference.events


def test_sar_steps_on_nothing_when_nothing_stays_reliable(trained, stream):
    model = eata.SAR(trained("gn"), e0=0.5, rho=50.0, exclude=(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model.score = lambda logits: functional.entropy(logits) + 9 * (model.stats.forwards > 16)
    model(stream([16])[0])
    after = model.state_dict()
    assert after["stats"]["steps"] == 0 < after["stats"]["reliable"]
    assert all(torch.equal(p, before["parameters"][n]) for n, p in after["parameters"].items())


@pytest.mark.parametrize("recover", [None, 5.0])
def test_sar_recovers_and_then_starts_anew(recover, trained, stream):
    model = eata.SAR(trained(), e0=1.0, recover=recover, exclude=(), lr=0.01)
    model(stream([16])[0])
    at_source = all(torch.equal(p, model.source[n]) for n, p in model.parameters.items())
    assert at_source == (recover is not None)
    assert (model.average is None) == (recover is not None)


@pytest.mark.parametrize(("dtype", "tolerance"), [EXACT, CLOSE])
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_deyo(norm, dtype, tolerance, trained, stream):
    net = trained(norm, dtype)
    reference = since.DeYO(net, 0.01, e0=0.35, plpd=0.85, fixed=("4",))
    model = eata.DeYO(net, lr=0.01, e0=0.35, plpd=0.85, exclude=["4"], backward="full")
    assert_same(model, reference, stream(SIZES, dtype), tolerance)
    if norm == "bn":
        assert {"step", "none left"} <= set(reference.events)


@each_optimizer
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_roid(optimizer, lr, norm, dtype, tolerance, pictured, stream):
    net = pictured(norm, dtype)
    reference = since.ROID(net, lr, optimizer=optimizer)
    model = eata.ROID(net, lr=lr, optimizer=optimizer, backward="full")
    assert_same(model, reference, stream(SIZES[:20], dtype), tolerance)
    average = torch.tensor(reference.average, dtype=dtype)
    torch.testing.assert_close(model.average, average, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [EXACT, CLOSE])
@pytest.mark.parametrize("norm", ["bn", "gn"])
@pytest.mark.parametrize("affinity", ["knn", "rbf"])
def test_lame(affinity, norm, dtype, tolerance, trained, stream):
    net = trained(norm, dtype)
    plain = copy.deepcopy(net)
    model = eata.LAME(net, affinity=affinity)
    for x in stream([*SIZES, 1], dtype):
        y = model(x).exp()
        torch.testing.assert_close(y, since.lame(plain, x, affinity=affinity).to(dtype), atol=tolerance, rtol=tolerance)
    assert model.stats.forwards == sum(SIZES) + 1
    assert model.stats.backwards == model.stats.steps == 0


@each_optimizer
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_cotta(optimizer, lr, norm, dtype, tolerance, pictured, stream):
    net = pictured(norm, dtype)
    confidence = 0.75
    reference = since.CoTTA(net, lr, 2, 0.9, 0.05, confidence, optimizer)
    settings = {"copies": 2, "momentum": 0.9, "restore": 0.05, "confidence": confidence}
    model = eata.CoTTA(net, lr=lr, **settings, optimizer=optimizer, backward="full")
    assert_same(model, reference, stream([2, 3, 5, 9] * 5, dtype), tolerance)
    assert {"plain", "views"} == set(reference.events)
    for name, value in reference.teacher.named_parameters():
        torch.testing.assert_close(model.teacher[name], value.detach(), atol=tolerance, rtol=tolerance)


@each_optimizer
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_rotta(optimizer, lr, norm, dtype, tolerance, pictured, stream):
    net = pictured(norm, dtype)
    lr /= 10  # slow statistics carry rounding on from step to step
    reference = since.RoTTA(net, lr, capacity=12, keep=0.9, optimizer=optimizer)
    model = eata.RoTTA(net, lr=lr, capacity=12, keep=0.9, optimizer=optimizer, backward="full")
    assert_same(model, reference, stream(SIZES[:20], dtype), tolerance)
    assert {"full", "replaced", "refused"} <= set(reference.events)
    assert len(model.bank) == sum(map(len, reference.bank.values())) == 12
    if norm == "bn":
        for kept, one in ((model.teacher_statistics, reference.teacher), (model.student_statistics, reference.net)):
            layers = [m for m in one if isinstance(m, since.SlowBatchNorm)]
            for (mean, variance), layer in zip(kept, layers, strict=True):
                torch.testing.assert_close(mean, layer.mean, atol=tolerance, rtol=tolerance)
                torch.testing.assert_close(variance, layer.var, atol=tolerance, rtol=tolerance)


def test_lame_goes_on_until_it_stays(trained, stream):
    """Neighbours of neighbours count too: one round is not the end."""
    net = trained("gn", torch.float64)
    model = eata.LAME(net, affinity="rbf")
    x = stream([64], torch.float64)[0]
    batch = model.forward(eata.Inputs(x))
    y = model.answer(batch).exp()
    p = functional.probabilities(batch.logits)
    again = torch.softmax(torch.log(p + 1e-10) + functional.closeness(batch.features, 5) @ y, 1)
    torch.testing.assert_close(again, y, atol=1e-4, rtol=0)
    first = torch.softmax(torch.log(p + 1e-10) + functional.closeness(batch.features, 5) @ p, 1)
    assert (first - y).abs().max() > 0.05


# --- COME -------------------------------------------------------------------------------------------------------------


def test_come_is_the_entropy_of_opinions():
    logits = (5 * torch.randn(6, 4, dtype=torch.float64)).requires_grad_()
    want = torch.stack([since.come(row) for row in logits])
    torch.testing.assert_close(functional.come_entropy(logits), want, atol=1e-10, rtol=1e-10)
    ours, naively = (torch.autograd.grad(f.sum(), logits)[0] for f in (functional.come_entropy(logits), want))
    torch.testing.assert_close(ours, naively, atol=1e-10, rtol=1e-10)
    along = (ours * logits.detach()).sum(1)
    torch.testing.assert_close(along, torch.zeros_like(along), atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e4, 1e30])
def test_come_is_finite_for_any_finite_logits(size):
    logits = (size * torch.randn(4, 3)).requires_grad_()
    value = functional.come_entropy(logits)
    assert torch.isfinite(value).all()
    assert ((value >= -1e-5) & (value <= math.log(4) + 1e-5)).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), logits)[0]).all()


def test_come_of_dense_and_half_precision_logits():
    dense = torch.randn(2, 3, 4, 5)
    each = functional.come_entropy(dense.permute(0, 2, 3, 1).reshape(-1, 3)).view(2, -1).mean(1)
    torch.testing.assert_close(functional.come_entropy(dense), each)
    assert functional.come_entropy(dense.half()).dtype == torch.float32


def test_come_in_sar_equals_the_naive_one(trained, stream):
    net = trained("gn", torch.float64)
    reference = since.SAR(net, 0.01, e0=0.6, score=since.come)
    model = eata.SAR(net, lr=0.01, e0=0.6, score=functional.come_entropy, exclude=(), backward="full")
    assert_same(model, reference, stream(SIZES, torch.float64), 1e-10)


@pytest.mark.parametrize("method", ["tent", "eta", "eata", "rdumb", "sar"])
def test_come_is_a_score_of_every_entropy_method(method, trained, stream, digits):
    net = trained()
    arguments = {"eata": (eata.fisher(net, digits[0][:64]),)}.get(method, ())
    more = {"tent": {}, "sar": {"e0": 1.0, "exclude": ()}}.get(method, {"e0": 1.0, "epsilon": 1.0})
    model = eata.method(method)(net, *arguments, lr=0.01, score=functional.come_entropy, **more)
    for x in stream([16] * 3):
        model(x)
    assert model.stats.steps > 0
    assert model.settings["score"] == "come_entropy"


# --- what else they promise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rdumb", "sar", "deyo", "roid"])
def test_rows_are_the_textbook_gradient_without_batch_norm(method, pictured, stream):
    settings = {
        "rdumb": {"e0": 0.3, "epsilon": 1.0},
        "sar": {"e0": 0.3, "exclude": ()},
        "deyo": {"e0": 0.3, "plpd": 0.3, "exclude": ()},
        "roid": {"optimizer": "sgd"},
    }[method]
    twins = [eata.method(method)(pictured("gn"), lr=0.01, backward=way, **settings) for way in ("rows", "full")]
    for x in stream([32] * 6):
        torch.testing.assert_close(*(twin(x) for twin in twins), atol=1e-4, rtol=1e-4)
    assert twins[0].stats == twins[1].stats
    assert 0 < twins[0].stats.backwards < 2 * twins[0].stats.forwards
    for name, value in twins[0].parameters.items():
        torch.testing.assert_close(value, twins[1].parameters[name], atol=1e-4, rtol=1e-4)


def test_teachers_share_what_is_frozen(pictured, stream):
    model = eata.RoTTA(pictured(), capacity=4)
    model(stream([16])[0])
    assert list(model.teacher) == list(model.parameters)
    assert all("norm" not in name for name in model.teacher)
    assert sum(v.numel() for v in model.teacher.values()) < 0.1 * sum(p.numel() for p in model.net.parameters())


def test_a_snapshot_is_the_teacher(pictured, stream):
    x, y = stream([24, 8])
    for model in (eata.RoTTA(pictured(), capacity=8), eata.CoTTA(pictured(), copies=1)):
        model(x)
        with model.frozen():
            torch.testing.assert_close(model.snapshot(y)(y), model(y), atol=1e-5, rtol=1e-5)


def test_an_error_in_the_net_puts_the_weights_back(pictured, stream):
    for model in (
        eata.CoTTA(pictured(), copies=1),
        eata.RoTTA(pictured(), capacity=4),
        eata.SAR(pictured(), e0=1.0, exclude=()),
    ):
        x = stream([16])[0]
        model(x)
        before = {name: value.clone() for name, value in model.parameters.items()}
        with pytest.raises(ValueError, match=r"(does not take input|memory holds)"):
            model(torch.zeros(4, 3, 8, 8))
        assert all(torch.equal(value, model.parameters[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("method", "arguments", "culprit"),
    [
        ("rdumb", {"every": 0}, "every="), ("sar", {"rho": -1.0}, "rho="), ("sar", {"recover": -0.1}, "recover="),
        ("sar", {"e0": 2.0}, "e0="), ("deyo", {"plpd": 2.0}, "plpd="), ("deyo", {"patches": 1}, "patches="),
        ("roid", {"ensemble": 1.5}, "ensemble="), ("lame", {"neighbours": 0}, "neighbours="),
        ("cotta", {"copies": 0}, "copies="), ("cotta", {"restore": 1.5}, "restore="),
        ("rotta", {"capacity": 0}, "capacity="), ("rotta", {"momentum": -0.1}, "momentum="),
        ("sar", {"optimizer": "adamw", "exclude": ()}, "optimizer"), ("sar", {"exclude": ["layer9"]}, "layer9"),
        ("deyo", {}, "exclude="), ("sar", {}, "exclude="),
        ("rotta", {"prior": 64}, "prior=64"), ("rotta", {"prior": "auto"}, "prior='auto'"),
        ("rdumb", {"score": "come"}, "score='come'"),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_named(method, arguments, culprit, pictured):
    net = pictured()
    with pytest.raises(ValueError, match=culprit):
        eata.method(method)(net, **arguments)
    eata.Source(net)  # the failed attempt left the net free


def test_nets_without_what_a_method_needs_are_refused(stream):
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    bare.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    for make in (eata.RDumb, eata.ROID, eata.RoTTA, lambda net: eata.SAR(net, exclude=())):
        with pytest.raises(ValueError, match="no normalization layer"):
            make(bare)
    convolutional = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())
    with pytest.raises(ValueError, match="No linear layer"):
        eata.LAME(convolutional)(stream([8])[0])


def test_lame_says_what_it_cannot_do(stream):
    few = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model = eata.LAME(few)
    before = model.state_dict()
    with pytest.raises(ValueError, match="3 classes, fewer than neighbours=5"):
        model(stream([8])[0])
    assert model.state_dict() == before
    other = eata.LAME(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    with pytest.warns(UserWarning, match="no neighbours"):
        other(stream([1])[0])


@pytest.mark.parametrize("method", ["deyo", "roid", "cotta", "rotta"])
def test_methods_on_images_take_images_alone(method):
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    model = eata.method(method)(net, **({"exclude": ()} if method == "deyo" else {}))
    with pytest.raises(ValueError, match=r"\(B, C, H, W\)"):
        model(torch.randn(5, 3))


def test_rotta_refuses_images_of_another_size(pictured, stream):
    model = eata.RoTTA(pictured(), capacity=4)
    model(stream([6])[0])
    with pytest.raises(ValueError, match="memory holds images"):
        model(torch.zeros(2, 1, 9, 9))


def test_views_of_colour_images():
    net = nn.Identity()
    net.pretrained_cfg = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
    views = Views(net, flip=True, soften=True, seed=3)
    mean, std = views.mean, views.std
    grey = (torch.full((8, 3, 16, 16), 0.5) - mean) / std
    seen = views(grey) * std + mean
    assert seen.min() >= -1e-6
    assert seen.max() <= 1 + 1e-6
    # a grey picture has no hue or saturation, so it stays grey and even, but for the noise
    assert seen.std((2, 3)).max() < 0.02
    assert (seen.mean((2, 3)).amax(1) - seen.mean((2, 3)).amin(1)).max() < 0.01
    assert seen.mean((1, 2, 3)).std() > 0.03
    again = Views(net, flip=True, soften=True, seed=3)
    assert torch.equal(again(grey) * std + mean, seen)
    assert not torch.equal(again(grey) * std + mean, seen)


def test_presets_fit_every_method():
    for name in ("cifar10", "imagenet", "digits"):
        for method in (eata.RDumb, eata.SAR, eata.DeYO, eata.ROID, eata.LAME, eata.CoTTA, eata.RoTTA):
            values = eata.preset(name, method)
            net = eata.models.ResNet26(norm="gn")
            net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
            method(net, **values)
    assert eata.preset("cifar10", eata.DeYO)["e0"] == 0.5
    assert naive.entropy([0.0, 0.0]) == pytest.approx(math.log(2))

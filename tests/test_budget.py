"""The forgetting budget: the projection beside a naive one by bisection, and what it promises of a whole stream."""

import copy
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import eata
import naive
from eata import budget


def dense(rows, rest):
    """M as a matrix, one direction after another."""
    matrix = np.diag(np.array(rest, dtype=float))
    for row in rows:
        matrix = matrix + np.outer(row, row)
    return matrix


def precise_spectrum(rows, rest):
    """Eigenvalues and eigenvectors of M, to the precision in force: in 16 digits a weak direction is lost."""
    matrix = mpmath.diag(rest)
    for row in rows:
        matrix += mpmath.matrix(row) * mpmath.matrix(row).T
    values, vectors = mpmath.eigsy(matrix)
    return np.array(list(values)), np.array(vectors.tolist())


def naive_drift(matrix, moved):
    return 0.5 * float(np.array(moved) @ matrix @ np.array(moved))


def naive_held(spectrum, moved, kappa):
    """By bisection on mu, in the basis in which M is diagonal: its eigenvalues and eigenvectors."""
    values, vectors = spectrum
    along = vectors.T @ np.array(moved)

    def drift_at(mu):
        return float((0.5 * values.clip(0) * (along / (1 + mu * values.clip(0))) ** 2).sum())

    if drift_at(0.0) <= kappa:
        return list(moved)
    low, high = 0.0, 1.0
    while drift_at(high) > kappa:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if drift_at(middle) > kappa else (low, middle)
    return (vectors @ (along / (1 + high * values.clip(0)))).astype(float).tolist()


def matrix_of(model, names):
    """M of a model's Fisher, for the parameters in this order."""
    columns = torch.cat([model.curvature[name].flatten(1) for name in names], dim=1).double().tolist()
    return dense(columns[:-1], [root * root for root in columns[-1]])


def drift_of(model):
    """From the parameters, the source and the Fisher, not by the model's own means: one direction after another."""
    moved = {name: (theta - model.source[name]).detach().double() for name, theta in model.parameters.items()}
    total = 0.0
    for row in range(len(next(iter(model.curvature.values()))) - 1):
        total += 0.5 * sum(float((model.curvature[name][row] * d).sum()) for name, d in moved.items()) ** 2
    return total + sum(0.5 * float((model.curvature[name][-1] * d).square().sum()) for name, d in moved.items())


KAPPA = 1e-5  # small: every kind of net gets there

finite = st.floats(-100.0, 100.0)
sizes = st.integers(1, 6)


@st.composite
def problems(draw):
    """Directions, the diagonal of the rest, a displacement."""
    size = draw(sizes)
    vectors = st.lists(finite, min_size=size, max_size=size)
    rest = draw(st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e3)), min_size=size, max_size=size))
    return draw(st.lists(vectors, max_size=3)), rest, draw(vectors)


def given_to(rows, rest):
    return budget.Curvature(
        torch.tensor(rows, dtype=torch.float64).reshape(-1, len(rest)), torch.tensor(rest, dtype=torch.float64)
    )


@given(problems(), st.floats(1e-4, 10.0))
@example(
    ([[0, 0, 46, 0, 0, 37], [8, 0, 0, 0, 2, 34]], [0, 0, 1e-6, 0, 0, 0], [82, 0, 0, 0, 0, 0]), 1e-4
)  # weak and strong
def test_the_projection_is_the_naive_one(problem, kappa):
    rows, rest, moved = problem
    matrix = dense(rows, rest)
    got = budget.held(given_to(rows, rest), torch.tensor(moved, dtype=torch.float64), kappa)
    assert naive_drift(matrix, got.tolist()) <= kappa * (1 + 1e-4)  # the naive one cancels
    with mpmath.workdps(40):
        expected = naive_held(precise_spectrum(rows, rest), moved, kappa)
    assert got.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@given(problems(), st.floats(1e-4, 10.0), st.randoms(use_true_random=False))
def test_no_point_within_the_budget_is_nearer(problem, kappa, random):
    rows, rest, moved = problem
    matrix = dense(rows, rest)
    got = budget.held(given_to(rows, rest), torch.tensor(moved, dtype=torch.float64), kappa).tolist()

    def distance(point):
        return math.dist(point, moved)

    for _ in range(20):  # any other point, brought into the budget along the ray
        other = [d + random.uniform(-3, 3) * (1 + abs(d)) for d in got]
        scale = min(1.0, math.sqrt(kappa / max(naive_drift(matrix, other), 1e-300)))
        assert distance(got) <= distance([scale * d for d in other]) * (1 + 1e-5) + 1e-6


def test_from_too_far_away_it_comes_straight_back():
    rows = torch.randn(16, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curvature = budget.Curvature(rows, torch.zeros(40, dtype=torch.float64))
    for size in (1e9, 1e12, 1e15, 1e18, 1e30):
        got = budget.held(curvature, size * torch.linspace(-1, 1, 40, dtype=torch.float64), 0.02)
        assert bool(torch.isfinite(got).all())
        assert budget.drift(curvature, got) <= 0.02 * 1.001


def test_a_huge_range_of_importance():
    rest = torch.logspace(-12, 12, 49, dtype=torch.float64)
    curvature = budget.Curvature(torch.ones(2, 49, dtype=torch.float64), rest)
    for size in (1e-6, 1.0, 1e6, 1e30):
        got = budget.held(curvature, torch.full_like(rest, size), 0.02)
        assert budget.drift(curvature, got) <= 0.02 * (1 + 1e-9)
        assert bool(torch.isfinite(got).all())


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 1000))
def test_the_strongest_directions_keep_the_most(size, number, seed):
    rows = torch.randn(size, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = budget.strongest(rows, number)
    want = torch.linalg.svdvals(rows)[:number]
    torch.testing.assert_close(kept.norm(dim=1)[: len(want)], want)
    if number >= size:
        torch.testing.assert_close(kept.T @ kept, rows.T @ rows)


def moved_by(net, size, seed):
    """The net with its scales and shifts moved at random, and by a common factor."""
    other = copy.deepcopy(net)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in other.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.BatchNorm1d)):
                noise = torch.randn(module.weight.shape, generator=generator, dtype=module.weight.dtype)
                module.weight.add_(size * noise).mul_(1 - size)
    return other


def kl(net, other, images):
    with torch.no_grad():
        source, moved = (net(images).log_softmax(1), other(images).log_softmax(1))
        return float((source.exp() * (source - moved)).sum(1).mean())


def test_the_drift_is_the_change_of_the_predictions_in_nats():
    """Between two classes, to second order: exactly, where all directions are kept."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)).double().eval()
    images = torch.randn(200, 6, dtype=torch.float64)
    other = moved_by(net, 0.003, seed=1)
    model = eata.EATA(copy.deepcopy(net), eata.fisher(net, images), budget=1.0)
    with torch.no_grad():
        model.parameters["0.weight"].copy_(other[0].weight)
    assert model.drift == pytest.approx(kl(net, other, images), rel=0.02)


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_the_drift_of_a_trained_net_is_near_the_change_of_its_predictions(norm, trained, digits):
    net = trained(norm, torch.float64).eval()
    images = digits[0][:400].double()
    fisher = eata.fisher(net, images)
    for seed in range(3):
        other = moved_by(net, 0.02, seed)
        model = eata.EATA(copy.deepcopy(net), fisher, budget=1.0)
        with torch.no_grad():
            for name, theta in other.named_parameters():
                if name in model.parameters:
                    model.parameters[name].copy_(theta)
        assert model.drift == pytest.approx(kl(net, other, images), rel=0.4)


def model_of(net, images, **arguments):
    settings = {"e0": 0.9, "epsilon": 1.0, "lr": 0.01, "budget": 0.02, **arguments}
    return eata.EATA(net, eata.fisher(net, images), **settings)


@pytest.mark.parametrize("norm", ["bn", "gn", "ln", "in"])
def test_the_step_is_a_naive_one_and_the_naive_projection(norm, trained, stream, digits):
    net = trained(norm, torch.float64)
    images = digits[0][:100].double()
    reference = naive.Naive(net, 0.05, (0.9, 1.0, 0.1), eata.fisher(net, images), beta=0.0)
    model = model_of(net, images, lr=0.05, budget=KAPPA, backward="full")
    names = list(reference.parameters)
    matrix = matrix_of(model, names)
    spectrum = np.linalg.eigh(matrix)
    reached = False
    for x in stream([16] * 12, torch.float64):
        torch.testing.assert_close(model(x), reference(x), atol=1e-6, rtol=1e-6)
        moved = [d for n in names for d in (reference.parameters[n] - reference.source[n]).flatten().tolist()]
        reached |= naive_drift(matrix, moved) > KAPPA
        held = iter(naive_held(spectrum, moved, KAPPA))
        with torch.no_grad():
            for n, theta in reference.parameters.items():
                values = torch.tensor([next(held) for _ in range(theta.numel())], dtype=torch.float64)
                theta.copy_(reference.source[n] + values.view_as(theta))
        for n, theta in model.parameters.items():
            torch.testing.assert_close(theta, reference.parameters[n], atol=1e-6, rtol=1e-6)
    assert reached


OPTIMIZERS = {
    "sgd": None,
    "adam": lambda lr: lambda parameters: torch.optim.Adam(parameters, lr),
}


@pytest.mark.parametrize("times", [0.2, 1, 5, 20, 1000])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("norm", ["bn", "gn", "ln"])
def test_drift_stays_within_the_budget_at_every_step(norm, optimizer, times, trained, stream, digits):
    make = OPTIMIZERS[optimizer]
    lr = 0.01 * times
    model = model_of(trained(norm), digits[0][:100], lr=lr, optimizer=make and make(lr))
    for x in stream([2, 3, 16, 64, 16, 5, 33, 16]):
        model(x)
        assert drift_of(model) <= 0.02 * 1.001
        assert model.drift == pytest.approx(drift_of(model), rel=1e-3, abs=1e-9)
    assert model.stats.steps
    assert model.drift > 0


def test_the_drift_does_not_swing(trained, stream, digits):
    """Once at the border, a learning rate that is too high keeps it there, and does not throw it back and forth."""
    model = model_of(trained(), digits[0][:100], lr=0.2)
    drifts = []
    for x in stream([32] * 30):
        model(x)
        drifts.append(model.drift)
    assert min(drifts[5:]) > 0.5 * 0.02


def test_within_the_budget_it_is_eta(trained, stream, digits):
    held = model_of(trained(), digits[0][:100], budget=1e6)
    free = eata.ETA(trained(), e0=0.9, epsilon=1.0, lr=0.01)
    for x in stream([16] * 4):
        assert torch.equal(held(x), free(x))
    assert held.drift > 0


def test_drift_is_known_for_beta_too_and_only_in_nats(trained, stream, digits):
    for per, known in (("sample", True), ("batch", False)):
        net = trained()
        model = eata.EATA(net, eata.fisher(net, digits[0][:100], per=per), beta=1.0, e0=0.9, epsilon=1.0, lr=0.01)
        assert (model.drift is not None) == known
        model(stream([32])[0])
        if known:
            assert model.drift == pytest.approx(drift_of(model), rel=1e-4) != 0


def test_neither_is_the_papers_beta(trained, digits):
    net = trained()
    model = eata.EATA(net, eata.fisher(net, digits[0][:64]))
    assert (model.beta, model.budget) == (2000.0, None)


def test_a_window_keeps_the_budget(trained, stream, digits):
    model = eata.Window(model_of(trained(), digits[0][:100], lr=1.0), length=8)
    for x in stream([1] * 32):
        model(x)
        assert drift_of(model.model) <= 0.02 * 1.001
    assert model.stats.steps == 4


def test_it_resumes_bit_for_bit(trained, stream, digits, tmp_path):
    batches = stream([16] * 8)
    model = model_of(trained(), digits[0][:100], lr=0.1)
    for x in batches[:4]:
        model(x)
    model.save(tmp_path / "state")
    other = model_of(trained(), digits[0][:100], lr=0.1)
    other.load(tmp_path / "state")
    for x in batches[4:]:
        assert torch.equal(model(x), other(x))
    assert model.drift == other.drift
    third = model_of(trained(), digits[0][:100], lr=0.1, budget=0.03)
    with pytest.raises(ValueError, match=r"saved with budget=0\.02"):
        third.load(tmp_path / "state")


def test_weights_that_overflow_go_back_to_the_source(trained, stream, digits):
    model = model_of(trained(), digits[0][:100], lr=1e300)
    with pytest.warns(UserWarning, match="lower lr"):
        model(stream([32])[0])
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters.values())
    assert drift_of(model) <= 0.02 * 1.001


def test_bad_arguments_are_named(trained, digits):
    net = trained()
    fisher = eata.fisher(net, digits[0][:64])
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="budget="):
            eata.EATA(net, fisher, budget=value)
    with pytest.raises(ValueError, match=r"takes the place of beta=1; give one of them"):
        eata.EATA(net, fisher, budget=0.02, **eata.preset("cifar10"))
    by_batch = eata.fisher(net, digits[0][:64], per="batch")
    with pytest.raises(ValueError, match=r"per='batch'; compute it with eata.fisher\(net, images, per='sample'\)"):
        eata.EATA(net, by_batch, budget=0.02)
    with pytest.raises(ValueError, match="per=None"):
        eata.EATA(net, dict(copy.deepcopy(fisher)), budget=0.02)
    spoiled = copy.deepcopy(fisher)
    spoiled.curvature.popitem()
    with pytest.raises(ValueError, match=r"curvature of .* is missing"):
        eata.EATA(net, spoiled, budget=0.02)
    with pytest.raises(ValueError, match="this Fisher has none"):
        eata.EATA(net, eata.Fisher(fisher, "sample"), budget=0.02)
    eata.EATA(net, fisher, **eata.preset("imagenet") | {"beta": None, "budget": 0.02})

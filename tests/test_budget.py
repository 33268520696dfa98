"""The forgetting budget: the projection beside a naive one by bisection, and what it promises of a whole stream."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eata
import naive
from eata import budget


def naive_drift(omega, moved):
    return sum(0.5 * f * d * d for f, d in zip(omega, moved, strict=True))


def naive_held(omega, moved, kappa):
    """By bisection on mu, one number at a time."""
    if naive_drift(omega, moved) <= kappa:
        return list(moved)

    def at(mu):
        return [d / (1 + mu * f) for f, d in zip(omega, moved, strict=True)]

    low, high = 0.0, 1.0
    while naive_drift(omega, at(high)) > kappa:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if naive_drift(omega, at(middle)) > kappa else (low, middle)
    return at(high)


def drift_of(model):
    """From the parameters, the source and the Fisher, not by the model's own means."""
    total = 0.0
    for name, theta in model.parameters.items():
        for f, t, s in zip(
            model.importance[name].flatten().tolist(),
            theta.flatten().tolist(),
            model.source[name].flatten().tolist(),
            strict=True,
        ):
            total += 0.5 * f * (t - s) ** 2
    return total


KAPPA = 1e-5  # small: every kind of net gets there

numbers = st.lists(
    st.tuples(st.one_of(st.just(0.0), st.floats(1e-8, 1e4)), st.floats(-1e3, 1e3)), min_size=1, max_size=30
)


@given(numbers, st.floats(1e-6, 10.0))
def test_the_projection_is_the_naive_one(pairs, kappa):
    omega, moved = (list(column) for column in zip(*pairs, strict=True))
    got = budget.held(torch.tensor(omega, dtype=torch.float64), torch.tensor(moved, dtype=torch.float64), kappa)
    assert naive_drift(omega, got.tolist()) <= kappa * (1 + 1e-9)
    assert got.tolist() == pytest.approx(naive_held(omega, moved, kappa), rel=1e-4, abs=1e-9)


@given(numbers, st.floats(1e-6, 10.0), st.randoms(use_true_random=False))
def test_no_point_within_the_budget_is_nearer(pairs, kappa, random):
    omega, moved = (list(column) for column in zip(*pairs, strict=True))
    got = budget.held(
        torch.tensor(omega, dtype=torch.float64), torch.tensor(moved, dtype=torch.float64), kappa
    ).tolist()

    def distance(point):
        return math.dist(point, moved)

    for _ in range(20):  # any other point, brought into the budget along the ray
        other = [d + random.gauss(0, 1 + abs(d)) for d in got]
        scale = min(1.0, math.sqrt(kappa / max(naive_drift(omega, other), 1e-300)))
        assert distance(got) <= distance([scale * d for d in other]) * (1 + 1e-5) + 1e-9


def test_a_huge_range_of_importance():
    omega = torch.logspace(-12, 12, 49, dtype=torch.float64)
    for size in (1e-6, 1.0, 1e6, 1e30):
        got = budget.held(omega, torch.full_like(omega, size), 0.02)
        assert budget.drift(omega, got) <= 0.02 * (1 + 1e-9)
        assert bool(torch.isfinite(got).all())


def model_of(net, images, **arguments):
    settings = {"e0": 0.9, "epsilon": 1.0, "lr": 0.01, "budget": 0.02, **arguments}
    return eata.EATA(net, eata.fisher(net, images), **settings)


@pytest.mark.parametrize("norm", ["bn", "gn", "ln", "in"])
def test_the_step_is_a_naive_one_and_the_naive_projection(norm, trained, stream, digits):
    net = trained(norm, torch.float64)
    images = digits[0][:100].double()
    reference = naive.Naive(net, 0.05, (0.9, 1.0, 0.1), eata.fisher(net, images), beta=0.0)
    model = model_of(net, images, lr=0.05, budget=KAPPA, backward="full")
    reached = False
    for x in stream([16] * 12, torch.float64):
        torch.testing.assert_close(model(x), reference(x), atol=1e-6, rtol=1e-6)
        names = list(reference.parameters)
        omega = [f for n in names for f in model.importance[n].flatten().tolist()]
        moved = [d for n in names for d in (reference.parameters[n] - reference.source[n]).flatten().tolist()]
        reached |= naive_drift(omega, moved) > KAPPA
        held = iter(naive_held(omega, moved, KAPPA))
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
    eata.EATA(net, fisher, **eata.preset("imagenet") | {"beta": None, "budget": 0.02})

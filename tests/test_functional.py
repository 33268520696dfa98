import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import naive
from eata import functional as f

logits = arrays("float64", array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6), elements=st.floats(-1e4, 1e4))


@given(logits)
def test_entropy_is_the_loop_over_classes(rows):
    got = f.entropy(torch.tensor(rows))
    for value, row in zip(got.tolist(), rows.tolist(), strict=True):
        assert value == pytest.approx(naive.entropy(row), abs=1e-9)


@given(logits)
def test_entropy_lies_between_zero_and_ln_c(rows):
    got = f.entropy(torch.tensor(rows))
    assert (got >= -1e-12).all()
    assert (got <= math.log(rows.shape[1]) + 1e-9).all()


@given(logits, st.floats(-100, 100))
def test_entropy_ignores_a_constant_added_to_all_logits(rows, constant):
    x = torch.tensor(rows)
    torch.testing.assert_close(f.entropy(x), f.entropy(x + constant), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_logits_give_finite_entropy_and_gradient(dtype):
    x = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], dtype=dtype, requires_grad=True)
    h = f.entropy(x)
    h.sum().backward()
    assert torch.isfinite(h).all()
    assert torch.isfinite(x.grad).all()
    assert h.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_dense_predictions_are_averaged_over_pixels():
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    for b in range(2):
        pixels = [x[b, :, i, j].tolist() for i in range(3) for j in range(4)]
        assert f.entropy(x)[b].item() == pytest.approx(sum(map(naive.entropy, pixels)) / 12)
        means = [sum(naive.softmax(p)[c] for p in pixels) / 12 for c in range(5)]
        assert f.probabilities(x)[b].tolist() == pytest.approx(means)
        assert f.energy(x)[b].item() == pytest.approx(sum(-math.log(sum(math.exp(v) for v in p)) for p in pixels) / 12)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=8), st.floats(0.01, 5))
def test_reliability_is_equation_3(entropies, threshold):
    got = f.reliability(torch.tensor(entropies, dtype=torch.float64), threshold).tolist()
    want = [math.exp(threshold - h) if h < threshold else 0.0 for h in entropies]
    assert got == pytest.approx(want)
    assert all(w == 0 or w > 1 for w in got)


def test_reliability_is_strict_and_detached():
    h = torch.tensor([1.0, 0.5], requires_grad=True)
    weight = f.reliability(h, 1.0)
    assert weight[0] == 0
    assert not weight.requires_grad


@given(logits, st.floats(0.05, 1))
def test_diversity_is_equation_5(rows, epsilon):
    predictions = [naive.softmax(r) for r in rows.tolist()]
    average = [1 / rows.shape[1]] * rows.shape[1]
    average[0] += 0.1
    cosines = [abs(naive.cosine(p, average)) for p in predictions]
    got = f.diversity(
        torch.tensor(predictions, dtype=torch.float64), torch.tensor(average, dtype=torch.float64), epsilon
    )
    for kept, cosine in zip(got.tolist(), cosines, strict=True):
        if abs(cosine - epsilon) > 1e-9:
            assert kept == (cosine < epsilon)


def test_diversity_without_an_average_keeps_all():
    assert f.diversity(torch.eye(3), None, 0.01).all()


@given(st.floats(0, 1), arrays("float64", (4, 3), elements=st.floats(0, 1)))
@settings(max_examples=30)
def test_moving_average_is_equation_4(alpha, rows):
    first = f.moving_average(None, torch.tensor(rows[:2]), alpha)
    second = f.moving_average(first, torch.tensor(rows[2:]), alpha)
    for c in range(3):
        m1 = (rows[0][c] + rows[1][c]) / 2
        assert first[c].item() == pytest.approx(m1)
        assert second[c].item() == pytest.approx(alpha * (rows[2][c] + rows[3][c]) / 2 + (1 - alpha) * m1)


def test_moving_average_of_nothing_stays():
    m = torch.tensor([0.5, 0.5])
    assert f.moving_average(m, torch.empty(0, 2), 0.1) is m
    assert f.moving_average(None, torch.empty(0, 2), 0.1) is None


def test_fisher_penalty_is_equation_7_without_a_half():
    theta, source, omega = torch.randn(3, 7, dtype=torch.float64)
    want = sum(o * (t - s) ** 2 for t, s, o in zip(theta.tolist(), source.tolist(), omega.tolist(), strict=True))
    assert f.fisher_penalty(
        [(theta[:3], source[:3], omega[:3]), (theta[3:], source[3:], omega[3:])]
    ).item() == pytest.approx(want)

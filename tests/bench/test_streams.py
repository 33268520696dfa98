"""The order of streams: pure, complete, the same for all, and as correlated as they say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eata.bench.streams import GRADUAL, Part, order, parse, parts
from eata.data import CORRUPTIONS

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80)
DELTAS = st.one_of(st.none(), st.just(0.0), st.floats(0.001, 100))
NAMES = ["reset", "continual", "gradual", "mixed", "correlated", "correlated:0.1", "recurring:5", "gradual+correlated",
         "mixed+correlated:0.5", "recurring:2+correlated", "reset+correlated:0.1"]  # fmt: skip


@given(LABELS, DELTAS, st.integers(0, 2**31), st.integers(1, 3))
def test_every_image_comes_once_and_in_the_same_order(labels, delta, seed, shifts):
    part = Part(tuple(("fog", level + 1) for level in range(shifts)), seed, delta)
    first = order(part, labels)
    assert sorted(first.tolist()) == list(range(len(labels) * shifts))
    assert np.array_equal(first, order(part, np.array(labels)))


@given(LABELS, st.integers(0, 1000))
def test_sorted_by_class_is_sorted(labels, seed):
    came = np.array(labels)[order(Part((("fog", 5),), seed, 0.0), labels)]
    assert (np.diff(came) >= 0).all()


def changes(delta, seed):
    labels = np.random.RandomState(0).randint(0, 10, 1000)
    came = labels[order(Part((("fog", 5),), seed, delta), labels)]
    return int((np.diff(came) != 0).sum())


def test_the_smaller_delta_the_more_sorted():
    means = [np.mean([changes(delta, seed) for seed in range(10)]) for delta in (0.0, 0.01, 0.1, 1.0)]
    assert means[0] == 9
    assert means[0] <= means[1] < means[2] < means[3] <= 99  # ten slots with at most ten runs each
    assert changes(None, 0) > 800


@pytest.mark.parametrize("delta", [1e-6, 1e-3, 1e6])
def test_extreme_deltas_are_whole_streams(delta):
    assert 9 <= changes(delta, 1) <= 99


@given(st.sampled_from(NAMES))
def test_names_come_back(name):
    assert parse(parse(name).name) == parse(name)


def test_parts():
    names = list(CORRUPTIONS)
    assert [p.shifts for p in parts(parse("continual"), names, 5, 7)] == [((name, 5),) for name in names]
    gradual = parts(parse("gradual+correlated"), names, 5, 7)
    assert [level for p in gradual[:9] for _, level in p.shifts] == list(GRADUAL)
    assert len(gradual) == 9 * 15
    assert all(p.delta == 0 for p in gradual)
    (mixed,) = parts(parse("mixed"), names, 3, 7)
    assert mixed.shifts == tuple((name, 3) for name in names)
    rounds = parts(parse("recurring:4"), names, 5, 7)
    assert [p.seed for p in rounds] == [7 + turn for turn in range(4) for _ in names]
    assert parts(parse("correlated"), names, 5, 7) == parts(parse("continual+correlated"), names, 5, 7)


def test_a_round_comes_in_an_order_of_its_own():
    first, second = parts(parse("recurring:2"), ["fog"], 5, 0)
    assert not np.array_equal(order(first, [0] * 50), order(second, [0] * 50))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("correlated:0", "delta above 0"), ("correlated:-1", "delta above 0"), ("correlated:x", "delta above 0"),
        ("correlated:nan", "delta above 0"), ("correlated:inf", "delta above 0"), ("correlated:", "delta above 0"),
        ("recurring:0", "1 or more"), ("recurring", "1 or more"), ("recurring:-2", "1 or more"),
        ("recurring:1.5", "1 or more"), ("mixed:3", "takes no number"), ("mixed+gradual", "twice"),
        ("correlated+correlated:0.1", "twice"), ("graduel", "did you mean 'gradual'"), ("", "stream"),
    ],
)  # fmt: skip
def test_bad_names_are_refused_in_a_sentence(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_labels_are_needed_where_a_stream_sorts_by_them():
    for labels in ([-1, -1], [0, -1]):
        with pytest.raises(ValueError, match="no labels"):
            order(Part((("fog", 5),), 0, 0.1), labels)
        assert len(order(Part((("fog", 5),), 0), labels)) == 2

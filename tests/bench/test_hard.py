"""The hard streams: what is in them. On digits, which come with scikit-learn."""

import collections

import numpy as np
import pytest
import torch

from eata.bench import hard

SOURCE = hard.Source(192, seed=3, data="digits")


def labels(batches):
    return torch.cat([y for _, y in batches])


@pytest.mark.parametrize(
    "name", [name for name in hard.STREAMS if name not in ("continual", "mixed", "recurring", "new")]
)
def test_a_stream_is_the_same_each_time_and_another_for_another_seed(name):
    make = hard.STREAMS[name].make
    first, again = make(SOURCE), make(SOURCE)
    assert len(first) == len(again)
    for (x, y), (same, label) in zip(first, again, strict=True):
        assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(same))
        assert torch.equal(y, label)
        assert x.shape == (len(y), 3, 32, 32)
    other = make(hard.Source(192, seed=4, data="digits"))
    assert not all(
        torch.equal(torch.nan_to_num(a[0]), torch.nan_to_num(b[0])) for a, b in zip(first, other, strict=True)
    )


def test_sorted_is_sorted_and_has_every_image_once():
    found = labels(hard.STREAMS["sorted"].make(SOURCE))
    assert found.tolist() == sorted(SOURCE.load(None)[1].tolist())


def test_dirichlet_clusters_classes_and_has_every_image_once():
    found = labels(hard.in_order(SOURCE, None, 0.1))
    assert sorted(found.tolist()) == sorted(SOURCE.load(None)[1].tolist())

    def largest(y):  # how often the most frequent class comes, in stretches of 16
        return np.mean([collections.Counter(part.tolist()).most_common(1)[0][1] for part in y.split(16)])

    assert largest(found) > 1.5 * largest(labels(hard.clean(SOURCE)))


def test_one_class_has_one_class():
    found = labels(hard.STREAMS["one-class"].make(SOURCE))
    assert set(found.tolist()) == {3}
    assert len(found) == 8 * 192


@pytest.mark.parametrize(("name", "share"), [("garbage", 0.3), ("frames", 0.1), ("nan", 0.1)])
def test_spoilt_rows_do_not_count(name, share):
    for (x, y), (whole, known) in zip(hard.STREAMS[name].make(SOURCE), hard._shuffled(SOURCE, "fog"), strict=True):
        spoilt = y < 0
        assert int(spoilt.sum()) == round(share * len(y))
        assert torch.equal(x[~spoilt], whole[~spoilt])
        assert torch.equal(y[~spoilt], known[~spoilt])
        assert not torch.equal(x[spoilt], whole[spoilt])


def test_noise_comes_before_images():
    found = labels(hard.STREAMS["noise"].make(SOURCE))
    assert bool((found[:192] < 0).all())
    assert bool((found[192:] >= 0).all())


def test_alternating_changes_with_each_batch():
    batches = hard.alternating(SOURCE)
    parts = [hard._shuffled(SOURCE, name, 64) for name in hard.SHIFT]
    assert torch.equal(batches[1][0], parts[1][0][0])


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_batch_sizes(size):
    assert {len(y) for _, y in hard.STREAMS[f"batch{size}"].make(SOURCE)} == {size}

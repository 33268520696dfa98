from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eata.data.stream import ArrayStream


def make(count: int = 10, name: str = "set", seed: int = 0, classes: int = 3) -> ArrayStream:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, (count, 3, 4, 4), dtype=np.uint8))
    return ArrayStream(name, [str(number) for number in range(classes)], images, torch.arange(count) % classes)


@given(count=st.integers(1, 40), size=st.integers(1, 50), seed=st.none() | st.integers(0, 3000))
def test_each_image_comes_once_and_only_the_last_batch_is_smaller(count, size, seed):
    stream = make(count)
    batches = list(stream.batches(size, seed=seed))
    images = torch.cat([x for x, _ in batches])
    assert [len(x) for x, _ in batches[:-1]] == [size] * (len(batches) - 1)
    everything = torch.cat([x for x, _ in stream.batches(count, seed=None)])
    assert sorted(images.flatten(1).tolist()) == sorted(everything.flatten(1).tolist())


def test_order_depends_on_the_seed_and_nothing_else():
    labels = {name: [y.tolist() for _, y in make(seed=seed).batches(4, seed=2020)] for seed, name in enumerate("ab")}
    assert labels["a"] == labels["b"]
    torch.rand(3)  # nor on the global generator
    assert [y.tolist() for _, y in make().batches(4, seed=2020)] == labels["a"]
    assert [y.tolist() for _, y in make().batches(4, seed=2021)] != labels["a"]
    assert [y.tolist() for _, y in make().batches(10, seed=None)] == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0]]


def test_the_order_of_seed_2020_never_changes():
    # numpy promises these draws for ever; a change here would make results of two versions incomparable
    stream = ArrayStream(
        "set", ["a"], torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1).expand(8, 3, 1, 1), torch.zeros(8)
    )
    (images, _), *_ = stream.batches(8, seed=2020, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    assert images[:, 0, 0, 0].round().tolist() == np.random.RandomState(2020).permutation(8).tolist()


def test_normalization_is_that_of_the_model():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.4, 0.3)
    stream = make()
    raw = torch.cat([x for x, _ in stream.batches(4, seed=7)])
    normal = torch.cat([x for x, _ in stream.batches(4, seed=7, mean=mean, std=std)])
    assert raw.min() >= 0
    assert raw.max() <= 1
    for channel in range(3):
        torch.testing.assert_close(normal[:, channel], (raw[:, channel] - mean[channel]) / std[channel])


def test_digest_tells_images_and_labels_apart():
    assert make().digest == make(name="other").digest
    assert len({make().digest, make(seed=1).digest, make(classes=2).digest, make(9).digest}) == 4


def test_bad_batch_size():
    with pytest.raises(ValueError, match="batch of 0 images"):
        next(make().batches(0))


def test_label_mismatch_names_both_counts():
    stream = make(classes=3)
    stream.require(3)
    with pytest.raises(ValueError, match=r"model has 10 classes, but set has 3"):
        stream.require(10)

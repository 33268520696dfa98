from __future__ import annotations

import copy

import pytest
import torch

import eata


def configured(net):
    net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    return net


@pytest.mark.parametrize("by", ["crops", "augmix"])
def test_is_the_mean_softmax_of_the_copies(trained, stream, by):
    net = configured(trained("gn"))
    plain = copy.deepcopy(net).eval()
    (x,) = stream([5])
    model = eata.Augment(net, copies=6, copies_by=by, seed=3)
    made = []
    make = getattr(model.copies, by)
    setattr(model.copies, by, lambda image: made.append(make(image)) or made[-1])
    logits = model(x)
    for i in range(5):
        mean = torch.zeros(10)
        for c in range(6):
            row = plain(made[i][c][None])[0].detach()
            mean += torch.exp(row) / torch.exp(row).sum() / 6
        torch.testing.assert_close(torch.softmax(logits[i], 0), mean)
    assert not torch.equal(made[0][0], made[0][1])
    assert vars(model.stats) == {"forwards": 30, "backwards": 0, "reliable": 0, "steps": 0, "rejected": 0}


def test_batch_norm_uses_the_source_statistics_so_images_are_independent(trained, stream):
    (x,) = stream([4])
    together = eata.Augment(configured(trained()), copies=4)(x)
    one_by_one = eata.Augment(configured(trained()), copies=4)
    torch.testing.assert_close(torch.cat([one_by_one(image[None]) for image in x]), together)


def test_same_seed_same_answer_and_reset_starts_again(trained, stream):
    (x,) = stream([2])
    model = eata.Augment(configured(trained("gn")), copies=4)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    model.reset()
    assert torch.equal(model(x), first)
    assert not torch.equal(eata.Augment(configured(trained("gn")), copies=4, seed=1)(x), first)


def test_resumes_bit_for_bit(trained, stream, tmp_path):
    x, y = stream([2, 3])
    model = eata.Augment(configured(trained("gn")), copies=4)
    model(x)
    model.save(tmp_path / "state.safetensors")
    expected = model(y)
    other = eata.Augment(configured(trained("gn")), copies=4)
    other.load(tmp_path / "state.safetensors")
    assert torch.equal(other(y), expected)
    assert other.stats == model.stats


def test_the_presets_take_the_copies_of_the_published_row():
    assert [eata.preset(name, eata.Augment).get("copies_by") for name in ("cifar10", "imagenet")] == ["augmix"] * 2


def test_an_unknown_kind_of_copies_is_refused(trained):
    with pytest.raises(eata.EataError, match="no kind of copies 'augmx'; did you mean 'augmix'"):
        eata.Augment(configured(trained("gn")), copies_by="augmx")


@pytest.mark.parametrize("copies", [0, -1])
def test_needs_a_copy(trained, copies):
    with pytest.raises(ValueError, match="copies"):
        eata.Augment(trained(), copies=copies)


def test_bad_images_are_refused(trained):
    model = eata.Augment(configured(trained("gn")), copies=2)
    with pytest.raises(ValueError, match=r"takes batches \(B, C, H, W\)"):
        model(torch.zeros(2, 64))
    model.net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    net = model.unwrap()
    with pytest.raises(ValueError, match="1 channels"):
        eata.Augment(net, copies=2)(torch.zeros(2, 1, 8, 8))


def test_a_segmentation_net_is_refused():
    net = configured(torch.nn.Conv2d(1, 3, 1))
    with pytest.raises(ValueError, match="for classifiers"):
        eata.Augment(net, copies=2)(torch.zeros(1, 1, 8, 8))


def test_a_row_with_nan_does_not_disturb_the_others(trained, stream):
    (x,) = stream([3])
    expected = eata.Augment(configured(trained("gn")), copies=3)(x[1:])
    x[0, 0, 0, 0] = float("nan")
    logits = eata.Augment(configured(trained("gn")), copies=3)(x)
    assert torch.isnan(logits[0]).all()
    assert torch.equal(logits[1:], expected)


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (7, 12), (85, 90)])
def test_no_image_is_smaller_than_the_crop(trained, size):
    model = eata.Augment(configured(trained("gn")), copies=3)
    assert torch.isfinite(model(torch.rand(2, 1, *size))).all()

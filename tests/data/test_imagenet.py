from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import eata.data
from eata.data import imagenet

TENCH, GOLDFISH, SHARK, TISSUE = "n01440764", "n01443537", "n01484850", "n15075141"


def write(folder, wnids, size=(260, 240), count=2):
    rng = np.random.default_rng(0)
    for wnid in wnids:
        (folder / wnid).mkdir(parents=True)
        for number in range(count):
            noise = rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / wnid / f"ILSVRC2012_{number}.JPEG", quality=95)


def labels(stream):
    return torch.cat([y for _, y in stream.batches(3, seed=None)]).tolist()


def test_the_class_list():
    assert list(imagenet.wnids()) == sorted(set(imagenet.wnids()))
    assert len(imagenet.names()) == 1000
    assert imagenet.names()[999] == "toilet tissue"
    assert len(imagenet.rendition_index()) == 200


def test_clean(tmp_path):
    write(tmp_path / "val", [GOLDFISH, TISSUE])
    stream = eata.data.load(f"imagenet:{tmp_path}")
    assert labels(stream) == [1, 1, 999, 999]
    assert len(stream.class_names) == 1000
    assert stream.class_index is None
    assert next(stream.batches(2))[0].shape == (2, 3, 224, 224)
    assert labels(eata.data.load(f"imagenet:{tmp_path / 'val'}")) == [1, 1, 999, 999]
    stream.require(1000)
    with pytest.raises(ValueError, match="10 classes, but imagenet has 1000"):
        stream.require(10)


def test_corrupted_files_are_only_cropped(tmp_path):
    write(tmp_path / "weather" / "fog" / "3", [TENCH], size=(224, 224), count=1)
    write(tmp_path / "snow" / "3", [TENCH], size=(230, 226), count=1)
    stream = eata.data.load(f"imagenet-c:{tmp_path}", corruption="fog", severity=3)
    assert stream.name == "imagenet-c fog 3"
    assert not stream.generated
    (images, _), *_ = stream.batches(1)
    stored = np.asarray(Image.open(next((tmp_path / "weather").rglob("*.JPEG"))))
    assert np.array_equal((images[0] * 255).round().byte().permute(1, 2, 0).numpy(), stored)
    (images, _), *_ = eata.data.load(f"imagenet-c:{tmp_path}", corruption="snow", severity=3).batches(1)
    stored = np.asarray(Image.open(next((tmp_path / "snow").rglob("*.JPEG"))))[1:225, 3:227]
    assert np.array_equal((images[0] * 255).round().byte().permute(1, 2, 0).numpy(), stored)


def test_imagenet_c_without_what_is_asked(tmp_path):
    write(tmp_path / "fog" / "5", [TENCH], count=1)
    with pytest.raises(ValueError, match="no clean images"):
        eata.data.load(f"imagenet-c:{tmp_path}")
    with pytest.raises(FileNotFoundError, match="no folder fog/1/<wnid>"):
        eata.data.load(f"imagenet-c:{tmp_path}", corruption="fog", severity=1)


def test_a_folder_of_some_of_the_classes_counts_among_them(tmp_path):
    write(tmp_path, [TISSUE, GOLDFISH], count=1)
    known = {"num_classes": 1000, "input_size": (3, 224, 224)}
    stream = eata.data.load(f"folder:{tmp_path}", config=known)
    assert (labels(stream), stream.class_index) == ([0, 1], (1, 999))
    stream.require(1000)
    assert eata.data.load(f"folder:{tmp_path}", config=known | {"num_classes": 2}).class_index is None
    write(tmp_path, ["someone's own"], count=1)
    assert eata.data.load(f"folder:{tmp_path}", config=known).class_index is None


def test_renditions_count_among_their_200(tmp_path):
    write(tmp_path / "imagenet-r", [GOLDFISH, SHARK], count=1)
    stream = eata.data.load(f"imagenet-r:{tmp_path}")
    assert labels(stream) == [0, 1]
    assert stream.class_index[:3] == (1, 2, 4)
    assert stream.class_names[:2] == ("goldfish", "great white shark")
    logits = torch.zeros(1000)
    logits[imagenet.wnids().index(SHARK)] = 1
    assert logits[list(stream.class_index)].argmax() == 1
    stream.require(1000)
    with pytest.raises(ValueError, match="has 10 classes, but imagenet-r picks its 200"):
        stream.require(10)


def test_a_class_outside_imagenet_r(tmp_path):
    write(tmp_path, [TENCH], count=1)
    with pytest.raises(ValueError, match="n01440764, which is none of the 200 classes"):
        eata.data.load(f"imagenet-r:{tmp_path}")


def test_folders_that_are_not_imagenet(tmp_path):
    with pytest.raises(ValueError, match="no images in folders named by WordNet id"):
        eata.data.load(f"imagenet:{tmp_path}")
    (tmp_path / "cats").mkdir()
    with pytest.raises(ValueError, match="has the folder cats"):
        eata.data.load(f"imagenet:{tmp_path}")


def test_a_limit_is_spread_over_the_classes(tmp_path):
    write(tmp_path, [TENCH, GOLDFISH, SHARK], count=4, size=(30, 30))
    assert labels(eata.data.load(f"imagenet:{tmp_path}", limit=3)) == [0, 1, 2]
    assert len(eata.data.load(f"imagenet:{tmp_path}", limit=99)) == 12

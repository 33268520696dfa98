from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import eata.models
from eata.models import record
from eata.models.record import Record

MADE = Record(
    model="resnet26-gn",
    data="digits",
    class_names=("a", "b", "c"),
    command="eata train ...",
    seed=3,
    recipe={"epochs": 1},
    commit="",
    torch="2",
    error=12.5,
    images=8,
)


@pytest.fixture
def written(tmp_path):
    net = record.build("resnet26-gn", 3)
    record.write(tmp_path / "net.safetensors", net, MADE)
    return net, tmp_path / "net.safetensors"


def test_what_was_written_is_read(written):
    net, path = written
    found = record.read(path)
    assert dataclasses.replace(found, sha256="") == MADE
    again = eata.models.load(str(path))
    assert all(torch.equal(x, y) for x, y in zip(net.state_dict().values(), again.state_dict().values(), strict=True))
    assert again.pretrained_cfg["label_names"] == ("a", "b", "c")
    assert not again.training


def test_a_changed_byte_is_noticed(written):
    _, path = written
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"net.safetensors is damaged: its SHA-256 is"):
        eata.models.load(str(path))


def test_missing_and_foreign_records(written):
    _, path = written
    beside = path.with_suffix(".json")
    fields = json.loads(beside.read_text())
    beside.write_text(json.dumps({**fields, "colour": "red"}))
    with pytest.raises(ValueError, match=r"net.json is no record of `eata train`"):
        record.read(path)
    beside.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no record net.json beside it"):
        record.read(path)
    with pytest.raises(FileNotFoundError, match="no file of weights"):
        eata.models.load(str(path.with_name("other.safetensors")))


def test_unknown_kind():
    with pytest.raises(ValueError, match="no model 'resnet50' to train; take one of resnet26-bn"):
        record.build("resnet50", 10)


@pytest.mark.parametrize("name", eata.models.names())
def test_packaged_weights_have_a_true_record(name):
    """Loading checks the hash; the recorded error is measured by `eata train --check` (for digits in tests/cli)."""
    net = eata.models.load(name)
    made = record.read(eata.models.zoo.WEIGHTS / f"{name}.safetensors")
    assert name == f"{made.model}-{made.data}"
    assert f"--data {made.data} --model {made.model}" in made.command
    assert net.pretrained_cfg["num_classes"] == len(made.class_names) == 10
    with torch.no_grad():
        assert net(torch.zeros(1, *made.input_size)).shape == (1, 10)

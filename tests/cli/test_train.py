from __future__ import annotations

import json

import pytest
import torch

from eata import cli
from eata.cli import train as command
from eata.data import digits
from eata.models import load, record
from eata.models import train as training
from eata.models.train import Recipe


@pytest.fixture
def run(monkeypatch, capsys):
    def go(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["eata", "train", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return go


@pytest.fixture
def tiny(monkeypatch):
    """Two epochs on 32 digits."""
    few = {split: tuple(part[:32] for part in digits.arrays(split)) for split in ("train", "test")}
    monkeypatch.setattr(digits, "arrays", few.__getitem__)
    monkeypatch.setitem(training.RECIPES, "digits", Recipe(epochs=2, lr=0.05, batch=16))


def test_weights_record_and_resume(run, tiny, tmp_path):
    out = tmp_path / "net.safetensors"
    arguments = ("--data", "digits", "--seed", "4", "--threads", "1", "--out", str(out))
    code, said, err = run(*arguments)
    assert code == 0, err
    made = record.read(out)
    assert f"{made.error:.2f} % error on the 32 clean test images" in said
    assert "epoch 2: loss" in err
    assert made.command == (
        "eata train --data digits --model resnet26-bn --recipe digits --seed 4 --threads 1 --out net.safetensors"
    )
    assert made.recipe["epochs"] == 2
    assert training.error(load(str(out)), *digits.arrays("test")) == made.error

    code, _, err = run(*arguments)
    assert code == 2
    assert "holds an earlier run: add --resume" in err
    weights = out.read_bytes()
    out.unlink()
    code, _, err = run(*arguments, "--resume")  # complete: it only writes the files again
    assert code == 0
    assert out.read_bytes() == weights
    assert "epoch" not in err


def test_ctrl_c_keeps_the_finished_epochs(run, tiny, tmp_path, monkeypatch):
    straight = tmp_path / "straight.safetensors"
    run("--data", "digits", "--threads", "1", "--out", str(straight))
    out = tmp_path / "net.safetensors"
    report = command._Report.epoch

    def interrupt(self, done):
        report(self, done)
        raise KeyboardInterrupt

    monkeypatch.setattr(command._Report, "epoch", interrupt)
    code, _, err = run("--data", "digits", "--threads", "1", "--out", str(out))
    assert code == 130
    assert not out.exists()
    monkeypatch.setattr(command._Report, "epoch", report)
    code, _, err = run("--data", "digits", "--threads", "1", "--out", str(out), "--resume")
    assert code == 0, err
    assert out.read_bytes() == straight.read_bytes()


def test_the_packaged_digits_model_does_what_its_record_says(run):
    code, out, _ = run("--check", "resnet26-bn-digits")
    assert code == 0
    assert "2.33 % error measured, 2.33 % recorded (900 clean test images)" in out


def test_a_false_record_is_noticed(run, tiny, tmp_path):
    out = tmp_path / "net.safetensors"
    run("--data", "digits", "--out", str(out))
    beside = out.with_suffix(".json")
    fields = json.loads(beside.read_text())
    beside.write_text(json.dumps({**fields, "error": fields["error"] - 10}))
    code, _, err = run("--check", str(out))
    assert code == 2
    assert "does not do what its record says" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--out FILE.safetensors"),
        (("--out", "net.pth"), "--out FILE.safetensors"),
        (("--data", "mnist", "--out", "n.safetensors"), "no data set 'mnist' to train on"),
        (("--recipe", "long", "--out", "n.safetensors"), "no recipe 'long'"),
        (("--data", "digits", "--model", "vgg", "--out", "n.safetensors"), "no model 'vgg' to train"),
        (("--check", "resnet26-bn-digit"), "did you mean 'resnet26-bn-digits'"),
    ],
)
def test_bad_arguments(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_of_the_shipped_weights_is_this_command(tiny, tmp_path, run):
    """The shipped CIFAR-10 nets were started from Python; the same calls must give the same weights as the command."""
    torch.manual_seed(0)
    net = record.build("resnet26-gn-rotation", 10)
    net.to(memory_format=torch.channels_last)
    sets = digits.arrays("train"), digits.arrays("test")
    training.train(net, *sets, training.RECIPES["digits"], tmp_path / "c", seed=0, flip=False, resume=True)
    out = tmp_path / "net.safetensors"
    run("--data", "digits", "--model", "resnet26-gn-rotation", "--out", str(out))
    again = load(str(out)).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in net.state_dict().items())


def test_mixed_precision_is_recorded(run, tiny, tmp_path):
    out = tmp_path / "net.safetensors"
    code, _, err = run("--data", "digits", "--threads", "1", "--out", str(out), "--amp", "--device", "cpu")
    assert code == 0, err
    assert record.read(out).command.endswith("--threads 1 --amp --out net.safetensors")
    assert all(value.dtype != torch.bfloat16 for value in load(str(out)).state_dict().values())
    code, _, err = run("--data", "digits", "--threads", "1", "--out", str(out), "--resume")
    assert code == 2
    assert "no checkpoint of this recipe" in err

"""Choosing a device. There is no accelerator here: what torch would say of one is put in its mouth."""

from __future__ import annotations

import pytest
import torch

import eata
from eata import device


def pretend(monkeypatch: pytest.MonkeyPatch, cuda: int = 0, mps: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("name", "cuda", "mps", "expected"),
    [
        ("auto", 0, False, "cpu"),
        ("auto", 2, False, "cuda"),
        ("auto", 0, True, "mps"),
        ("cpu", 2, True, "cpu"),
        ("cuda", 1, False, "cuda"),
        ("cuda:1", 2, False, "cuda:1"),
        ("mps", 0, True, "mps"),
    ],
)
def test_a_device_that_is_there(
    monkeypatch: pytest.MonkeyPatch, name: str, cuda: int, mps: bool, expected: str
) -> None:
    pretend(monkeypatch, cuda, mps)
    assert str(device.choose(name)) == expected


@pytest.mark.parametrize(
    ("name", "cuda", "sentence"),
    [
        ("cuda", 0, "this torch sees no cuda device"),
        ("mps", 1, "this torch sees no mps device"),
        ("cuda:2", 2, "there are 2, counted from 0"),
        ("gpu", 1, "There is no device 'gpu'"),
        ("cuda:x", 1, "There is no device 'cuda:x'"),
        ("cpu:1", 1, "There is no device 'cpu:1'"),
    ],
)
def test_a_device_that_is_not(monkeypatch: pytest.MonkeyPatch, name: str, cuda: int, sentence: str) -> None:
    pretend(monkeypatch, cuda)
    with pytest.raises(eata.EataError, match=sentence):
        device.choose(name)


def test_precision_is_a_choice() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for amp, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        with device.precision(torch.device("cpu"), amp):
            assert layer(x).dtype == dtype
    device.synchronize(torch.device("cpu"))

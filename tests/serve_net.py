"""A small net whose predictions are sure enough to be learnt from, and requests for it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from torch import nn

import eata

OWN = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(*first, nn.Flatten(), nn.Linear(36, 3))
    with torch.no_grad():
        model[-1].weight *= 8
    model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": (3, 16, 16)}
    model.pretrained_cfg |= {"num_classes": 3, "label_names": ("a", "b", "c")}
    return model.eval()
"""
SHAPE = (3, 16, 16)
TOKEN = "a secret"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
NET = "/v2/models/net"


def small_net() -> nn.Module:
    place: dict[str, Any] = {}
    exec(OWN, place)
    made: nn.Module = place["net"]()
    return made


def learner(**arguments: Any) -> eata.Tent:
    """A method that takes a step on every batch."""
    return eata.Tent(small_net(), **{"lr": 0.05, **arguments})


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).uniform(-1, 1, (count, *SHAPE)).astype(np.float32)


def tensor(values: np.ndarray) -> dict[str, Any]:
    found = {"name": "input", "shape": list(values.shape), "datatype": "FP32", "data": values.ravel().tolist()}
    return {"inputs": [found]}


def binary(values: np.ndarray, **more: Any) -> tuple[bytes, dict[str, str]]:
    """A request in binary form, and its headers."""
    raw = values.astype("<f4").tobytes()
    found = {"name": "input", "shape": list(values.shape), "datatype": "FP32"}
    head = json.dumps({"inputs": [{**found, "parameters": {"binary_data_size": len(raw)}}], **more}).encode()
    return head + raw, {"Inference-Header-Content-Length": str(len(head))}

"""The programs in docs/serve.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import eata

GUIDE = Path(__file__).parents[2] / "docs" / "serve.md"
NAME = "resnet26-bn-cifar10"


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)


def test_the_clients(served, capsys):
    _, triton, standard = programs()
    net = eata.models.load(NAME)
    model = eata.Window(eata.ETA(net, **eata.preset("cifar10", eata.ETA)), length=64)
    server = served(model, name=NAME, token="SECRET")
    place: dict[str, object] = {}
    for program in (triton, standard):
        exec(program.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"), place)
    said = capsys.readouterr().out
    assert "'model_version': '0'" in said
    assert np.asarray(place["answer"].as_numpy("logits")).shape == (1, 10)


def test_the_app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place: dict[str, object] = {}
    exec(programs()[0], place)
    assert place["app"].title == "eata serve: photos"


def test_every_metric_and_option_that_is_named_exists():
    from eata.cli.serve import serve
    from eata.serve.metrics import Metrics

    text = GUIDE.read_text()
    names = {family.name for family in Metrics().registry.collect()}
    for metric in set(re.findall(r"`(eata_\w+)", text)):
        assert metric.removesuffix("_total") in names, metric
    options = {name.replace("_", "-") for name in serve.__annotations__}
    for option in set(re.findall(r"`--([a-z-]+)", text)):
        assert option in options, option

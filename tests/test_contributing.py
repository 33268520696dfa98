"""The example in CONTRIBUTING.md is a method that works."""

from pathlib import Path

import torch

import eata

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")


def test_the_example_method_adapts_and_resumes(trained, stream):
    code = TEXT.partition("```python\n")[2].partition("```")[0]
    space: dict[str, object] = {"__name__": "calm"}
    exec(compile(code, "CONTRIBUTING.md", "exec", dont_inherit=True), space)
    model, other = (space["Calm"](trained(), lr=0.01, alpha=0.2) for _ in range(2))
    first, second = stream([16] * 3), stream([16] * 6)[3:]
    for x in first:
        model(x)
    assert 0 < model.stats.backwards < model.stats.forwards
    other.load_state_dict(model.state_dict())
    for x in second:
        assert torch.equal(model(x), other(x))
    assert model.settings["alpha"] == 0.2
    assert isinstance(model, eata.GradientAdapter)

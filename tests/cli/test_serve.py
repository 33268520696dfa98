"""What `eata serve` says of words that it can't serve."""

from __future__ import annotations

import pytest

SERVE = ("serve", "own:net")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (SERVE, "--fisher FOLDER"),
        (("serve", "resnet27"), "no model 'resnet27'"),
        ((*SERVE, "--method", "etaa"), "no method 'etaa'; did you mean 'eta'?"),
        ((*SERVE, "--method", "eta", "--name", "a/b"), "can't have a slash"),
        ((*SERVE, "--method", "eta", "--share", "0"), "share=0.0 is out of range"),
        ((*SERVE, "--method", "eta", "--batch", "64", "--queue", "8"), "queue=8 is out of range"),
        ((*SERVE, "--method", "eta", "--timeout", "0"), "timeout=0.0 is out of range"),
        ((*SERVE, "--method", "eta", "--state", "own.py"), "own.py"),
        ((*SERVE, "--method", "eta", "--replicas", "2"), "--state"),
    ],
)
def test_one_sentence_and_nothing_started(place, eata_says, arguments, said):
    code, text = eata_says(*arguments)
    assert code == 2
    assert said in text
    assert "Traceback" not in text


def test_a_guard_is_built_around_the_window(place):
    from eata.serve.recipe import Recipe

    recipe = Recipe("own:net", method="eta", preset="cifar10", guard=True)
    model = recipe.adapter(recipe.net())
    assert [type(model).__name__, type(model.model).__name__] == ["Guard", "Window"]


def test_eata_is_built_from_a_folder_of_clean_images(place):
    from eata.serve.recipe import Recipe

    recipe = Recipe("own:net", fisher=place / "clean", preset="cifar10", lr=0.5)
    model = recipe.adapter(recipe.net())
    assert [type(model).__name__, type(model.model).__name__] == ["Window", "EATA"]
    assert model.model.settings["lr"] == 0.5
    assert type(recipe.reader(recipe.net()).model).__name__ == "BN"

"""What the command line makes of an error."""

import sys

import pytest

from eata import cli, errors


@pytest.mark.parametrize(
    "problem", [errors.EataError("the culprit [/and] the remedy"), FileNotFoundError(2, "No such file", "x")]
)
def test_what_the_user_can_mend_is_one_sentence(problem, monkeypatch, capsys):
    def fail():
        raise problem

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("eata: ")
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


def test_a_real_bug_keeps_its_traceback(monkeypatch):
    def fail():
        raise ValueError("some library's own")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["eata"])
    with pytest.raises(ValueError, match="own"):
        cli.main()

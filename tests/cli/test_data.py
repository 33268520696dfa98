from __future__ import annotations

import shutil
import urllib.error

import pytest

from eata import cli
from eata.data import cifar10, cifar10_get


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command line in this process; gives exit code, standard output and standard error."""
    monkeypatch.setenv("EATA_DATA", str(tmp_path / "cache"))

    def go(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["eata", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return go


def test_get_without_network_says_one_sentence(run, monkeypatch):
    def offline(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, _, err = run("data", "get", "cifar10")
    assert code == 2
    assert "could not be fetched" in err
    assert "Traceback" not in err


def test_get_from_a_missing_copy(run, tmp_path):
    code, _, err = run("data", "get", "cifar10", "--from", str(tmp_path / "none.tar.gz"))
    assert code == 2
    assert "none.tar.gz does not exist" in err


def test_get_passes_the_copy_on_and_says_where_it_is(run, monkeypatch, tmp_path):
    asked = []

    def get(source, progress):
        asked.append(source)
        progress("reading", 1, 6)
        return True

    monkeypatch.setattr(cifar10_get, "get", get)
    code, out, _ = run("data", "get", "cifar10", "--from", str(tmp_path))
    assert code == 0
    assert asked == [tmp_path]
    assert str(cifar10.folder()) in out


@pytest.mark.parametrize(
    ("name", "word"),
    [("digits", "scikit-learn"), ("imagenet", "imagenet:PATH"), ("cifar10-c", "published"), ("x", "no data set")],
)
def test_sets_that_need_no_fetching(run, name, word):
    code, _, err = run("data", "get", name)
    assert code == 2
    assert word in err


def test_list(run):
    code, out, _ = run("data", "list")
    assert code == 0
    for name in ("digits", "cifar10", "imagenet-r", "folder"):
        assert name in out

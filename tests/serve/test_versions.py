"""What is on disk when a server starts again."""

from __future__ import annotations

import json

import pytest
import torch

from eata.errors import StateError
from eata.serve.versions import KEEP, Kept, Mark, Versions


def saved(folder, number: int, batches: int) -> Versions:
    versions = Versions(folder)
    versions.open()
    versions.save({"weight": torch.tensor(float(number))}, Mark(number, number, batches))
    return versions


def test_a_folder_gives_back_what_was_saved_and_says_what_was_not(tmp_path):
    versions = saved(tmp_path, 3, 40)
    versions.acknowledge(Mark(5, 5, 47))
    versions.close()
    again = Versions(tmp_path)
    mark, loss = again.open()
    assert mark == Mark(version=3, highest=5, batches=47)  # numbers of lost versions are never given again
    assert (loss.batches, loss.versions) == (7, (4, 5))
    assert str(loss) == ("The server stopped without saving: 7 batches were lost, and with them versions 4 to 5.")
    assert again.read(3)["weight"] == 3
    again.save({"weight": torch.tensor(3.0)}, mark)
    again.close()
    once_more = Versions(tmp_path)
    assert once_more.open() == (mark, None)  # a loss is told once
    once_more.close()


def test_a_second_server_refuses_and_the_first_goes_on(tmp_path):
    first = saved(tmp_path, 1, 1)
    with pytest.raises(StateError, match="Another server"):
        Versions(tmp_path).open()
    first.save({"weight": torch.zeros(1)}, Mark(2, 2, 2))
    first.close()
    third = Versions(tmp_path)
    assert third.open()[0].version == 2
    third.close()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"kept": 3}', "null"])
def test_a_foreign_mark_is_refused(tmp_path, content):
    (tmp_path / "current.json").write_text(content)
    versions = Versions(tmp_path)
    with pytest.raises(StateError, match="not written by eata serve"):
        versions.open()
    versions.close()


def test_a_crash_between_version_and_mark_starts_from_the_older_one(tmp_path, monkeypatch):
    versions = saved(tmp_path, 1, 10)
    monkeypatch.setattr(versions, "_write_mark", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        versions.save({"weight": torch.tensor(2.0)}, Mark(2, 2, 20))
    versions.close()
    again = Versions(tmp_path)
    mark, _ = again.open()
    assert again.read(mark.version)["weight"] == 1
    again.close()


def test_old_versions_are_thinned_but_never_the_first_nor_the_one_that_is_served(tmp_path):
    versions = Versions(tmp_path)
    versions.open()
    versions.save({"weight": torch.tensor(0.0)}, Mark(0, 0, 0))
    for number in range(1, 300):
        served = number if number < 200 else 150  # rolled back, and going on from there under new numbers
        versions.save({"weight": torch.tensor(float(served))}, Mark(served, number, number))
        assert served in {each.version for each in versions.kept}
    numbers = [each.version for each in versions.kept]
    assert len(numbers) == KEEP
    assert numbers[0] == 0
    assert {f"version-{each}.safetensors" for each in numbers} == {path.name for path in tmp_path.glob("*.safetensors")}
    assert [Kept(**each) for each in json.loads((tmp_path / "current.json").read_text())["kept"]] == list(versions.kept)
    versions.close()

from __future__ import annotations

import pytest

from eata.files import replacing


def test_a_failure_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "note.txt"
    target.write_text("old")

    def write() -> None:
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        write()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    target = tmp_path / "deep" / "note.txt"
    with replacing(target) as temporary:
        temporary.write_text("one")
    with replacing(target) as temporary:
        temporary.write_text("two")
        assert target.read_text() == "one"
        assert temporary.parent == target.parent  # a rename is atomic only within a file system
    assert target.read_text() == "two"

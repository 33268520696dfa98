"""The commit is that of the library's own repository, or nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import eata.origin


def commit_of_copy(folder: Path) -> str:
    """What a copy of the module says in this folder."""
    shutil.copy(eata.origin.__file__, folder / "origin.py")
    program = "import origin; print(origin.commit())"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_an_installed_copy_in_somebody_elses_repository_has_none(tmp_path: Path) -> None:
    assert commit_of_copy(tmp_path) == ""
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "--message", "theirs")
    assert commit_of_copy(tmp_path) == ""
    git(tmp_path, "add", "origin.py")
    git(tmp_path, "commit", "--message", "ours")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of_copy(tmp_path) == head
    git(tmp_path, "tag", "v1")
    assert commit_of_copy(tmp_path) == head
    (tmp_path / "more.py").write_text("")
    git(tmp_path, "add", "more.py")
    assert commit_of_copy(tmp_path) == f"{head}-dirty"

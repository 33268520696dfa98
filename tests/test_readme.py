"""The README is always true and short: its example runs as written, and its commands, methods and links exist."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_as_written(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    assert (tmp_path / "state.safetensors").is_file()


def test_every_command_of_the_readme_exists():
    from eata.cli import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands} | {g.name for g in app.registered_groups}
    named = set(re.findall(r"^eata (\w+)", README.read_text(), re.MULTILINE))
    assert named
    assert named <= known


def test_a_newcomer_finishes_it():
    assert 500 <= len(README.read_text().split()) <= 900


def test_every_method_is_in_its_table():
    from eata.methods import METHODS

    table = README.read_text().partition("## Methods")[2].partition("## ")[0]
    assert {kind.__name__ for kind in METHODS.values()} <= set(re.findall(r"`(\w+)`", table))


def test_what_the_pages_of_the_repository_link_to_is_there():
    for page in README.parent.glob("*.md"):
        links = re.findall(r"\]\((?!\w+:)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name

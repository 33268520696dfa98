"""The README is always true: its example runs as written, and its commands exist."""

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

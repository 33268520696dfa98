"""The wheel: what is in it, what it asks for, and that it works with just that."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import eata

ROOT = Path(__file__).parents[1]
CORE = {"torch", "numpy", "safetensors"}

pytest.importorskip("build", reason="build is not installed: pip install 'eata[dev]'")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def requirements(text: list[str], extra: str) -> set[Requirement]:
    found = {Requirement(line) for line in text}
    return {one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})}


def closure(first: set[Requirement]) -> set[str]:
    """Distributions of this environment that these requirements bring, whatever they ask for in turn included."""
    todo, seen = [(one.name, {"", *one.extras}) for one in first if one.name != "eata"], set[str]()
    while todo:
        name, extras = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for extra in extras:
            asked = requirements(importlib.metadata.requires(name) or [], extra)
            todo += [(one.name, {"", *one.extras}) for one in asked]
    return seen


@pytest.fixture(scope="session")
def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make an environment with the wheel, an extra or none, and nothing that they do not ask for; gives its ``bin``.

    Packages are not fetched again: the ones that the wheel's own metadata asks for are linked from this environment.
    """

    def make(extra: str) -> Path:
        folder = tmp_path_factory.mktemp(f"venv-{extra or 'core'}")
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
        subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True)
        (here,) = site.glob("eata-*.dist-info")
        asked = importlib.metadata.PathDistribution(here).requires or []
        for name in closure(requirements(asked, extra)):
            distribution = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
                link, target = site / top, Path(str(distribution.locate_file(top)))
                if top != "__pycache__" and not link.exists():
                    link.symlink_to(target)
        return folder / "bin"

    return make


def run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1", "EATA_DATA": str(folder / "none"), "COLUMNS": "200"},
    )


def test_the_archives_pass_the_check_of_the_index(built: Path) -> None:
    pytest.importorskip("twine", reason="twine is not installed: pip install 'eata[dev]'")
    archives = [str(path) for path in built.iterdir()]
    assert len(archives) == 2
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *archives], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_wheel_holds_all_that_it_reads(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src"
    wanted = {str(path.relative_to(package)) for path in (package / "eata").rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert wanted <= inside
    for name in (
        "eata/py.typed",
        "eata/bench/report.html",
        "eata/bench/published.json",
        "eata/data/imagenet_classes.txt",
        "eata/models/weights/resnet26-bn-cifar10.safetensors",
    ):
        assert name in inside
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in inside)


def test_versions_and_requirements(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    assert re.search(r"^Version: (.*)$", metadata, re.MULTILINE).group(1) == eata.__version__  # type: ignore[union-attr]
    asked = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert {one.name for one in requirements(asked, "")} == CORE
    bench = {one.name for one in requirements(asked, "bench")} - CORE
    assert bench == {"typer", "rich", "pillow", "kornia", "matplotlib", "jinja2", "scikit-learn", "filelock"}


METHODS = """
import sys
import torch, eata
import eata.data, eata.models

net = eata.models.load("resnet26-bn-cifar10")
x = torch.randn(8, 3, 32, 32)
fisher = eata.fisher(net, x, samples=8)
for kind in (eata.Source, eata.BN, eata.Tent, eata.ETA, eata.EATA):
    arguments = dict(eata.preset("cifar10", kind), **({"fisher": fisher} if kind is eata.EATA else {}))
    model = kind(net, **arguments)
    assert model(x).shape == (8, 10)
    model.save("state.safetensors")
    model.load("state.safetensors")
    model.reset()
    eata.Window(model, length=8)(x[:1])
    net = eata.models.load("resnet26-bn-cifar10")
rotation = eata.models.load("resnet26-gn-rotation-cifar10")
assert eata.TTT(rotation, copies=2)(x[:1]).shape == (1, 10)
assert eata.Augment(net, copies=2)(x[:1]).shape == (1, 10)
assert eata.data.corrupt(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "fog", 5).shape == (1, 3, 32, 32)
for careless in (
    lambda: eata.MEMO(net, copies=2)(x[:1]),
    lambda: eata.data.load("folder:."),
    lambda: eata.data.load("digits"),
    lambda: eata.data.corrupt(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "frost", 5),
    lambda: eata.data.corrupt(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "jpeg_compression", 5),
):
    try:
        careless()
    except eata.EataError as problem:
        assert "pip install 'eata[bench]'" in str(problem), problem
    else:
        sys.exit("it should have failed")
for name in ("typer", "rich", "PIL", "kornia", "matplotlib", "sklearn", "timm", "ray", "pyarrow"):
    assert name not in sys.modules
"""


def test_the_library_needs_torch_numpy_and_safetensors_only(install: Callable[[str], Path], tmp_path: Path) -> None:
    binaries = install("")
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for program in (example, METHODS):
        done = run([binaries / "python", "-W", "ignore", "-c", program], tmp_path)
        assert done.returncode == 0, done.stderr
    done = run([binaries / "eata", "demo"], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "eata: the commands need the package typer: pip install 'eata[bench]'.\n"


def test_the_commands_need_the_extra_bench_only(install: Callable[[str], Path], tmp_path: Path) -> None:
    binaries = install("bench")
    done = run([binaries / "eata", "demo", "--limit", "8"], tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Report: " in done.stdout
    done = run([binaries / "python", "-m", "eata", "data", "list"], tmp_path)
    assert "imagenet-c" in done.stdout

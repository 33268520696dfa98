"""The site is true: examples and notebook run, generated pages are whole, and every link leads somewhere."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from docs import check_numbers, execute, figure, generate, links, reproduced

import eata

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TESTED = sorted(page for page in DOCS.rglob("*.md") if page.read_text("utf-8").startswith("<!-- tested -->"))
BLOCK = re.compile(r"^(?:<!-- needs: (\S+) -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CSV = """row,severity,column,measure,measured,deviation,published,forwards,backwards,seconds,memory
source,5,fog,error,34.2,,,10000,0,1.5,
source,5,mean,error,49.7,,,10000,0,1.5,
eata,5,mean,error,23.9,,19.7,10000,7618,9.5,
eata,all,mean,error,20.1,,19.7,10000,7618,9.5,
"""


@pytest.mark.parametrize("page", TESTED, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text("utf-8"))
    assert len(blocks) == page.read_text("utf-8").count("```python")
    space = {"__name__": "__main__"}
    for needed, code in blocks:
        if not needed or importlib.util.find_spec(needed):
            exec(compile(code, str(page.name), "exec", dont_inherit=True), space)


def test_pages_with_python_are_tested():
    """Those that are not have a reason: a fragment on the first page, or they are about processes."""
    pages = [*DOCS.glob("*.md"), *DOCS.glob("how/*.md"), *DOCS.glob("reference/*.md")]
    with_python = {page for page in pages if "```python" in page.read_text("utf-8")}
    assert {page.stem for page in with_python - set(TESTED)} <= {"index", "safe", "serve", "scale"}


def test_the_notebook_runs_from_top_to_bottom():
    kept = json.loads(execute.NOTEBOOK.read_text("utf-8"))
    now = execute.executed(kept)
    assert [bool(cell.get("outputs")) for cell in now["cells"]] == [bool(cell.get("outputs")) for cell in kept["cells"]]
    assert "the same from here on: True" in generate.notebook(execute.NOTEBOOK)


def test_every_public_name_has_a_place():
    text = "".join(generate.names().values())
    for name in eata.__all__:
        assert re.search(rf":: eata\.{name}$", text, re.MULTILINE), name


def test_every_command_has_its_options():
    from eata.cli import app

    page = generate.commands()
    for command in app.registered_commands:
        assert f"## eata {command.name or command.callback.__name__}\n" in page
    assert "## eata data get\n" in page
    assert re.search(r"^\| `--severity` \| .* \|", page, re.MULTILINE)


def test_results_become_pages(tmp_path):
    folder, into = tmp_path / "results" / "cifar10-c", tmp_path / "pages"
    folder.mkdir(parents=True)
    into.mkdir()
    (folder / "run.json").write_text(json.dumps({"command": "eata bench cifar10-c", "versions": {"eata": "0.1.0"}}))
    (folder / "table.csv").write_text(CSV)
    (folder / "table.md").write_text("| a |\n|---|\n| 1 |\n")
    (folder / "errors.svg").write_text("<svg/>")
    (tmp_path / "results" / "bare").mkdir()
    loose = {"manifest": {"command": "python -m x"}, "rows": [{"name": "a", "error": 1 / 3, "list": [1]}]}
    (tmp_path / "results" / "loose.json").write_text(json.dumps(loose))
    (tmp_path / "results" / "named.json").write_text(json.dumps({"workers": 4, "errors": {"exact": {"fog": 2.5}}}))
    pages = generate.results(tmp_path / "results", into)
    names = {"cifar10-c", "bare", "loose", "named"}
    assert {f"result-{name}" for name in names} | {"results", "reproduced"} == set(pages)
    assert "- workers: 4\n\n|  | fog |\n| --- | --- |\n| exact | 2.5 |" in pages["result-named"]
    assert "| name | error |\n| --- | --- |\n| a | 0.3333 |" in pages["result-loose"]
    for part in ("eata bench cifar10-c", "| 1 |", "versions: eata 0.1.0", "parts/cifar10-c/errors.svg", "table.csv"):
        assert part in pages["result-cifar10-c"]
    assert (into / "parts" / "cifar10-c" / "errors.svg").is_file()
    assert "| eata | 5 | mean | 23.9 | 19.7 | +4.2 |" in pages["reproduced"]
    assert "source" not in pages["reproduced"]


def test_without_results_the_pages_say_so(tmp_path):
    pages = generate.results(tmp_path / "none", tmp_path)
    assert "Nothing is kept yet" in pages["results"]
    assert "Nothing is kept yet" in pages["reproduced"]


def test_the_figure_shows_what_the_table_says(tmp_path):
    (tmp_path / "table.csv").write_text(CSV)
    severity, bars = figure.means(tmp_path / "table.csv")
    assert severity == 5
    assert bars == [("Source", 49.7, 0.0), ("EATA", 23.9, 7618.0)]
    picture = ET.fromstring(figure.svg("Mean error", bars))
    widths = [float(bar.attrib["width"]) for bar in picture.iter() if bar.attrib.get("class") in ("bar", "best")]
    assert widths[0] / widths[1] == pytest.approx(49.7 / 23.9, rel=0.01)


@pytest.mark.parametrize("page", check_numbers.pages(), ids=lambda page: page.name)
def test_every_number_stands_in_results(page):
    assert check_numbers.problems(page) == []


def test_a_number_that_was_not_measured_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "results" / "run"
    folder.mkdir(parents=True)
    (folder / "table.csv").write_text("row,measured,backwards\neata,23.9412,7618.2\n")
    (folder / "run.json").write_text('{"seed": 11.1}')
    (folder / "table.md").write_text("| budget | 23.68 |\n")
    monkeypatch.setattr(check_numbers, "RESULTS", tmp_path / "results")
    check_numbers.measured.cache_clear()
    page = tmp_path / "page.md"
    page.write_text(
        "An error of 1.5 %, and torch 2.6\n"
        "| a | 2.5 |\n"
        "<!-- from run paper -->\n"
        "| a | **23.9** | 7,618 | 19.7 | 23.7 | `0.1` | [1.25](results/1.25) |\n"
        "it was 23.8 here, not 23.94; 7,619; 11.1\n"
        "# Next\n"
        "3.5 points\n"
        "<!-- no measurements -->\n"
        "| lr | 0.005 |\n"
        "<!-- from nothing -->\n"
        "| 4.5 |\n"
        "<!-- made x -->\n| 9.9 |\n<!-- /made -->\n"
    )
    found = [problem.split(": ")[:2] for problem in check_numbers.problems(page)]
    assert found == [
        ["page.md:1", "1.5"],
        ["page.md:2", "2.5"],
        ["page.md:4", "1.25 is not in run, paper"],
        ["page.md:5", "23.8 is not in run, paper"],
        ["page.md:5", "7,619 is not in run, paper"],
        ["page.md:5", "11.1 is not in run, paper"],
        ["page.md:7", "3.5"],
        ["page.md:11", "there is no results/nothing"],
        ["page.md:11", "4.5 is not in nothing"],
    ]
    check_numbers.measured.cache_clear()


def test_what_reproduced_is_made_from_results():
    page = reproduced.PAGE.read_text("utf-8")
    assert reproduced.filled(page) == page, "run python docs/reproduced.py"
    assert set(re.findall(r"<!-- made (\S+) -->", page)) == set(reproduced.TABLES)


def test_a_table_of_what_reproduced(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduced, "RESULTS", tmp_path)
    reproduced.records.cache_clear()
    assert reproduced.written("none") == reproduced.grid(["tent"], [reproduced.Column("here", "none")])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "table.md").write_text("| as it is |\n")
    (tmp_path / "run" / "table.csv").write_text(
        "row,severity,column,measure,measured,deviation,published,backwards\n"
        "tent,5,mean,error,24.63,0.125,20.2,10000\n"
        "eata-lifelong,5,mean,error,23.36,,,8290.4\n"
    )
    columns = [
        reproduced.Column("here", "run"),
        reproduced.Column("backwards", "run", what="backwards"),
        reproduced.Column("paper", "run", what="published"),
        reproduced.Column("other", "none"),
    ]
    assert reproduced.grid(["source", "tent", "eata-lifelong"], columns).splitlines() == [
        "| error (%) | here | backwards | paper |",
        "| --- | ---: | ---: | ---: |",
        "| Tent | 24.6 ± 0.12 | 10,000 | 20.2 |",
        "| EATA (lifelong) | 23.4 | 8,290 |  |",
        "",
        "Data: [run](../results/run/table.md).",
    ]
    assert reproduced.grid(["tent"], columns[1:2]).startswith("| backward passes | backwards |")
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "table.csv").write_text(
        "row,severity,column,measure,measured,deviation,published\neata,5,200,accuracy,68.5,0.25,\n"
        "eata,5,fog,accuracy,70,,\neata,5,clean,accuracy,90,,\neata,5,clean after 200,accuracy,90.25,,\n"
    )
    series = [
        ("eata", reproduced.Column("here", "swept", column="")),
        ("eata", reproduced.Column("clean", "swept", column="clean after ")),
        ("eata", reproduced.Column("paper", "swept", column="", what="published")),
    ]
    assert reproduced.swept("Q", series).splitlines()[:4] == [
        "| Q: accuracy (%) | here | clean |",
        "| --- | ---: | ---: |",
        "| 200 | 68.5 ± 0.25 | 90.2 |",
        "| Fog | 70.0 |  |",
    ]
    assert reproduced.swept("Q", [("tent", reproduced.Column("here", "none"))]) == reproduced.MISSING
    for measure, before, gain in (("error", "", "+0.50"), ("accuracy", "clean after ", "-0.50")):
        lines = [f"{row},5,{before}{column},{measure},{value},"
                 for row, values in (("tent", (30, 20)), ("eata", (28, 21)))
                 for column, value in zip(("fog", "snow"), values, strict=True)]  # fmt: skip
        head = "row,severity,column,measure,measured,deviation"
        (tmp_path / "swept" / "table.csv").write_text("\n".join([head, *lines]))
        reproduced.records.cache_clear()
        table = reproduced.paired("swept", ["eta", "eata"], "tent", (3, 5), before)
        assert table.endswith(f"---:|\n| EATA | 1 of 2 | {gain} ± 1.50 |")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "table.csv").write_text("\n".join([head, "rows,5,fog,error,27,", "rows,5,snow,error,22,"]))
    (tmp_path / "swept" / "table.csv").write_text(
        "\n".join([head, "tent,5,fog,accuracy,70,", "tent,5,snow,accuracy,80,"])
    )
    reproduced.records.cache_clear()
    table = reproduced.paired("swept+other", ["rows"], "tent", (5,))
    assert table.endswith("| rows | 1 of 2 | +0.50 ± 2.50 |")
    assert reproduced.written("run") == "| as it is |\n\nData: [run](../results/run/table.md)."
    reproduced.records.cache_clear()


def literals(folder):
    """Every text in the code, as it reads: the parts of an f-string together."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_the_errors_of_the_reference_are_said_by_the_code():
    known = list(literals(ROOT / "src"))
    rows = re.findall(r"^\| (.+?) \| ", (DOCS / "reference" / "errors.md").read_text("utf-8"), re.MULTILINE)[1:]
    assert len(rows) > 15
    for row in rows:
        said = row.removesuffix(" (a warning)")
        parts = [part.strip() for part in re.split(r"\.\.\.", said) if part.strip()]
        assert any(all(part in text for part in parts) for text in known), row


def test_the_architecture_names_what_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    steps = re.findall(r"^\| \d \| `(\w+)\.(\w+)` in `(\S+)`", text, re.MULTILINE)
    assert len(steps) >= 6
    for owner, name, path in steps:
        classes = {n.name: n for n in ast.parse((ROOT / path).read_text("utf-8")).body if isinstance(n, ast.ClassDef)}
        assert name in {part.name for part in classes[owner].body if isinstance(part, ast.FunctionDef)}
    for path in re.findall(r"`((?:tests|src|docs)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("furo", reason="the site needs pip install 'eata[docs]'")
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "generated", "__pycache__"))
    for page in ROOT.glob("*.md"):
        shutil.copyfile(page, tmp_path / page.name)
    if (ROOT / "results").is_dir():
        shutil.copytree(ROOT / "results", tmp_path / "results")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", tmp_path / "docs", tmp_path / "site"]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert links.problems(tmp_path / "site") == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html">b</a><a href="#no">no</a><script src="https://x.example/x.js">')
    (tmp_path / "c.html").write_text(
        '<p id="here"><a href="a.html">a</a><a href="c.html#here">c</a><a href="a.html#x">x</a>'
    )
    found = links.problems(tmp_path)
    assert [line.partition(" ")[0] for line in found] == ["a.html", "a.html", "a.html", "c.html"]

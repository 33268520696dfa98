"""Pages of the site that are made from the code, the notebook and ``results/``, so that nothing is typed twice."""

from __future__ import annotations

import csv
import inspect
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

import eata
from eata.cli import app
from eata.methods import METHODS
from eata.wrapper import Wrapper

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def write(into: Path) -> None:
    """Write every generated page into a folder of their own, anew."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    pages = {**names(), "commands": commands(), "notebook": notebook(NOTEBOOK), **results(RESULTS, into)}
    for name, text in pages.items():
        (into / f"{name}.md").write_text(text, "utf-8")


# --- the public names -------------------------------------------------------------------------------------------------


def names() -> dict[str, str]:
    """A page for each kind of public name, from ``eata.__all__``: a new name finds its page by itself."""
    groups: dict[str, list[str]] = {
        "methods": [],
        "wrappers": [],
        "functions": [],
        "loop": [],
        "errors": [],
        "modules": [],
    }
    for name in eata.__all__:
        groups[_kind(getattr(eata, name))].append(name)
    order = list(METHODS.values())
    groups["methods"].sort(key=lambda name: order.index(getattr(eata, name)))
    titles = {
        "methods": ("Methods", "Arguments that all which learn have in common: {py:class}`eata.GradientAdapter`."),
        "wrappers": ("Around a method", "Each takes an adapter and is one."),
        "functions": ("Functions", "What is called once, before or beside adaptation."),
        "loop": ("The loop and its parts", "What a method is made of, and what it is given."),
        "errors": ("Error classes", "What the caller can mend. [All messages](../reference/errors.md)."),
        "modules": ("Modules", "Equations, data and models."),
    }
    return {
        f"api-{kind}": _page(*titles[kind], *(_automatic(name) for name in found)) for kind, found in groups.items()
    }


def _kind(thing: Any) -> str:
    if inspect.ismodule(thing):
        return "modules"
    if not inspect.isclass(thing):
        return "functions"
    if issubclass(thing, Exception):
        return "errors"
    if thing in METHODS.values():
        return "methods"
    return "wrappers" if issubclass(thing, Wrapper) else "loop"


def _automatic(name: str) -> str:
    thing = getattr(eata, name)
    if inspect.ismodule(thing):
        public = getattr(thing, "__all__", None)
        members = [one for one in public if callable(getattr(thing, one))] if public else []
        only = f"\n   :members: {', '.join(members)}" if members else ""
        return f"## {thing.__name__}\n\n" + _directive(f".. automodule:: {thing.__name__}{only}")
    kind = "class" if inspect.isclass(thing) else "function"
    return _directive(f".. auto{kind}:: eata.{name}")


def _directive(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```"


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *parts]) + "\n"


# --- commands ---------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its options, from what ``--help`` says."""
    root = typer.main.get_command(app)
    about = "The same as `eata COMMAND --help`. The commands come with `pip install 'eata[bench]'`."
    return _page("Commands", about, *_commands(root, "eata"))


def _commands(command: Any, path: str) -> Iterable[str]:
    """One command, or all those of a group."""
    inner = getattr(command, "commands", None)
    if inner is not None:
        for name, one in inner.items():
            yield from _commands(one, f"{path} {name}")
        return
    rows = [_option(one) for one in command.params if one.name != "help"]
    about, example, command_line = inspect.cleandoc(command.help or "").partition("Example: ")
    parts = [f"## {path}", _options_as_code(about)]
    if example:
        parts.append(f"```text\n{command_line}\n```")
    if rows:
        parts.append("\n".join(["| | what | default |", "|---|---|---|", *rows]))
    yield "\n\n".join(parts)


def _option(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    spelled = (parameter.metavar or parameter.name).upper() if is_argument else "`, `".join(parameter.opts)
    default = parameter.default
    shown = "" if default in (None, "", False) or callable(default) else f"`{default}`"
    needed = "needed" if parameter.required else shown
    return f"| `{spelled}` | {_cell(_options_as_code(parameter.help or ''))} | {needed} |"


def _options_as_code(text: str) -> str:
    return re.sub(r"(?<!\S)(--[\w-]+)", r"`\1`", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# --- the notebook -----------------------------------------------------------------------------------------------------


def notebook(path: Path) -> str:
    """The notebook as a page: its text, its code, and what that printed."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output.get("text", []))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    first, *rest = parts
    return "\n\n".join([first, f"{{download}}`The notebook <../{path.name}>` runs offline.", *rest]) + "\n"


# --- results ----------------------------------------------------------------------------------------------------------


def results(folder: Path, into: Path) -> dict[str, str]:
    """A page for each result in ``results/``, the list of them, and what the paper says beside what was measured.

    A result is a folder with ``run.json`` or ``manifest.json``, ``table.md``, ``table.csv`` and figures, as far as they
    are there; or with other JSON files, or it is one: their ``manifest`` and ``rows`` are shown.
    """
    found = {path.stem: path for path in sorted(folder.glob("*")) if path.is_dir() or path.suffix == ".json"}
    pages = {f"result-{name}": _result(path, into) for name, path in found.items()}
    listed = [f"- [{_title(name)}](result-{name}.md){_by(path)}" for name, path in found.items()]
    if not listed:
        listed = ["Nothing is kept yet."]
    about = "Each page is made from a folder of `results/`; [how numbers get there](../numbers.md)."
    tree = "\n".join(["```{toctree}", ":hidden:", "", "reproduced", *pages, "```"])
    pages["reproduced"] = _reproduced(found)
    pages["results"] = _page("All results", about, "\n".join(listed), tree)
    return pages


def _by(path: Path) -> str:
    command = _manifest(path).get("command")
    return f": `{command}`" if command else ""


def _title(name: str) -> str:
    return name.replace("-", " ").replace("_", " ")


def _files(path: Path, *endings: str) -> list[Path]:
    """The files of a result with one of these endings; a result may be a file itself."""
    files = [path] if path.is_file() else sorted(path.glob("*"))
    return [file for file in files if file.suffix in endings]


def _content(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text("utf-8"))
    return content if isinstance(content, dict) else {"rows": content}


def _manifest(path: Path) -> dict[str, Any]:
    """The facts about a result: a file of their own, or what some of its files say of themselves."""
    facts: dict[str, Any] = {}
    for file in _files(path, ".json"):
        content = _content(file)
        if file.name in ("run.json", "manifest.json"):
            facts = content
            break
        facts |= content.get("manifest") or {name: content[name] for name in content if _records(content[name]) is None}
    command = facts.get("command", "")
    return {**facts, "command": " ".join(command)} if isinstance(command, list) else facts


def _records(value: Any) -> list[dict[str, Any]] | None:
    """A list of records as it is, or records by name; None for anything else."""
    if isinstance(value, dict) and value and all(isinstance(one, dict) for one in value.values()):
        value = [{"": name, **one} for name, one in value.items()]
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return value
    return None


def _tables(path: Path) -> list[str]:
    """Tables of the records in a result's files, where nobody wrote a table."""
    tables = []
    for file in _files(path, ".json"):
        content = {} if file.name in ("run.json", "manifest.json") else _content(file)
        tables += [_table(found) for name in content if name != "manifest" and (found := _records(content[name]))]
    for file in _files(path, ".csv"):
        with file.open(encoding="utf-8", newline="") as lines:
            records = list(csv.DictReader(lines))
        tables += [_table(records)] if 0 < len(records) <= LONGEST else []
    return tables


LONGEST = 150  # records of a table on a page; longer ones are there to download


def _table(records: list[dict[str, Any]]) -> str:
    names = [name for name, value in records[0].items() if not isinstance(value, (list, dict))]
    rows = [[_cell(_number(record.get(name))) for name in names] for record in records]
    return "\n".join(f"| {' | '.join(row)} |" for row in [[*map(_title, names)], ["---"] * len(names), *rows])


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _result(path: Path, into: Path) -> str:
    manifest = _manifest(path)
    parts = []
    if manifest.get("command"):
        parts.append(f"```text\n{manifest['command']}\n```")
    facts = [f"- {name}: {_words(value)}" for name, value in manifest.items() if value and name not in UNSHOWN]
    parts.append("\n".join(facts))
    written = [file.read_text("utf-8").strip() for file in _files(path, ".md")]
    parts += written or _tables(path)
    for file in _files(path, ".svg", ".csv"):
        kept = into / "parts" / path.stem / file.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, kept)
        where = f"parts/{path.stem}/{file.name}"
        parts.append(f"![{file.stem}]({where})" if file.suffix == ".svg" else f"{{download}}`{file.name} <{where}>`")
    return _page(_title(path.stem).capitalize(), *filter(None, parts))


UNSHOWN = ("command", "format", "request", "cells")  # said already, or long


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items() if one not in (None, ""))
    if isinstance(value, list):
        return ", ".join(_words(one) for one in value)
    return str(value)


def _reproduced(found: dict[str, Path]) -> str:
    about = "Every number that the paper gives, beside ours, as `results/` has it: error or accuracy in per cent."
    parts = []
    for name, folder in found.items():
        rows = published(folder / "table.csv")
        if rows:
            head = ["| method | severity | of | measured | paper | difference |", "|---|---|---|---|---|---|"]
            lines = [_beside(row) for row in rows]
            parts.append(f"## {_title(name).capitalize()}\n\n" + "\n".join([*head, *lines]))
    return _page("The paper's numbers beside ours", about, *(parts or ["Nothing is kept yet."]))


def _beside(row: dict[str, str]) -> str:
    ours, paper = float(row["measured"]), float(row["published"])
    cells = [row["row"], row["severity"], row["column"].replace("_", " "), f"{ours:.1f}", f"{paper:.1f}"]
    return f"| {' | '.join(cells)} | {ours - paper:+.1f} |"


def published(table: Path) -> list[dict[str, str]]:
    """The records of a table that have a published number; means alone where there are any."""
    if not table.is_file():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        records = [row for row in csv.DictReader(file) if row.get("published") and row.get("measured")]
    means = [row for row in records if row["column"] == "mean"]
    return means or records

"""Every measured number in README and docs stands in ``results/``: ``python docs/check_numbers.py`` lists the others.

A mark says where the numbers after it come from, up to the next mark or heading: ``<!-- from cifar10-c e0 -->`` names
folders (or JSON files) of ``results/``; ``paper`` is ``published.json``. After ``<!-- no measurements -->`` come other
numbers, such as settings. A mark is needed by numbers with a decimal point in tables, and by percentages and points in
sentences; after it, by every number with a decimal point or with thousands. A number stands there if one of the folders
has it, rounded as it is written.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAPER = ROOT / "src" / "eata" / "bench" / "published.json"
EXEMPT = ("docs/changelog.md",)  # of versions whose results are gone

MARK = re.compile(r"<!-- (from ([^>]+)|no measurements) -->")
UNSEEN = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+|<!--.*?-->", re.DOTALL)  # code, targets of links
NUMBER = re.compile(r"(?<![\w.])(\d{1,3}(?:,\d{3})+|\d+\.\d+)(?![\w,]*\d|\.\d)")
DECIMAL = re.compile(r"(?<![\w.])(\d+\.\d+)(?!\w|\.\d)")
CLAIM = re.compile(r"(?<![\w.])(\d+\.\d+)(?= ?%| per cent| points?\b)")


def pages() -> list[Path]:
    """README and every written page of the site."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if not {"generated", "_build"} & set(path.parts)]
    found = sorted([ROOT / "README.md", *docs])
    return [path for path in found if path.relative_to(ROOT).as_posix() not in EXEMPT]


def problems(page: Path) -> list[str]:
    """What is wrong with a page, a line each."""
    found = []
    for line, text, names in _blocks(page.read_text("utf-8")):
        wanted = NUMBER if names else DECIMAL if text.lstrip().startswith("|") else CLAIM
        claims = wanted.findall(UNSEEN.sub("", text))
        if names == ["no measurements"] or not claims:
            continue
        where = f"{page.name}:{line}"
        if not names:
            found.append(f"{where}: {claims[0]}: say where it was measured: <!-- from FOLDER -->")
            continue
        unknown = [name for name in names if not _known(name)]
        found += [f"{where}: there is no results/{name}" for name in unknown]
        values = [value for name in names if name not in unknown for value in measured(name)]
        found += [f"{where}: {claim} is not in {', '.join(names)}" for claim in claims if not _stands(claim, values)]
    return found


def _blocks(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Lines with their number and the names in force; what is made by ``docs/reproduced.py`` has a test of its own."""
    names: list[str] = []
    made = code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        made = (made or "<!-- made " in line) and "<!-- /made -->" not in line
        if line.startswith("#") and not code:
            names = []
        if mark := MARK.search(line):
            names = mark[2].split() if mark[2] else ["no measurements"]
        if not code and not made:
            yield number, line, names


def _known(name: str) -> bool:
    return name == "paper" or (RESULTS / name).is_dir() or (RESULTS / f"{name}.json").is_file()


@cache
def measured(name: str) -> tuple[float, ...]:
    """Every number of a result: its tables (CSV, JSON, Markdown); not its manifest, nor what each stream gave."""
    if name == "paper":
        return tuple(_numbers(json.loads(PAPER.read_text("utf-8"))))
    folder = RESULTS / name
    files = sorted(folder.glob("*")) if folder.is_dir() else [RESULTS / f"{name}.json"]
    values: list[float] = []
    for file in files:
        if file.suffix == ".csv":
            with file.open(encoding="utf-8", newline="") as lines:
                values += _numbers([list(map(_plain, row)) for row in csv.reader(lines)])
        elif file.suffix == ".md":
            values += [float(number.replace(",", "")) for number in NUMBER.findall(file.read_text("utf-8"))]
        elif file.suffix == ".json" and file.name not in ("run.json", "manifest.json"):
            found = json.loads(file.read_text("utf-8"))
            values += _numbers({**found, "manifest": None} if isinstance(found, dict) else found)
    return tuple(values)


def _plain(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def _stands(claim: str, values: list[float]) -> bool:
    """Whether a value is this number, rounded as it is written; shares may be written as percentages.

    >>> _stands("28.8", [28.7514]), _stands("28.8", [0.2875]), _stands("7,620", [7619.6]), _stands("28.8", [28.9])
    (True, True, True, False)
    """
    number = float(claim.replace(",", ""))
    half = 0.5 * 10 ** -len(claim.partition(".")[2]) + 1e-9
    return any(abs(value - number) <= half or abs(100 * value - number) <= half for value in values)


def main() -> int:
    """Say what is wrong; 1 if anything is."""
    found = [problem for page in pages() for problem in problems(page)]
    print("\n".join(found) or "Every number stands in results/.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

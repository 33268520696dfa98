"""Tables and goals from what `benchmarks.statistics` measured: ``results/statistics/table.md``.

    python -m benchmarks.statistics_table

Error in %, mean over the corruptions, and over the orders with the standard deviation between them.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from eata.files import replacing

Row = dict[str, str]
Key = tuple[str, str, str, str]  # order, batch, method, prior
HEAD = "| order | batch | method | prior | corruptions | clean | forwards a sample | orders |\n" + "|---" * 8 + "|"


class Results:
    """The lines of one file."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        with path.open(newline="") as lines:
            self.rows: list[Row] = list(csv.DictReader(lines))

    def by_order(self, key: Key, value: Callable[[Row], float | None]) -> list[float]:
        """For each seed the mean of what the lines of a setting give; lines that give None are left out."""
        own = [row for row in self.rows if (row["order"], row["batch"], row["method"], row["prior"]) == key]
        found = {
            seed: [v for row in own if row["seed"] == seed and (v := value(row)) is not None] for seed in seeds(own)
        }
        return [mean(values) for values in found.values() if values]

    def error(self, batch: str, method: str, prior: str, clean: bool = False) -> float | None:
        """Mean error on the corruptions, or on clean images, of a shuffled stream; None if it was not measured."""
        values = self.by_order(("shuffled", batch, method, prior), lambda row: error_of(row, clean))
        return mean(values) if values else None

    def table(self) -> Iterator[str]:
        """Its lines in Markdown."""
        yield HEAD
        for key in dict.fromkeys((row["order"], row["batch"], row["method"], row["prior"]) for row in self.rows):
            shifted, clean = (self.by_order(key, lambda row, c=c: error_of(row, c)) for c in (False, True))  # type: ignore[misc]
            forwards = self.by_order(key, lambda row: float(row["forwards"]))
            cells = *key, with_spread(shifted), with_spread(clean), f"{mean(forwards):.3f}", str(len(forwards))
            yield f"| {' | '.join(cells)} |"


def seeds(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["seed"] for row in rows))


def error_of(row: Row, clean: bool) -> float | None:
    return float(row["error"]) if row["set"].startswith("clean") == clean else None


def with_spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def goal(name: str, value: float, most: float) -> str:
    """One line: whether the value is at most what was asked for."""
    said = "met" if value <= most + 1e-9 else f"**missed by {value - most:.2f}**"
    return f"| {name} | {value:+.2f} | {most:+.2f} | {said} |"


def against_fixed(results: Results, batch: str, method: str, most: float) -> Iterator[str]:
    """``auto`` against prior 0, and against the best fixed one."""
    where = f"{results.name}, batch {batch}, {method}"
    auto = results.error(batch, method, "auto")
    fixed = {prior: results.error(batch, method, prior) for prior in ("0.0", "16.0", "64.0")}
    measured = {prior: error for prior, error in fixed.items() if error is not None}
    if auto is None or "0.0" not in measured:
        return
    yield goal(f"{where}: auto - prior 0", auto - measured["0.0"], most)
    best = min(measured, key=lambda prior: measured[prior])
    yield goal(f"{where}: auto - best fixed prior ({float(best):g})", auto - measured[best], 0.5)


def against_source(results: Results) -> Iterator[str]:
    """On streams that are hard for batch statistics: the set on which ``auto`` loses most to the source."""
    for key in dict.fromkeys((row["order"], row["batch"], row["method"]) for row in results.rows):
        if key[2] == "source":
            continue
        sets = dict.fromkeys(row["set"].rstrip("0123456789 ") for row in results.rows)
        worst: dict[str, float] = {}
        for name in sets:
            ours, source = (
                results.by_order(
                    (*key[:2], *who), lambda row, n=name: float(row["error"]) if row["set"].startswith(n) else None
                )  # type: ignore[misc]
                for who in ((key[2], "auto"), ("source", "-"))
            )
            if ours and source:
                worst[name] = mean(ours) - mean(source)
        if worst:
            name = max(worst, key=lambda one: worst[one])
            yield goal(f"{key[0]}, batch {key[1]}, {key[2]}: auto - source, mean", mean(worst.values()), 1.0)
            yield goal(f"{key[0]}, batch {key[1]}, {key[2]}: auto - source, worst set ({name})", worst[name], 1.0)


def goals(found: dict[str, Results]) -> Iterator[str]:
    yield "| what | measured | at most | goal |\n|---|---|---|---|"
    for name, most in (("reset-1000", -3.0), ("reset-10000", 0.0), ("lifelong-2000", 0.0)):
        if name in found:
            for method, batch in (("eata", "64"), ("budget", "64"), ("eata", "16")):
                yield from against_fixed(found[name], batch, method, most)
    if "lifelong-2000" in found:
        ours, source = (
            found["lifelong-2000"].error("64", *who, clean=True) for who in (("budget", "auto"), ("source", "-"))
        )
        if ours is not None and source is not None:
            yield goal("lifelong-2000, budget, auto: clean afterwards - source's clean", ours - source, 0.3)
    for name, results in found.items():
        if name.startswith("streams"):
            yield from against_source(results)


def cost_goals(folder: Path) -> Iterator[str]:
    """Ratios of time that `benchmarks.statistics_cost` measured; the limits are 1.10 for auto, 1.05 for a prior."""
    for path in sorted(folder.glob("cost-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            for name, most in (("prior 64 / prior 0", 1.05), ("auto / prior 64", 1.10)):
                yield goal(f"{path.stem}, {row['what']}: time of {name}", row[name], most)


def manifest(folder: Path) -> dict[str, Any]:
    """Which commands made the files, each from which commit; the rest is in the JSON file beside each."""
    made = {
        path.stem: json.loads(path.with_suffix(".json").read_text())["runs"] for path in sorted(folder.glob("*.csv"))
    }
    return {
        "command": "python -m benchmarks.statistics_table",
        "data": "CIFAR-10-C made here, severity 5; ResNet-26 with BatchNorm",
        **{
            name: list(dict.fromkeys(f"{r['command']} ({r['commit'][:8]})" for r in runs))
            for name, runs in made.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/statistics"), help="folder")
    folder: Path = parser.parse_args().results
    found = {path.stem: Results(path) for path in sorted(folder.glob("*.csv"))}
    parts = ["## Goals", "\n".join([*goals(found), *cost_goals(folder)])]
    for name, results in found.items():
        parts += [f"## {name}", "\n".join(results.table())]
    text = "\n\n".join(parts) + "\n"
    with replacing(folder / "table.md") as temporary:
        temporary.write_text(text)
    with replacing(folder / "manifest.json") as temporary:
        temporary.write_text(json.dumps(manifest(folder), indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()

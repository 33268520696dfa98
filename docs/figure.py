"""The README's figure, from a folder of results: ``python docs/figure.py results/NAME``.

Mean error of each method as a bar, with the samples that took part in a backward pass beside it. It writes
``docs/figure.svg`` and puts the figure into the README, in the place of the comment that waits for it.
"""

from __future__ import annotations

import csv
import sys
from html import escape
from pathlib import Path

from eata.bench.lines import name_of

ROOT = Path(__file__).parents[1]
WAITING = "<!-- figure -->"
SHOWN = ("source", "bn", "tent", "eta", "eata", "tent-lifelong", "eata-lifelong")
STYLE = """
.back { fill: #ffffff; stroke: #d0d5dd; } text { fill: #1f2937; font-size: 14px; }
.small { font-size: 12px; fill: #4b5563; } .bar { fill: #94a3b8; } .best { fill: #0f766e; }
@media (prefers-color-scheme: dark) {
  .back { fill: #171c24; stroke: #3b4452; } text { fill: #e5e7eb; } .small { fill: #b6bfcc; }
  .bar { fill: #64748b; } .best { fill: #2dd4bf; } }
"""
LEFT, WIDTH, ROW = 130, 270, 34  # of the bars, in the picture's units


def means(table: Path) -> tuple[int, list[tuple[str, float, float]]]:
    """The hardest severity of the table; there, each method, its mean error in per cent, and backwards a stream."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["column"] == "mean" and row["severity"] != "all"]
    hardest = max((int(row["severity"]) for row in rows), default=0)
    found = {row["row"]: row for row in rows if int(row["severity"]) == hardest}
    bars = [
        (name_of(name), float(found[name]["measured"]), float(found[name]["backwards"] or 0))
        for name in SHOWN
        if name in found
    ]
    return hardest, bars


def svg(title: str, bars: list[tuple[str, float, float]]) -> str:
    """The picture: it has its own ground, so it can be read on a light page and on a dark one."""
    best, worst = min(error for _, error, _ in bars), max(error for _, error, _ in bars)
    height = 62 + ROW * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" role="img" font-family="sans-serif">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="back" x="0.5" y="0.5" width="679" height="{height - 1}" rx="10"/>',
        f'<text x="20" y="30" font-weight="600">{escape(title)}</text>',
    ]
    for number, (name, error, backwards) in enumerate(bars):
        y = 46 + ROW * number
        length = WIDTH * error / worst
        kind = "best" if error == best else "bar"
        cost = f"{backwards:,.0f} backward passes a stream" if backwards else "no backward pass"
        parts.append(f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{name}</text>')
        parts.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="22" rx="3"/>')
        parts.append(f'<text x="{LEFT + length + 8:.1f}" y="{y + 16}">{error:.1f} %</text>')
        parts.append(f'<text x="660" y="{y + 16}" text-anchor="end" class="small">{cost}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(folder: Path) -> None:
    """Make the figure of this folder, and show it in the README."""
    severity, bars = means(folder / "table.csv")
    title = f"Mean error over 15 corruptions of CIFAR-10 at severity {severity} (lower is better)"
    (ROOT / "docs" / "figure.svg").write_text(svg(title, bars), "utf-8")
    readme = ROOT / "README.md"
    shown = f"![{title}](docs/figure.svg)"
    readme.write_text(readme.read_text("utf-8").replace(WAITING, shown), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

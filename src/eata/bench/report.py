"""A run as one page that needs nothing else: tables, plots, sample images, and how it was run."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image
from torch import Tensor

import eata
from eata.bench import plots, story, tables
from eata.bench.lines import Line
from eata.bench.protocol import Request
from eata.bench.store import Run
from eata.bench.tables import Table, load
from eata.errors import EataError
from eata.files import replacing

SAMPLES = 4  # images of each corruption


def write(run: Run, folder: Path, extras: tuple[str, ...] = ()) -> list[Path]:
    """Write the page and what else is asked for; gives the paths, the page's first.

    Args:
        run: finished or not.
        folder: where to.
        extras: of ``markdown``, ``latex``, ``csv``, ``png``.
    """
    table = load(run)
    drawn = plots.draw(table)
    files: dict[str, bytes] = {"report.html": page(run, table, drawn).encode()}
    for name, suffix, render in (
        ("markdown", "md", tables.markdown),
        ("latex", "tex", tables.latex),
        ("csv", "csv", tables.to_csv),
    ):
        if name in extras:
            files[f"report.{suffix}"] = render(table).encode()
    if "png" in extras:
        files |= {f"{plot.name}.png": plot.png() for plot in drawn}
    for name, content in files.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    return [folder / name for name in files]


def page(run: Run, table: Table, drawn: list[plots.Plot]) -> str:
    """The page's HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eata.bench", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    cells = run.cells
    done = sum(run.done(cell) for cell in cells)
    return environment.get_template("report.html").render(
        table=table,
        experiment=table.experiment,
        manifest=run.manifest,
        request=run.request,
        done=done,
        total=len(cells),
        plots=[plot for plot in drawn if plot.name != "methods"],
        first=next((plot for plot in drawn if plot.name == "methods"), None),
        sentences=story.sentences(table),
        pictures=[(one, _data_url(_image(one.pixels))) for one in story.pictures(run)],
        samples=_samples(run.request, table),
        seconds=sum(stage["seconds"] for cell in cells for stage in (run.result(cell) or {}).get("stages", ())),
        layout=[(severity, _grid(table, severity)) for severity in table.severities],
        several=len(table.severities) > 1,
        column_name=tables.column_name,
        version=eata.__version__,
    )


def _grid(table: Table, severity: int | None) -> dict[str, Any]:
    """One severity's table as the paper prints it: the best of a column bold, the second underlined."""
    lines = [line for line in table.lines if line.severity == severity]
    columns = [*table.columns, *(["mean"] if table.summary == "mean" else [])]
    ranks = {column: table.ranked(severity, column) for column in columns}
    overall = {line.row: table.overall(line) for line in lines}
    return {
        "columns": columns,
        "published": any(table.published(line, column) is not None for line in lines for column in (*columns, "mean")),
        "overall": any(paper is not None for paper, _ in overall.values()),
        "difference": any(difference is not None for _, difference in overall.values()),
        "clean": any(line.clean is not None for line in lines),
        "clean_before": any(line.clean_before is not None for line in lines),
        "times": any(table.times(line) is not None for line in lines),
        "memory": any(line.memory for line in lines),
        "rows": [
            (line, [_entry(table, line, column, ranks[column]) for column in columns], *overall[line.row])
            for line in lines
        ],
    }


def _entry(table: Table, line: Line, column: str, ranks: list[float]) -> dict[str, Any]:
    value = table.value(line, column)
    place = None if value is None or len(ranks) < 2 else ranks.index(round(value, 1))
    return {
        "value": value,
        "deviation": line.deviations.get(column),
        "published": None if column == table.summary else table.published(line, column),
        "rank": {0: "best", 1: "second"}.get(place if place is not None else -1, ""),
    }


def _samples(request: Request, table: Table) -> list[tuple[str, str]]:
    """A strip of images for the clean set and each corruption, as data URLs; none where the data is out of reach."""
    severity = next((one for one in reversed(table.severities) if one is not None), 5)
    corruptions = [column for column in table.experiment.corruptions if column in eata.data.CORRUPTIONS]
    wanted: list[tuple[str, str | None, str | None]] = [("clean", request.clean_data, None)]
    wanted += [(name.replace("_", " "), request.data, name) for name in corruptions]
    strips = []
    for name, spec, corruption in wanted:
        if spec is None:
            continue
        try:
            stream = eata.data.load(spec, corruption=corruption, severity=severity, limit=SAMPLES)
            images, _ = next(stream.batches(SAMPLES, seed=None))
        except (EataError, OSError, StopIteration):  # the page is about the results; they are here without the data
            continue
        strips.append((name, _data_url(_image(torch.cat([*images], dim=2)))))
    return strips


def _image(pixels: Tensor) -> Image.Image:
    """From float (3, H, W), 0 to 1."""
    return Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())


def _data_url(image: Image.Image) -> str:
    image.thumbnail((640, 160))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

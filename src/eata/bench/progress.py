"""The run as it goes: a live table and bar in a terminal, a plain line a cell in a pipe."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Grid
from rich.text import Text

from eata.bench.experiments import Experiment
from eata.bench.lines import name_of
from eata.bench.protocol import Cell, Request, Result
from eata.bench.tables import Table, column_name, mean_of, tabulate


class Display:
    """Shows the progress of a run; use it as a context.

    Args:
        console: where to.
        experiment: for the table.
        request: for the table.
        cells: of the run.
        done: results that are there already.
        images: in a stream.
    """

    def __init__(
        self,
        console: Console,
        experiment: Experiment,
        request: Request,
        cells: list[Cell],
        done: dict[str, Result],
        images: int,
    ) -> None:
        self.console = console
        self._experiment, self._request, self._cells = experiment, request, cells
        self._results = dict(done)
        self._work = {cell.id: cell.effort(images) for cell in cells}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[cell]}", style="dim", markup=False),
            console=console,
            speed_estimate_period=300,
        )
        total = sum(self._work.values())
        self._task = self._bar.add_task(f"{len(done)}/{len(cells)} cells", total=total, cell="")
        self._spent = dict.fromkeys(self._work, 0.0)
        self._running: dict[str, str] = {}
        for cell in cells:
            if cell.id in done:
                self._fill(cell)
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self._results:
            self.console.print(f"{len(self._results)} of {len(self._cells)} cells are there from before; going on.")
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, cell: Cell) -> None:
        """Name the cells in work beside the bar; one that begins again has everything to do."""
        self._bar.advance(self._task, -self._spent[cell.id])
        self._spent[cell.id] = 0.0
        self._running[cell.id] = describe(cell)
        self._name()

    def advance(self, cell: Cell, images: int) -> None:
        """Move the bar."""
        amount = images * cell.cost
        self._spent[cell.id] += amount
        self._bar.advance(self._task, amount)

    def finished(self, cell: Cell, result: Result) -> None:
        """Take the result into the table; in a pipe, print a line."""
        self._results[cell.id] = result
        self._fill(cell)
        self._running.pop(cell.id, None)
        self._name()
        if "error" in result:
            self._say(f"failed: {describe(cell)}: {result['error']}", style="red")
        elif not self.console.is_terminal:
            (line,) = self._table([cell]).lines or (None,)
            score = "" if line is None else f"{self._experiment.measure} {line.mean:.1f} %, "
            seconds = sum(stage["seconds"] for stage in result["stages"])
            self._say(f"[{len(self._results)}/{len(self._cells)}] {describe(cell)}: {score}{seconds:.1f} s")

    def table(self) -> Table:
        """All results so far."""
        return self._table(self._cells)

    def _table(self, cells: list[Cell]) -> Table:
        return tabulate(self._request, cells, self._results)

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def _name(self) -> None:
        first, *rest = [*self._running.values()] or [""]
        more = f" and {len(rest)} more" if rest else ""
        count = f"{len(self._results)}/{len(self._cells)} cells"
        self._bar.update(self._task, description=count, cell=first + more)

    def _fill(self, cell: Cell) -> None:
        self._bar.advance(self._task, self._work[cell.id] - self._spent[cell.id])
        self._spent[cell.id] = self._work[cell.id]

    def _picture(self) -> Group:
        return Group(*grids(self.table(), self.console.width), self._bar)


def describe(cell: Cell) -> str:
    """A cell in a few words."""
    place = cell.column or ("lifelong" if cell.lifelong else cell.stages[0].corruption or cell.stages[0].role)
    where = "" if place in cell.row else place
    words = (name_of(cell.row), where, f"severity {cell.severity}", f"seed {cell.seed}")
    return ", ".join(word for word in words if word)


def grids(table: Table, width: int) -> list[Grid]:
    """The table for a terminal: corruptions down, methods across, so that it fits; one for each severity."""
    found = []
    for severity in table.severities:
        lines = [line for line in table.lines if line.severity == severity]
        level = "all severities" if severity is None else f"severity {severity}"
        title = f"{table.title}, {level}: {table.experiment.measure} in %"
        grid = Grid(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        grid.add_column("", no_wrap=True)
        for line in lines:
            grid.add_column(Text(line.name.replace(" (", "\n(")), justify="right")
        for column in table.columns:
            best = next(iter(table.ranked(severity, column)), None)
            texts = (_text(line.values.get(column), best) for line in lines)
            grid.add_row(Text(column_name(column) if width < 100 else column.replace("_", " ")), *texts)
        grid.add_section()
        if table.summary == "mean":
            grid.add_row("Mean", *(Text(mean_of(line), "bold" if line.complete else "") for line in lines))
        overall = [table.overall(line) for line in lines]
        if any(difference is not None for _, difference in overall):
            grid.add_row("In the paper", *("" if gap is None else f"{paper:.1f}" for paper, gap in overall))
        if any(line.clean_before is not None for line in lines):
            before = ("" if line.clean_before is None else f"{line.clean_before:.1f}" for line in lines)
            grid.add_row("Clean, new model", *before)
        if any(line.clean is not None for line in lines):
            grid.add_row("Clean after", *("" if line.clean is None else f"{line.clean:.1f}" for line in lines))
        grid.add_row("Forwards", *(f"{line.forwards:,.0f}" for line in lines))
        grid.add_row("Backwards", *(f"{line.backwards:,.0f}" for line in lines))
        if any(line.memory for line in lines):
            grid.add_row("Memory MB", *(f"{(line.memory or 0) / 1e6:.1f}" for line in lines))
        grid.add_row("Seconds", *(f"{line.seconds:.1f}" for line in lines))
        times = [table.times(line) for line in lines]
        if any(time is not None for time in times):
            grid.add_row("Times Source", *("" if time is None else f"{time:.1f}" for time in times))
        found.append(grid)
    return found[-1:] if len(found) > 2 else found


def _text(value: float | None, best: float | None) -> Text:
    if value is None:
        return Text("")
    return Text(f"{value:.1f}", "bold green" if round(value, 1) == best else "")

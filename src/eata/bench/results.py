"""A run as data to keep: small files that can be committed, read by a person, and gone on with."""

from __future__ import annotations

import json
import re
from pathlib import Path

from eata.bench import plots, tables
from eata.bench.store import MANIFEST, Run
from eata.errors import EataError
from eata.files import replacing


def keep(run: Run, folder: Path) -> list[Path]:
    """Write what was measured: manifest, cells, table (Markdown and CSV) and figures (SVG); gives the paths.

    No images and no states. The manifest and the cells are those of the run, so that a copy of the folder under
    ``--out`` is the run itself, and goes on where it stopped.

    Args:
        run: finished or not; the table says which cells are missing.
        folder: where to; made if it is not there.
    """
    if folder.resolve() == run.folder.resolve():
        raise EataError(f"{folder} is the run itself; name another folder, such as results/{run.folder.name}.")
    table = tables.load(run)
    # where the run was kept is no part of the result, and a path of one machine says nothing on another
    manifest = run.manifest | {"command": re.sub(r" --out[= ]\S+", "", run.manifest["command"])}
    files = {MANIFEST: json.dumps(manifest, indent=1).encode()}
    for cell in run.cells:
        if run.done(cell):
            name = f"cells/{cell.id}.json"
            files[name] = (run.folder / name).read_bytes()
    files["table.md"] = tables.markdown(table).encode()
    files["table.csv"] = tables.to_csv(table).encode()
    files |= {f"{plot.name}.svg": plot.svg().encode() for plot in plots.draw(table)}
    for name, content in files.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    return [folder / name for name in files]

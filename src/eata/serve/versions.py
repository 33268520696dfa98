"""Versions of the adapted model: kept to roll back to, on disk if there is a state folder, and never mixed up.

A version is a number for one state of the weights, given once and never again. A state folder holds

- ``version-N.safetensors``: the adaptation state of each kept version,
- ``current.json``: which of them is served, and what was counted when it was saved,
- ``journal``: counts that are written before an answer leaves, so that after a crash it is known what is lost,
- ``lock``: held by the one server that may write here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eata import state
from eata.errors import StateError
from eata.files import replacing

KEEP = 20  # versions to roll back to


@dataclasses.dataclass(frozen=True)
class Kept:
    """A version that can be gone back to.

    Args:
        version: its number.
        batches: learnt from when it was first saved.
        when: it was first saved, in seconds since 1970.
    """

    version: int
    batches: int
    when: float


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where the server is.

    Args:
        version: that is served.
        highest: number given so far; the next version is one more.
        batches: learnt from in the life of the state folder.
        frozen: whether adaptation is switched off.
    """

    version: int = 0
    highest: int = 0
    batches: int = 0
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a crash took: batches, and the versions that only they had made (first and last; None if there are none)."""

    batches: int
    versions: tuple[int, int] | None

    def __str__(self) -> str:
        lost = "" if self.versions is None else ", and with them versions {} to {}".format(*self.versions)
        return f"The server stopped without saving: {self.batches} batches were lost{lost}."


class Versions:
    """The kept versions, in memory or in a folder.

    Args:
        folder: the state folder; None keeps versions in memory, for as long as the process lives.

    >>> versions = Versions(None)
    >>> versions.save({"weights": 1}, Mark(version=3, highest=3, batches=9))
    >>> versions.read(3), [kept.version for kept in versions.kept]
    ({'weights': 1}, [3])
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.kept: tuple[Kept, ...] = ()
        self._memory: dict[int, Any] = {}
        self._journal: io.FileIO | None = None
        self._lock: FileLock | None = None

    def open(self) -> tuple[Mark, Loss | None] | None:
        """Take the folder; gives the last mark and what was lost since, None where there is nothing yet.

        Raises:
            StateError: another server has the folder, or its files are not those of a server.
        """
        if self.folder is None:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StateError(
                f"Another server is writing to {self.folder}; stop it, or give this one a --state folder of its own."
            ) from None
        self._lock = lock
        found = self._read_mark()
        self._journal = (self.folder / "journal").open("rb+" if (self.folder / "journal").exists() else "wb+", 0)
        if found is None:
            return None
        counted = self._read_journal(found)
        loss = None
        if counted.batches > found.batches or counted.highest > found.highest:
            versions = (found.highest + 1, counted.highest) if counted.highest > found.highest else None
            loss = Loss(counted.batches - found.batches, versions)
        return dataclasses.replace(found, batches=counted.batches, highest=counted.highest), loss

    def acknowledge(self, mark: Mark) -> None:
        """Note what the answers that leave now rest on. The kernel has it when this returns: kill -9 can't take it.

        The one file that is not replaced as a whole, because that would cost a batch more than its own time on a slow
        disk: a record of fixed length, written in place by one call.
        """
        if self._journal is not None:
            self._journal.seek(0)
            self._journal.write(b"batches %020d highest version %020d\n" % (mark.batches, mark.highest))

    def save(self, adaptation: Any, mark: Mark) -> None:
        """Keep the served version, and make it the one to start from."""
        known = {each.version: each for each in self.kept}
        known.setdefault(mark.version, Kept(mark.version, mark.batches, time.time()))
        thinned = _thinned(sorted(known.values(), key=lambda each: each.version), mark.version)
        if self.folder is None:
            self._memory[mark.version] = adaptation
        else:
            state.write(self._file(mark.version), adaptation)
            self._write_mark(mark, thinned)
        for version in known.keys() - {each.version for each in thinned}:
            self._forget(version)
        self.kept = thinned

    def read(self, version: int) -> Any:
        """The adaptation state of a kept version."""
        if all(each.version != version for each in self.kept):
            raise KeyError(version)
        return self._memory[version] if self.folder is None else state.read(self._file(version))

    def close(self) -> None:
        """Let go of the folder."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _file(self, version: int) -> Path:
        assert self.folder is not None
        return self.folder / f"version-{version}.safetensors"

    def _forget(self, version: int) -> None:
        self._memory.pop(version, None)
        if self.folder is not None:
            with contextlib.suppress(OSError):  # a file too many does no harm
                self._file(version).unlink()

    def _write_mark(self, mark: Mark, kept: tuple[Kept, ...]) -> None:
        assert self.folder is not None
        content = {**dataclasses.asdict(mark), "kept": [dataclasses.asdict(each) for each in kept]}
        with replacing(self.folder / "current.json") as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")

    def _read_mark(self) -> Mark | None:
        assert self.folder is not None
        file = self.folder / "current.json"
        if not file.exists():
            return None
        try:
            content = json.loads(file.read_text())
            self.kept = tuple(Kept(**each) for each in content.pop("kept"))
            return Mark(**content)
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise StateError(
                f"{file} was not written by eata serve ({problem}); give another --state folder."
            ) from None

    def _read_journal(self, saved: Mark) -> Mark:
        assert self._journal is not None
        words = self._journal.read().split()
        try:
            batches, highest = int(words[1]), int(words[4])
        except (ValueError, IndexError):  # the folder is older than its first answer
            return saved
        return dataclasses.replace(saved, batches=max(batches, saved.batches), highest=max(highest, saved.highest))


def _thinned(kept: list[Kept], served: int) -> tuple[Kept, ...]:
    """At most ``KEEP`` versions: close together lately, further and further apart in the past.

    >>> many = [Kept(number, number, 0.0) for number in range(100)]
    >>> while len(many) > KEEP:
    ...     many = list(_thinned(many, 99))
    >>> many[0].version, many[-1].version, many[-2].version > 90
    (0, 99, True)
    """
    kept = list(kept)
    newest = kept[-1].version

    def crowded(place: int) -> float:
        return (kept[place + 1].version - kept[place - 1].version) / (1 + newest - kept[place].version)

    while len(kept) > KEEP:
        places = [place for place in range(1, len(kept) - 1) if kept[place].version != served]
        kept.pop(min(places, key=crowded))
    return tuple(kept)

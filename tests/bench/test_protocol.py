from __future__ import annotations

import pytest

from eata.bench.experiments import EXPERIMENTS, find
from eata.bench.protocol import Request, Stage, plan
from eata.bench.published import tables
from eata.data import CORRUPTIONS

DIGITS = {"data": "digits", "models": ("tiny:net",)}


def test_the_main_table_has_75_streams_a_method_and_lifelong_ones() -> None:
    cells = plan(Request("cifar10-c", "cifar10"), 10_000)
    assert sum(cell.row == "eata" for cell in cells) == 75
    lifelong = [cell for cell in cells if cell.row == "eata-lifelong"]
    assert [len(cell.stages) for cell in lifelong] == [16] * 5
    assert [stage.corruption for stage in lifelong[0].stages] == [*CORRUPTIONS, None]
    assert {cell.batch for cell in cells if cell.row == "bn"} == {256}
    assert {cell.batch for cell in cells if cell.row != "bn"} == {64}
    assert not {cell.method for cell in cells} & {"ttt", "memo", "augment"}


def test_all_adds_the_slow_methods_on_the_groupnorm_net() -> None:
    cells = plan(Request("cifar10-c", "cifar10", methods=("all",), severities=(5,)), 10_000)
    nets = {cell.row: cell.model for cell in cells}
    assert nets["ttt"] == nets["memo"] == "resnet26-gn-rotation-cifar10"
    assert nets["eata"] == "resnet26-bn-cifar10"


def test_cells_of_one_stream_stand_together() -> None:
    cells = plan(Request("imagenet-c", "digits", severities=(3, 5)), 900)
    streams = [(cell.severity, cell.stages[0].corruption) for cell in cells if not cell.lifelong]
    assert len(set(streams)) == sum(one != before for one, before in zip(streams, [None, *streams], strict=False))


def test_forgetting_measures_the_clean_set_after_each_corruption() -> None:
    cells = plan(Request("forgetting", **DIGITS), 900)
    new, tent = [cell for cell in cells if cell.row == "tent-lifelong"]
    assert new.stages == (Stage(None, 5, "clean"),)
    assert [stage.role for stage in tent.stages] == ["shift", "clean"] * 15
    demo = plan(Request("demo", **DIGITS), 900)
    assert [len(cell.stages) for cell in demo if cell.row == "bn"] == [1] * 14 + [2]
    before, stream = [cell for cell in demo if cell.row == "eata"]
    assert [stage.role for stage in before.stages] == ["clean"]
    assert [stage.role for stage in stream.stages] == ["shift"] * 45 + ["clean"]
    # the last of the three rounds comes in the order of the cells that are not lifelong
    assert [stage.seed for stage in stream.stages] == [2021] * 15 + [2022] * 15 + [None] * 16
    assert [stage.corruption for stage in stream.stages] == [*CORRUPTIONS] * 3 + [None]
    assert "rounds" not in stream.settings
    reset = [cell for cell in cells if cell.row == "tent"]
    assert [cell.stages for cell in reset] == [(Stage(name, 5), Stage(None, 5, "clean")) for name in CORRUPTIONS]


def test_sizes_beyond_the_data_are_left_out() -> None:
    columns = {cell.column for cell in plan(Request("test-size", **DIGITS), 900)}
    assert columns == {"256", "512"}
    assert {cell.column for cell in plan(Request("fisher-size", **DIGITS), 900)} == {"200", "300", "500", "700"}


def test_limit_and_batch_are_the_users_but_batch_1_stays() -> None:
    cells = plan(Request("batch-1", **DIGITS, limit=100, batch=32), 900)
    assert {cell.batch for cell in cells} == {1}
    assert {cell.limit for cell in cells} == {100}
    assert {cell.batch for cell in plan(Request("e0", **DIGITS, batch=32), 900)} == {32}


def test_the_backward_is_that_of_every_method_that_has_one() -> None:
    cells = plan(Request("mixed", **DIGITS, backward="full"), 900)
    assert {cell.method: cell.settings.get("backward") for cell in cells} == {
        "source": None,
        "tent": "full",
        "eata": "full",
    }
    ids = {cell.id for cell in cells}
    asked_nothing = {cell.id for cell in plan(Request("mixed", **DIGITS), 900)}
    assert len(ids & asked_nothing) == 2  # the source at two severities
    with pytest.raises(ValueError, match="no backward 'half'; there are auto, rows and full"):
        plan(Request("mixed", **DIGITS, backward="half"), 900)
    with pytest.raises(ValueError, match="leave out --backward"):
        plan(Request("rows", **DIGITS, backward="full"), 900)


def test_methods_are_chosen_by_row_or_by_method() -> None:
    request = Request("imagenet-c", **DIGITS, methods=("tent", "eata-lifelong"))
    assert {cell.row for cell in plan(request, 900)} == {"tent", "eata-lifelong"}
    with pytest.raises(ValueError, match="no method 'tnt'; did you mean 'tent'"):
        plan(Request("imagenet-c", **DIGITS, methods=("tnt",)), 900)


def test_every_model_is_a_column_of_backbones_and_of_nothing_else() -> None:
    request = Request("backbones", "digits", models=("timm/resnet18", "torchvision/resnet50"))
    assert {cell.column for cell in plan(request, 900)} == {"resnet18", "resnet50"}
    with pytest.raises(ValueError, match="several are for 'backbones'"):
        plan(Request("e0", "digits", models=("a", "b")), 900)


def test_the_id_of_a_cell_tells_settings_apart() -> None:
    cells = plan(Request("e0", **DIGITS), 900)
    assert len({cell.id for cell in cells}) == len(cells) == 8
    assert cells[0].id == plan(Request("e0", **DIGITS), 900)[0].id


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_can_be_planned_on_digits(name: str) -> None:
    assert plan(Request(name, **DIGITS), 900)


def test_published_rows_are_rows_of_the_experiment() -> None:
    not_ours = {"source-gn", "eata-stdev"}  # a net that we do not train; deviations, which stand beside the means
    for experiment in EXPERIMENTS.values():
        rows = {variant.row for variant in experiment.variants}
        for label in experiment.labels:
            if label in tables():
                assert {row for row, _ in tables()[label].rows} - not_ours <= rows


def test_every_table_of_the_paper_has_an_experiment() -> None:
    assert set(tables()) == {label for one in EXPERIMENTS.values() for label in one.labels if label.startswith("tab:")}


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match="no experiment 'forgeting'; did you mean 'forgetting'"):
        find("forgeting")
    with pytest.raises(ValueError, match="no data set 'digit'; did you mean 'digits'"):
        plan(Request("e0", "digit"), 900)
    with pytest.raises(ValueError, match="Name it with --model"):
        plan(Request("e0", "folder:x"), 900)

"""N processes with shards of a batch compute what one process computes with the batch: real processes, over gloo."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import eata
import parallel_job
from eata import state
from parallel_job import COLLAPSE, Case
from test_adapter import trees_equal

pytestmark = pytest.mark.filterwarnings("ignore:A batch of 1", "ignore:The net gave NaN", "ignore:The net does not say")
BATCHES = 30
FEW = 8  # for what differs from the main cases in one thing only
SECONDS = 200  # more than any job takes on a busy machine


def split(size: int, world: int, number: int) -> list[int]:
    """Uneven shards: every third batch leaves a rank without any."""
    cuts = torch.randint(0, size + 1, (world - 1,), generator=torch.Generator().manual_seed(number)).tolist()
    if number % 3 == 0:
        cuts[0] = 0
    ends = [0, *sorted(cuts), size]
    return [end - start for start, end in itertools.pairwise(ends)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


def guarded(method: str, arguments: dict[str, Any], net: nn.Module) -> eata.Adapter:
    return eata.Guard(build(method, None, arguments, net))


def build(method: str, fisher: Any, arguments: dict[str, Any], net: nn.Module) -> eata.Adapter:
    given = {"fisher": fisher} if method == "eata" else {}
    return eata.method(method)(net, **given, **arguments)


ETA = {"e0": 0.6, "epsilon": 0.7, "lr": 0.02}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "source": ("source", {}),
    "bn": ("bn", {"prior": 16}),
    "tent": ("tent", {"lr": 0.02, "backward": "full"}),
    "episodic": ("tent", {"lr": 0.02, "backward": "full", "episodic": True}),
    "eta": ("eta", {**ETA, "backward": "full"}),
    "eata": ("eata", {**ETA, "beta": 20.0, "backward": "full"}),
    "eata-rows": ("eata", {**ETA, "beta": 20.0, "backward": "rows"}),
    "tent-rows": ("tent", {"lr": 0.02, "backward": "rows"}),
    "eata-prior": ("eata", {**ETA, "beta": 20.0, "backward": "full", "prior": 32}),
    "eata-budget": ("eata", {**ETA, "budget": 0.001, "backward": "full"}),
    "rdumb": ("rdumb", {**ETA, "every": 3, "backward": "full"}),
    "sar": ("sar", {"e0": 0.6, "recover": 0.5, "exclude": (), "lr": 0.02, "backward": "full"}),
    "deyo": ("deyo", {"e0": 0.6, "plpd": 0.0, "patches": 2, "exclude": (), "lr": 0.02, "backward": "full"}),
    "eata-last": ("eata", {**ETA, "beta": 20.0, "backward": "full", "layers": 1}),
}
NETS = {
    "source": ["bn"], "bn": ["bn"], "tent": ["bn"], "episodic": ["bn"], "eta": ["bn"],
    "eata": ["bn", "gn", "ln"], "eata-rows": ["gn"], "eata-prior": ["bn"], "eata-last": ["bn"],
    "eata-budget": ["bn"], "rdumb": ["bn"], "sar": ["bn", "gn"], "deyo": ["bn", "gn"],
}  # fmt: skip
KINDS = [(setting, norm, torch.float64) for setting, norms in NETS.items() for norm in norms]
KINDS += [("eata", norm, torch.float32) for norm in ("bn", "gn", "ln")]
BY_THREE = [kind for kind in KINDS if kind[0] in ("eata", "eata-rows")]


@pytest.fixture
def case(trained, stream):
    def make(world: int, setting: str = "eata", norm: str = "bn", dtype: torch.dtype = torch.float64) -> Case:
        net = trained(norm, dtype)
        fisher = eata.fisher(net, stream([100], dtype, noise=0.1)[0], per="sample")
        length = BATCHES if setting == "eata" else FEW
        sizes = [24] * (length - 2) + [7, 1]
        batches = stream(sizes, dtype)
        batches[4][5, 0, 0, 0] = torch.nan
        batches[5][3] = torch.finfo(dtype).max  # the net overflows: no step, in any process
        shards = [split(size, world, number) for number, size in enumerate(sizes)]
        method, arguments = SETTINGS[setting]
        name = f"{setting} {norm} {dtype}"
        made = Case(name, net, functools.partial(build, method, fisher, arguments), batches, shards)
        for number, rows in enumerate(alone(made)[1]):
            if rows and rows[0] and number not in (4, 5):  # rank 0 gets the rows in front of the first chosen one
                shards[number] = [rows[0], *[0] * (world - 2), sizes[number] - rows[0]]
        return made

    return make


GUARDED = [("tent", "bn"), ("eta", "bn"), ("tent", "gn")]


@pytest.fixture
def guarded_case(trained, digits):
    """Clean digits, shuffled, some sorted by class in between, some not finite; shards of any length."""

    def make(world: int, setting: str, norm: str) -> Case:
        images, labels = digits[0][1000:].double(), digits[1][1000:]
        shuffled = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
        batches = [*shuffled[:600].split(24), *images[labels.argsort(stable=True)][:240].split(40), *shuffled.split(64)]
        batches[2] = batches[2].clone()
        batches[2][3] = torch.nan
        batches.insert(4, torch.full_like(batches[0], torch.nan))
        shards = [split(len(batch), world, number) for number, batch in enumerate(batches)]
        method, arguments = SETTINGS[setting]
        arguments = {**arguments, "lr": 0.01}
        name = f"{setting} {norm}"
        return Case(name, trained(norm, torch.float64), functools.partial(guarded, method, arguments), batches, shards)

    return make


def run(world: int, folder: Path, scenes: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int | None]]:
    """What each rank found, as far as it came to an end, and the exit codes."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=parallel_job.work, args=(rank, world, folder, scenes), daemon=True)
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
        if worker.is_alive():
            worker.kill()
    files = [folder / f"found{world}-{rank}.safetensors" for rank in range(world)]
    return [state.read(file) for file in files if file.exists()], [worker.exitcode for worker in workers]


def alone(case: Case, first: int = 0) -> tuple[dict[str, Any], list[list[int]]]:
    """One process with whole batches, and which rows of each it chose."""
    model = case.model()
    chosen: list[list[int]] = [[] for _ in case.batches]
    if isinstance(model, eata.GradientAdapter):
        select = model.select

        def note(batch: eata.Pass) -> eata.Choice:
            choice = select(batch)
            chosen[len(answers)] = choice.index.tolist()
            return choice

        model.select = note  # type: ignore[method-assign]
    answers: list[Tensor] = []
    for batch in case.batches:
        answers.append(model(batch))
    return parallel_job.outcome(model, answers[first:]), chosen


def compare(found: list[dict[str, Any]], expected: dict[str, Any], dtype: torch.dtype) -> None:
    exact = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}

    def close(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, equal_nan=True, **exact)

    for number, answer in enumerate(expected["answers"]):
        close(torch.cat([rank["answers"][number] for rank in found]), answer)
    for rank in found:
        assert rank["stats"] == expected["stats"]
        for name, value in expected["parameters"].items():
            close(rank["parameters"][name], value)
            assert torch.equal(rank["parameters"][name], found[0]["parameters"][name])
        if expected["average"] is not None:
            close(torch.as_tensor(rank["average"]), torch.as_tensor(expected["average"]))


_jobs: dict[int, tuple[list[dict[str, Any]], list[int | None]]] = {}


@pytest.fixture
def two(folder: Path, case, guarded_case) -> tuple[list[dict[str, Any]], list[int | None]]:
    """The job of two processes: all that can be shown in one start of them, the death of one at the end."""
    if 2 not in _jobs:
        equality = [case(2, *kind) for kind in KINDS]
        approximation = case(2, "tent-rows")
        approximation.batches, approximation.sizes = [torch.cat(approximation.batches[:2])], [[24, 24]]
        _jobs[2] = run(
            2,
            folder,
            {
                "equality": equality,
                "guarding": [guarded_case(2, *kind) for kind in GUARDED],
                "approximation": approximation,
                "saving": case(2),
                "refusals": case(2, "tent"),
                "death": case(2),
            },
        )
    return _jobs[2]


@pytest.fixture
def three(folder: Path, case, guarded_case, two: object) -> tuple[list[dict[str, Any]], list[int | None]]:
    """The same for three; it loads what two saved."""
    if 3 not in _jobs:
        equality = [case(3, *kind) for kind in BY_THREE]
        guarding = [guarded_case(3, *kind) for kind in GUARDED]
        scenes = {"equality": equality, "guarding": guarding, "loading": case(3), "silence": case(3)}
        _jobs[3] = run(3, folder, scenes)
    return _jobs[3]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_two_processes_are_one(two, case, kind: tuple[str, str, torch.dtype]) -> None:
    one = case(2, *kind)
    compare([rank["equality"][one.name] for rank in two[0]], alone(one)[0], kind[2])


@pytest.mark.parametrize("kind", BY_THREE, ids=str)
def test_three_processes_are_one(three, case, kind: tuple[str, str, torch.dtype]) -> None:
    one = case(3, *kind)
    expected, chosen = alone(one)
    compare([rank["equality"][one.name] for rank in three[0]], expected, kind[2])
    # The streams have what they are for: empty shards, ranks without chosen samples, samples of others used there.
    if len(one.batches) == BATCHES:
        assert any(rows and rows[0] == sizes[0] > 0 for rows, sizes in zip(chosen, one.sizes, strict=True))
    assert any(0 in sizes for sizes in one.sizes)
    assert expected["stats"]["steps"] > len(one.batches) // 2
    assert expected["stats"]["rejected"] > 1


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", GUARDED, ids=str)
def test_a_guard_decides_by_the_samples_of_all(
    request: pytest.FixtureRequest, guarded_case, world: int, kind: tuple[str, str]
) -> None:
    job = request.getfixturevalue({2: "two", 3: "three"}[world])
    one = guarded_case(world, *kind)
    guard = one.model()
    expected = parallel_job.guarded_outcome(guard, parallel_job.guarded_answers(guard, guard, one.batches))
    found = [rank["guarding"][one.name] for rank in job[0]]
    compare(found, expected, torch.float64)
    assert {"adapting", "alarm"} <= {event["kind"] for event in expected["events"]}
    for rank in found:
        assert rank["memory"].keys() == expected["memory"].keys()
        assert len(rank["events"]) == len(expected["events"])
        for event, other in zip(rank["events"], expected["events"], strict=True):
            assert event.pop("seen") == pytest.approx(other["seen"], abs=1e-9)
            assert event == {**event, **{name: other[name] for name in event}}
        for name in ("batches", "resting", "comparing", "since", "need"):
            assert rank["memory"][name] == expected["memory"][name]


@pytest.mark.parametrize(("name", "chosen", "rows"), [("all", 6, True), ("one", 0, False), ("many", 20, False)])
def test_rows_under_batch_norm_if_all_processes_can(two, case, name: str, chosen: int, rows: bool) -> None:
    one = case(2, "tent")
    model: Any = one.model()
    index = torch.tensor([*range(6), *range(24, 24 + chosen)])
    model.select = lambda batch: eata.Choice(index, torch.ones(len(index), dtype=torch.float64), len(index))
    model(torch.cat(one.batches[:2]))
    found = [rank["approximation"][name] for rank in two[0]]
    moved, textbook = (
        torch.cat([(parameters[key].detach() - model.source[key]).flatten() for key in model.source])
        for parameters in (found[0]["parameters"], model.parameters)
    )
    assert [rank["rows"] for rank in found] == [rows, rows]
    assert all(torch.equal(found[1]["parameters"][key], value) for key, value in found[0]["parameters"].items())
    if rows:
        assert 0.9 < float(torch.nn.functional.cosine_similarity(moved, textbook, 0)) < 1 - 1e-9
    else:
        torch.testing.assert_close(moved, textbook, rtol=1e-8, atol=1e-12)


def test_a_state_of_two_processes_loads_into_one_and_into_three(three, folder: Path, case) -> None:
    one = case(3)
    half = BATCHES // 2
    expected, _ = alone(one, first=half)
    compare([rank["loading"] for rank in three[0]], expected, torch.float64)
    model = one.model()
    model.load(folder / "half.safetensors")
    compare([parallel_job.outcome(model, [model(batch) for batch in one.batches[half:]])], expected, torch.float64)


@pytest.mark.parametrize(
    ("case_of", "here", "there"),
    [
        ("dtype", "Process 1 could not take its shard", "torch.uint8"),
        ("shape", "other sizes of images", "other sizes of images"),
        ("empty", "empty in every process", "empty in every process"),
        ("twice", "already", "already"),
        ("frozen", "other counters", "other counters"),
        ("state", "other counters", "other counters"),
        ("method", "other method, settings", "other method, settings"),
        ("guard", r"eata.parallel(eata.Guard(model))", r"eata.parallel(eata.Guard(model))"),
        ("snapshot", "in one process", "in one process"),
    ],
)
def test_what_can_not_be_is_said_in_every_process(two, case_of: str, here: str, there: str) -> None:
    assert here in two[0][0]["refusals"][case_of]
    assert there in two[0][1]["refusals"][case_of]


def test_a_killed_process_ends_the_others_with_whole_states(two, folder: Path, case) -> None:
    require_clean_end(*two, folder, case(2))


def test_so_it_is_over_sockets(tmp_path: Path, case) -> None:
    require_clean_end(*run(3, tmp_path, {"death": case(3)}), tmp_path, case(3))


def require_clean_end(found: list[dict[str, Any]], codes: list[int | None], folder: Path, one: Case) -> None:
    """The last process was killed: the others said so in time, and their states are those of the batch before."""
    assert codes == [*[0] * (len(codes) - 1), -9]
    one.batches = one.batches[:4]
    expected, _ = alone(one)
    for rank in range(len(codes) - 1):
        death = found[rank]["death"]
        assert "Another process of this adaptation stopped" in death["said"]
        assert death["again"] == death["said"]
        assert death["seconds"] < 30
        assert death["unchanged"]
        model = one.model()
        model.load(folder / f"state-{rank}.safetensors")
        compare([{**parallel_job.outcome(model, []), "answers": []}], {**expected, "answers": []}, torch.float64)


def test_a_process_that_does_not_come_is_not_waited_for(three) -> None:
    found, codes = three
    assert codes == [0, 0, 0]
    for rank in found[:2]:
        assert "did not come within 3 seconds" in rank["silence"]["said"]
        assert rank["silence"]["seconds"] < 30


def test_what_is_not_served_is_said(trained) -> None:
    with pytest.raises(eata.EataError, match=r"no process group.*torchrun"):
        eata.parallel(eata.Tent(trained(), lr=0.1))
    with pytest.raises(eata.EataError, match=r"eata\.MEMO can't be spread"):
        eata.parallel(eata.MEMO(trained(), lr=0.1))
    with pytest.raises(eata.EataError, match=r"eata\.Window can't be spread"):
        eata.parallel(eata.Window(eata.Tent(trained(), lr=0.1)))
    with pytest.raises(TypeError, match="takes an adapter"):
        eata.parallel(trained())
    with pytest.raises(eata.EataError, match="no running statistics"):
        eata.parallel(eata.Tent(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))))


def test_a_guard_whose_messages_fail_leaves_all_as_it_was(guarded_case, tmp_path: Path) -> None:
    """They come after the method's step, which is undone."""
    one = guarded_case(2, "tent", "gn")
    guard = one.model()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = eata.parallel(guard)
        for number in range(COLLAPSE):
            model(one.batches[number])
        assert guard.stats.steps
        before = model.state_dict()

        def dies(values: Tensor) -> Tensor:
            assert guard.stats.steps > before["model"]["stats"]["steps"]
            raise eata.EataError("Another process stopped.")

        guard.joined = dies
        with pytest.raises(eata.EataError, match="Another process"):
            model(one.batches[COLLAPSE])
        assert trees_equal(before, model.state_dict())
    finally:
        dist.destroy_process_group()

"""The one writer: batches, versions, and what happens when things go wrong."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eata
from eata.errors import StateError
from eata.serve.asgi import let_helpers_go
from eata.serve.contract import Contract
from eata.serve.engine import Engine
from eata.serve.queue import Settings
from eata.serve.refusal import Refusal
from eata.serve.versions import Versions
from serve_net import images, learner, small_net


@pytest.fixture
def engine():
    """Factory of engines, which are stopped at the end."""
    made: list[Engine] = []

    def make(model: eata.Adapter, folder: Path | None = None, source: Any = None, **settings: Any) -> Engine:
        chosen = Settings(**{"batch": 8, "wait": 0.0, "queue": 64, **settings})
        contract = Contract.of(model.net, "net", chosen.batch)
        made.append(Engine(model, contract, chosen, Versions(folder), source))
        return made[-1]

    yield make
    for each in made:
        each.stop()


class Held(eata.Tent):
    """Tent that stops in its first batch until it is let go."""

    def __call__(self, x):
        self.begun.set()
        assert self.go.wait(60)
        return super().__call__(x)


def held() -> Held:
    model = Held(small_net(), lr=0.05)
    model.begun, model.go = threading.Event(), threading.Event()
    return model


def test_answers_and_versions_are_those_of_the_adapter_alone(engine):
    ours = engine(learner())
    ours.start()
    alone = learner()
    for number in range(5):
        x = images(4, number)
        answer = ours.submit(x, "a").result(60)
        assert answer.version == number
        assert (answer.logits == alone(torch.from_numpy(x)).numpy()).all()
    ours.stop()
    assert ours.mark.version == alone.stats.steps == 5


class Slow(eata.Tent):
    """Tent that does not learn until it is let go."""

    go: threading.Event

    def learn(self, batch):
        assert self.go.wait(60)
        super().learn(batch)


@pytest.mark.parametrize("window", [0, 4])
def test_answers_leave_before_the_step(engine, tmp_path, window: int):
    model = Slow(small_net(), lr=0.05)
    model.go = threading.Event()
    ours = engine(eata.Window(model, length=window) if window else model, tmp_path)
    ours.start()
    answer = ours.submit(images(4), "a").result(60)
    assert (answer.version, model.stats.steps) == (0, 0)
    assert (tmp_path / "journal").read_text().split()[1].strip("0") == "1"  # a crash now would lose a batch, and say so
    model.go.set()
    ours.stop()
    assert (ours.mark.version, ours.mark.batches, model.stats.steps) == (1, 1, 1)


def test_what_a_guard_may_change_leaves_after_it_has_decided(engine):
    guard = eata.Guard(Slow(small_net(), lr=0.05))
    guard.method.go = threading.Event()
    guard.method.go.set()
    guard.resting = False  # it answers by the model that learns
    told = []
    guard._compare = lambda *_: told.append(asked.done())
    guard._is_due = lambda _: True
    ours = engine(guard)
    asked = ours.submit(images(4), "a")
    ours.start()
    asked.result(60)
    assert told == [False]


def test_the_threads_of_the_one_that_made_the_model_are_let_go():
    # by name, not by number: threads of an earlier test may end meanwhile
    found = []

    def threads():
        return {task.name for task in Path("/proc/self/task").iterdir()}

    def work():
        before = threads()
        torch.set_num_threads(2)
        torch.randn(512, 512) @ torch.randn(512, 512)
        helpers = threads() - before
        let_helpers_go()
        deadline = time.monotonic() + 10
        while helpers & threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        found.extend([len(helpers), helpers & threads()])

    if sys.platform != "linux":
        pytest.skip("threads are counted in /proc")
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found[0] >= 1
    assert not found[1]


def test_requests_that_wait_become_one_batch_and_each_gets_its_rows(engine):
    model = held()
    ours = engine(model)
    ours.start()
    first = ours.submit(images(1), "a")
    assert model.begun.wait(60)
    waiting = [ours.submit(images(2, number), "a") for number in range(1, 6)]
    model.go.set()
    first.result(60)
    answers = [future.result(60) for future in waiting]
    assert [answer.version for answer in answers] == [1, 1, 1, 1, 2]  # four requests of two samples fill a batch
    alone = learner()
    alone(torch.from_numpy(images(1)))
    joined = alone(torch.from_numpy(np.concatenate([images(2, number) for number in range(1, 5)]))).numpy()
    assert (np.concatenate([answer.logits for answer in answers[:4]]) == joined).all()


def test_a_full_queue_refuses_and_a_request_that_gave_up_is_not_learnt_from(engine):
    model = held()
    ours = engine(model, queue=10)
    ours.start()
    first = ours.submit(images(1), "a")
    assert model.begun.wait(60)
    second = ours.submit(images(8), "a")
    with pytest.raises(Refusal) as refused:
        ours.submit(images(3), "a")
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    assert second.cancel()
    assert not first.cancel()  # begun, so it is answered
    model.go.set()
    first.result(60)
    ours.stop()
    assert model.stats.forwards == 1


def test_stopping_answers_what_waits_and_then_refuses(engine):
    model = held()
    ours = engine(model, wait=30.0)
    ours.start()
    futures: list[Future[Any]] = [ours.submit(images(8, number), "a") for number in range(3)]
    stopping = threading.Thread(target=ours.stop)
    stopping.start()
    while ours.ready:
        time.sleep(0.01)
    with pytest.raises(Refusal, match="stopping"):
        ours.submit(images(1), "a")
    model.go.set()
    assert [future.result(60).version for future in futures] == [0, 1, 2]
    stopping.join(60)
    assert not ours.alive


def test_over_its_share_a_client_is_answered_and_not_learnt_from(engine):
    model = held()
    ours = engine(model, share=0.5)
    ours.start()
    model.go.set()
    ours.submit(images(4), "greedy").result(60)
    assert (model.stats.steps, ours.mark.version) == (0, 0)
    model.go.clear()
    model.begun.clear()
    blocker = ours.submit(images(1), "greedy")
    assert model.begun.wait(60)
    much, little = ours.submit(images(6, 1), "greedy"), ours.submit(images(1, 2), "modest")
    model.go.set()
    blocker.result(60)
    alone = learner()
    taught = torch.from_numpy(np.concatenate([images(6, 1)[:1], images(1, 2)]))
    with alone.frozen():
        outside = alone(torch.from_numpy(images(6, 1)[1:]))
    inside = alone(taught).numpy()
    assert (much.result(60).logits == np.concatenate([inside[:1], outside.numpy()])).all()
    assert (little.result(60).logits == inside[1:]).all()
    assert much.result().version == little.result().version == 0
    ours.stop()
    assert all((value == alone.parameters[name]).all() for name, value in model.parameters.items())
    assert b"eata_limited_samples_total 10.0" in ours.metrics.text()


def test_rollback_freeze_and_reset(engine, tmp_path):
    ours = engine(learner(), tmp_path, save_every=2)
    ours.start()
    for number in range(6):
        ours.submit(images(4, number), "a").result(60)
    ours.freeze(True).result(60)
    at_six = {name: value.clone() for name, value in ours.model.parameters.items()}
    assert ours.submit(images(4, 9), "a").result(60).version == 6
    assert all((ours.model.parameters[name] == value).all() for name, value in at_six.items())
    ours.rollback(4).result(60)
    alone = learner()
    for number in range(4):
        alone(torch.from_numpy(images(4, number)))
    ours.freeze(False).result(60)
    answer = ours.submit(images(4, 7), "a").result(60)
    assert answer.version == 4
    assert (answer.logits == alone(torch.from_numpy(images(4, 7))).numpy()).all()
    assert ours.submit(images(4, 8), "a").result(60).version == 7  # a number is never given twice
    pinned = ours.submit(images(4, 7), "a", version=6).result(60)
    assert pinned.version == 6
    assert ours.mark.version == 8
    ours.reset().result(60)
    assert all((ours.model.parameters[name] == value).all() for name, value in learner().source.items())
    with pytest.raises(Refusal, match="no longer kept"):
        ours.rollback(777).result(60)
    kinds = [event.kind for event in ours.history.events]
    assert kinds == ["freeze", "rollback", "resume", "reset"]


def test_a_kept_version_predicts_and_leaves_no_trace(engine):
    ours = engine(learner(), save_every=1)
    ours.start()
    for number in range(3):
        ours.submit(images(4, number), "a").result(60)
    ours.snapshot().result(60)
    before = ours.model.state_dict()
    first = ours.submit(images(2, 9), "a", version=0).result(60)
    source = learner()
    with source.frozen():
        assert (first.logits == source(torch.from_numpy(images(2, 9))).numpy()).all()
    after = ours.model.state_dict()
    assert before["stats"] == after["stats"]
    assert all((after["parameters"][name] == value).all() for name, value in before["parameters"].items())


def test_a_restart_goes_on_bit_for_bit(engine, tmp_path):
    alone = learner()
    for number in range(3):
        ours = engine(learner(), tmp_path)
        ours.start()
        for seed in (2 * number, 2 * number + 1):
            answer = ours.submit(images(4, seed), "a").result(60)
            assert (answer.logits == alone(torch.from_numpy(images(4, seed))).numpy()).all()
            assert answer.version == seed
        ours.stop()
    assert "nothing was lost" in ours.history.events[0].text


def test_another_models_state_is_refused_and_the_folder_let_go(engine, tmp_path):
    ours = engine(learner(), tmp_path)
    ours.start()
    ours.stop()
    other = engine(eata.BN(small_net()), tmp_path)
    with pytest.raises(StateError, match=r"eata\.Tent"):
        other.start()
    again = engine(learner(), tmp_path)
    again.start()


def test_a_failing_batch_is_answered_and_the_thread_goes_on(engine):
    class Failing(eata.Tent):
        def __call__(self, x):
            if len(x) == 3:
                raise RuntimeError("out of order")
            return super().__call__(x)

    ours = engine(Failing(small_net(), lr=0.05))
    ours.start()
    with pytest.raises(Refusal, match="RuntimeError") as refused:
        ours.submit(images(3), "a").result(60)
    assert refused.value.status == 500
    assert ours.submit(images(4), "a").result(60).version == 0
    assert "out of order" in ours.history.events[0].text


def test_a_full_disk_is_said_and_answers_go_on(engine, tmp_path, monkeypatch):
    ours = engine(learner(), tmp_path, save_every=1)
    ours.start()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eata.state.write", full)
    for number in range(3):
        assert ours.submit(images(4, number), "a").result(60).version == number
    ours.freeze(True).result(60)
    monkeypatch.undo()
    ours.stop()
    assert "could not be saved" in ours.history.events[0].text
    again = engine(learner(), tmp_path)
    again.start()
    assert (again.mark.version, again.loss) == (3, None)


def test_what_operators_see_is_what_happened(engine):
    ours = engine(learner(), source=small_net())
    ours.start()
    alone = learner()
    logits = [alone(torch.from_numpy(images(8, number))) for number in range(3)]
    for number in range(3):
        ours.submit(images(8, number), "a").result(60)
    ours.stop()
    series = ours.history.series()
    assert sum(series["samples"]) == 24
    entropy = sum(float(eata.functional.entropy(each).sum()) for each in logits)
    shown = sum(n * value for n, value in zip(series["samples"], series["entropy"], strict=True))
    assert shown == pytest.approx(entropy, rel=1e-5)
    assert sum(series["chosen"]) == alone.stats.backwards
    counts = np.bincount(logits[0].argmax(1), minlength=3) / 8
    assert series["now"] == pytest.approx(counts.tolist())
    with torch.no_grad():
        source = small_net()(torch.from_numpy(images(8, 0))).argmax(1)
    assert series["source"] == pytest.approx((np.bincount(source, minlength=3) / 8).tolist())
    assert ours.history.images[0].best == int(logits[2].argmax(1)[3])  # the last of the four that are shown


def test_a_guards_alarms_and_the_drift_are_told():
    from dataclasses import dataclass

    from eata.serve import watch

    @dataclass
    class Seen:
        when: int
        what: str

    class Guarded:
        def __init__(self, inner: object) -> None:
            self.model, self.events, self.drift = inner, [Seen(1, "old")], 0.5

    class Window:
        def __init__(self, inner: object) -> None:
            self.model = inner

    model = Window(Guarded(object()))
    decisions = watch.Decisions(model)
    assert watch.drift(model) == 0.5
    assert decisions.fresh(model) == []
    model.model.events.append(Seen(2, "collapse"))
    assert decisions.fresh(model) == [("alarm", "when: 2, what: collapse")]
    assert decisions.fresh(model) == []
    model.model.events[:] = [Seen(3, "a new list"), Seen(4, "and more")]
    assert len(decisions.fresh(model)) == 2

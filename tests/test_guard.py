"""The guard: what it sees, what it does, and that it is an adapter like any other."""

import collections
import copy
import logging
import math
import random
import statistics

import pytest
import torch
from torch import nn

import eata
from eata import guard
from eata.guard import BLOCK, KEPT, Comparison
from test_adapter import trees_equal


def budgeted(net, digits, **arguments):
    settings = {"e0": 0.9, "epsilon": 1.0, "lr": 0.01, "budget": 0.02, **arguments}
    return eata.EATA(net, eata.fisher(net, digits[0][:128]), **settings)


MODELS = {
    "eata": budgeted,
    "auto": lambda net, digits: budgeted(net, digits, prior="auto"),
    "tent": lambda net, digits: eata.Tent(net, lr=0.01),
    "bn": lambda net, digits: eata.BN(net, prior=16),
    "window": lambda net, digits: eata.Window(budgeted(net, digits), length=16),
    "exact window": lambda net, digits: eata.Window(eata.Tent(net, lr=0.01), length=16, exact=True),
}


_flat: list[nn.Module] = []


@pytest.fixture
def trained(digits):
    """Factory of a trained net that stands and falls with its BatchNorm statistics: they are over samples only."""

    def make():
        if not _flat:
            torch.manual_seed(1)
            net = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
                nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10),
            )  # fmt: skip
            optimizer = torch.optim.Adam(net.parameters(), 0.01)
            for _ in range(6):
                for index in torch.randperm(1000).split(50):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(digits[0][index]), digits[1][index]).backward()
                    optimizer.step()
            _flat.append(net)
        return copy.deepcopy(_flat[0])

    return make


@pytest.fixture
def by_class(digits):
    """Clean digits sorted by class: batch statistics fail on them, the source does not."""

    def make(size=64, count=12):
        images, labels = digits[0][1000:], digits[1][1000:]
        order = labels.argsort(stable=True)
        return list(zip(images[order].split(size), labels[order].split(size), strict=True))[:count]

    return make


def error(model, batches):
    wrong = torch.cat([model(x).argmax(1) != y for x, y in batches])
    return wrong.float().mean().item()


# --- what it sees -----------------------------------------------------------------------------------------------------


def naive_comparison(adapted, source):
    n = len(adapted)
    agree = cost = 0.0
    for a, s in zip(adapted, source, strict=True):
        if a.index(max(a)) == s.index(max(s)):
            agree += 1 / n
        else:
            cost += (max(s) - max(a)) / n

    def classes(rows):
        shares = [count / n for count in collections.Counter(row.index(max(row)) for row in rows).values()]
        return math.exp(-sum(share * math.log(share) for share in shares))

    costs = [(max(s) - max(a)) * (a.index(max(a)) != s.index(max(s))) for a, s in zip(adapted, source, strict=True)]
    return agree, cost, statistics.stdev(costs) / math.sqrt(n), classes(adapted), classes(source)


def test_the_comparison_is_the_naive_one():
    for seed in range(5):
        torch.manual_seed(seed)
        adapted, source = torch.randn(2, 30, 5).mul(3).double().softmax(2)
        got = Comparison.of(adapted, source)
        want = naive_comparison(adapted.tolist(), source.tolist())
        assert (got.agreement, got.cost, got.doubt, got.classes, got.source_classes) == pytest.approx(want)


def test_the_source_answers_as_the_source_does(trained, digits, stream):
    """Whatever the weights are by now, and nothing of them is lost."""
    model = eata.Guard(eata.Tent(trained(), lr=0.1))
    for x in stream([64] * 4):
        model(x)
    x = stream([32])[0]
    before = copy.deepcopy(model.state_dict())
    assert torch.allclose(model._of_source(eata.Inputs(x)), trained().eval()(x), atol=1e-5)
    assert trees_equal(before, model.state_dict())


# --- what it does -----------------------------------------------------------------------------------------------------


def naive_surer(adapted, source):
    pairs = zip(adapted, source, strict=True)
    return torch.stack([a if a.softmax(0).max() >= s.softmax(0).max() else s for a, s in pairs])


def test_a_good_stream_is_left_alone(trained, digits, stream):
    """It learns as the method itself from the start; at first the surer one of both answers, then the method alone."""
    guarded, plain, net = eata.Guard(budgeted(trained(), digits)), budgeted(trained(), digits), trained().eval()
    doubted = []
    for x in stream([64] * 24, noise=0.3):
        answer, want = guarded(x), plain(x)
        doubted.append(guarded.comparing)
        if guarded.comparing:
            torch.testing.assert_close(answer, naive_surer(want, net(x)), atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(answer, want)
    assert not all(doubted)
    assert [event.kind for event in guarded.events] == ["adapting"]
    assert guarded.stats.forwards == 64 * 24


def test_the_surer_one_is_never_the_one_without_an_answer():
    adapted, source = torch.tensor([[math.nan, 0.0], [9.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert torch.equal(guard._surer(adapted, source), torch.tensor([[1.0, 0.0], [9.0, 0.0]]))
    pixels = torch.randn(2, 3, 4, 4)  # one choice for each image
    assert torch.equal(guard._surer(torch.zeros_like(pixels), pixels), pixels)


@pytest.mark.parametrize(
    ("cost", "doubt", "good", "bad", "alarming"),
    [
        (-0.06, 0.01, True, False, False),
        (-0.01, 0.02, False, False, False),
        (0.0, 0.0, True, False, False),
        (0.03, 0.01, False, True, False),
        (0.20, 0.01, False, True, True),
        (0.07, 0.04, False, True, False),
        (0.20, 0.30, False, False, False),
        (math.nan, 0.01, False, False, False),
    ],
)
def test_a_judgement_weighs_cost_and_doubt(cost, doubt, good, bad, alarming):
    seen = Comparison(0.5, cost, doubt, classes=9.0, source_classes=9.0)
    assert (seen.is_good, seen.is_bad, seen.is_alarming) == (good, bad, alarming)
    collapsed = Comparison(0.5, cost, doubt, classes=2.0, source_classes=9.0)
    assert (collapsed.is_good, collapsed.is_bad, collapsed.is_alarming) == (False, True, True)


def test_comparisons_become_rare(trained, digits, monkeypatch):
    model = eata.Guard(eata.BN(trained(), prior=1e9))  # as the source: no doubt
    compared = []
    original = eata.Guard._of_source
    monkeypatch.setattr(
        eata.Guard, "_of_source", lambda self, *args: compared.append(self.batches) or original(self, *args)
    )
    monkeypatch.setattr("eata.guard.LITTLE", math.inf)
    x = digits[0][1000:1064]
    for _ in range(70):
        model(x)
    (event,) = model.events
    assert event.kind == "adapting"
    later = [event.batch + after for after in (1, 3, 7, 15, 31, 47, 63)]
    assert compared == [*range(1, event.batch + 1), *(batch for batch in later if batch <= 70)]


def test_a_surprise_is_compared_at_once(trained, shuffled, by_class):
    model = eata.Guard(eata.BN(trained(), prior=0))
    for x in shuffled[:6]:
        model(x)
    assert not model.resting
    x, y = by_class()[0]
    assert (model(x).argmax(1) == y).float().mean() > 0.8
    assert model.resting or model.comparing
    model(by_class()[3][0])
    assert [(event.kind, event.batch <= 8) for event in model.events[:2]] == [("adapting", True), ("alarm", True)]


def test_sorted_by_class_the_source_answers(trained, digits, by_class):
    batches = by_class()
    source = error(eata.Source(trained()), batches)
    assert error(budgeted(trained(), digits), batches) > source + 0.2
    guarded = eata.Guard(budgeted(trained(), digits))
    assert error(guarded, batches) <= source + 0.01
    assert guarded.events[0].kind == "alarm"


def test_it_comes_back_and_learns_again(trained, digits, by_class, stream):
    model = eata.Guard(budgeted(trained(), digits))
    for x, _ in by_class(count=3):
        model(x)
    assert model.resting
    assert model.stats.steps == 1  # of the batch at which it was stopped; undone
    assert is_source(model)
    for x in stream([64] * 8, noise=0.3):
        model(x)
    assert not model.resting
    assert model.stats.steps > 0
    assert [event.kind for event in model.events] == ["alarm", "adapting"]


@pytest.fixture
def shuffled(digits):
    """Clean digits, shuffled."""
    order = torch.randperm(len(digits[0]) - 1000, generator=torch.Generator().manual_seed(0)) + 1000
    return list(digits[0][order].split(64))


def collapse(model):
    """As if steps had led there: one class for everything."""
    with torch.no_grad():
        for parameter in model.method.parameters.values():
            parameter.zero_()


def is_source(model):
    return all(torch.equal(p, model.method.source[n]) for n, p in model.method.parameters.items())


def test_a_collapse_is_undone(trained, shuffled):
    """The weights go back to those of the last good comparison, and what was spent stays spent."""
    model = eata.Guard(eata.Tent(trained(), lr=0.001))
    for x in shuffled[:4]:
        model(x)
    assert not model.resting
    good, spent = copy.deepcopy(model.kept[-1]["parameters"]), model.stats.steps
    collapse(model)
    model(shuffled[4])
    assert model.events[-1].kind == "alarm"
    assert trees_equal({n: p.detach() for n, p in model.method.parameters.items()}, good)
    assert not is_source(model)
    assert model.stats.steps >= spent
    for x in 2 * shuffled:
        model(x)
    assert not model.resting


def test_if_the_last_good_state_is_no_better_the_source_is_next(trained, shuffled, by_class):
    model = eata.Guard(eata.Tent(trained(), lr=0.01))
    for x in shuffled[:4]:
        model(x)
    for x, _ in by_class():
        model(x)
    assert [event.kind for event in model.events] == ["adapting", "alarm", "reset"]
    assert is_source(model)


def test_good_judgements_have_to_come_in_a_row(trained, shuffled, by_class):
    model = eata.Guard(eata.BN(trained(), prior=0))
    for x, _ in by_class(count=3):
        model(x)
    assert model.need == 2
    bad = by_class()[0][0]
    while model.good == 0:
        model(shuffled[0])
    while model.good:
        model(bad)
    assert model.resting


def test_after_each_alarm_it_takes_longer_to_come_back(trained, shuffled):
    model = eata.Guard(eata.Tent(trained(), lr=0.001))
    rests = []
    for _ in range(3):
        while model.resting:
            model(shuffled[0])
        collapse(model)
        model(shuffled[1])
        assert model.resting
        rests.append(model.need)
    assert rests == [2, 4, 8]


def test_small_batches_are_judged_together(trained, digits, by_class):
    model = eata.Guard(eata.BN(trained(), prior=0))
    batches = by_class(size=4, count=40)
    judged = BLOCK // 4
    assert error(model, batches[:judged]) <= error(eata.Source(trained()), batches[:judged]) + 0.1
    first = model.events[0]
    assert (first.kind, first.batch) == ("alarm", judged)
    assert error(model, batches[judged:]) == error(eata.Source(trained()), batches[judged:])


def test_frozen_only_predicts(trained, digits, stream, by_class):
    model = eata.Guard(budgeted(trained(), digits))
    for x, _ in by_class(count=2):
        model(x)
    x = stream([16])[0]
    before = copy.deepcopy(model.state_dict())
    with model.frozen():
        resting = model(x)
    assert torch.allclose(resting, trained().eval()(x), atol=1e-5)
    after = model.state_dict()
    before["model"]["stats"]["forwards"] += 16
    before["stats"]["forwards"] += 16
    assert trees_equal(before, after)


def test_events_are_told(trained, by_class, caplog):
    told = []
    model = eata.Guard(eata.BN(trained(), prior=0), on_event=told.append)
    with caplog.at_level(logging.INFO, "eata.guard"):
        for x, _ in by_class(count=2):
            model(x)
    assert told == model.events
    (event,) = told
    assert isinstance(event, eata.Event)
    assert event.batch == 1
    assert event.seen.cost > 0.1
    assert str(event) in caplog.text
    assert "batch 1: the source answers" in str(event)


def test_with_nothing_to_gain_the_source_answers(trained, digits, by_class, shuffled):
    """A method that is a little worse than the source on clean images, and never by enough for an alarm."""

    class Duller(eata.BN):
        def answer(self, batch):
            logits = batch.logits.clone()
            logits[:4] = logits[:4].roll(1, 1) / 4  # some are wrong, and less sure
            return logits

    model = eata.Guard(Duller(trained(), prior=1e6))
    for x in shuffled[:8]:
        assert torch.equal(model(x).argmax(1), trained().eval()(x).argmax(1))
    assert [event.kind for event in model.events] == ["waiting"]


def test_bad_rows_and_bad_logits(trained, digits, stream):
    model = eata.Guard(budgeted(trained(), digits))
    x = stream([64])[0]
    x[::8] = math.nan
    logits = model(x)
    assert torch.isnan(logits[::8]).all()
    assert torch.isfinite(logits[1::8]).all()
    for _ in range(2):
        assert not torch.isfinite(model(torch.full((64, 1, 8, 8), 1e38))).all()
    for x in stream([64] * 20, noise=0.3):
        assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("seed", range(3))
def test_any_stream_leaves_the_answers_sane(seed, trained, digits, stream, by_class):
    """Batches of any size, shuffled, sorted, constant and noise, in any order: finite answers, drift in the budget."""
    draw = random.Random(seed)
    model = eata.Guard(budgeted(trained(), digits, lr=0.2))
    choices = [
        *stream([5, 64, 130]), *(x for x, _ in by_class(count=3)), torch.zeros(64, 1, 8, 8), torch.randn(64, 1, 8, 8),
    ]  # fmt: skip
    for _ in range(20):
        assert torch.isfinite(model(draw.choice(choices))).all()
        assert model.method.drift <= 0.02 * 1.001
        assert len(model.kept) <= KEPT


# --- an adapter like any other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_it_resets_saves_and_resumes_bit_for_bit(name, trained, digits, stream, by_class, tmp_path):
    def make():
        return eata.Guard(MODELS[name](trained(), digits))

    good, bad = stream([64, 5, 16, 64], noise=0.3), [x for x, _ in by_class(count=3)]
    model, batches = make(), [*good, *bad, *good, *good]
    fresh = copy.deepcopy(model.state_dict())
    first = [model(x) for x in batches]
    model.reset()
    assert trees_equal(fresh, model.state_dict())
    again = []
    for number, x in enumerate(batches):
        model.save(tmp_path / "state")
        model = make() if number % 3 == 2 else model
        model.load(tmp_path / "state")
        again.append(model(x))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_it_moves(trained, digits, stream):
    model = eata.Guard(budgeted(trained(), digits))
    for x in stream([64] * 3):
        model(x)
    model.to(torch.float64)
    assert model(stream([64], torch.float64)[0]).dtype == torch.float64


def test_unwrap_and_snapshot(trained, stream, by_class):
    net = trained()
    model = eata.Guard(eata.BN(net, prior=0))
    for x, _ in by_class(count=2):
        model(x)
    x = stream([16])[0]
    with model.frozen():
        torch.testing.assert_close(model.snapshot()(x), model(x), atol=1e-5, rtol=1e-5)
    assert model.unwrap() is net


def test_a_net_without_batch_norm(digits, stream):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10))
    model = eata.Guard(budgeted(net, digits, e0=1.0))
    for x in stream([64] * 6):
        model(x)
    assert model.stats.steps
    assert not model.resting


def test_what_cannot_be_guarded_is_said(trained):
    with pytest.raises(TypeError, match="wraps an adapter, not a Sequential"):
        eata.Guard(trained())
    model = eata.Guard(eata.Tent(trained(), lr=0.1))
    with pytest.raises(ValueError, match="has a guard already"):
        eata.Guard(model)
    with pytest.raises(TypeError, match=r"eata\.Window wraps an adapter, not a Guard"):
        eata.Window(model)
    bare = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 3))
    with pytest.raises(ValueError, match="no running statistics"):
        eata.Guard(eata.Tent(bare, lr=0.1))

"""The loop's promises: bad input, state, modes. What a step computes is tested in tests/methods."""

import copy
import math
import signal
import subprocess
import sys
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import eata
from eata import state
from eata.inputs import logits_of


def trees_equal(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(trees_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(trees_equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def make_eata(net, digits, **arguments):
    settings = {"beta": 5.0, "e0": 0.5, "epsilon": 0.6, "lr": 0.01, **arguments}
    return eata.EATA(net, eata.fisher(net, digits[0][:128].to(next(net.parameters()).dtype)), **settings)


def pictured(net):
    """Says how its input is normalized, for the methods that make other images."""
    net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    return net


METHODS = {
    "Source": lambda net, digits: eata.Source(net),
    "BN": lambda net, digits: eata.BN(net, prior=16),
    "Tent": lambda net, digits: eata.Tent(net, lr=0.01),
    "Tent (episodic)": lambda net, digits: eata.Tent(net, lr=0.01, episodic=True),
    "ETA": lambda net, digits: eata.ETA(net, e0=0.5, epsilon=0.6, lr=0.01),
    "EATA": make_eata,
    "RDumb": lambda net, digits: eata.RDumb(net, e0=0.5, epsilon=0.6, lr=0.01, every=3),
    "SAR": lambda net, digits: eata.SAR(net, e0=0.5, lr=0.01, exclude=()),
    "DeYO": lambda net, digits: eata.DeYO(net, e0=0.6, plpd=0.1, lr=0.01, exclude=()),
    "ROID": lambda net, digits: eata.ROID(pictured(net)),
    "LAME": lambda net, digits: eata.LAME(net),
    "CoTTA": lambda net, digits: eata.CoTTA(pictured(net), copies=2, restore=0.1),
    "RoTTA": lambda net, digits: eata.RoTTA(pictured(net), capacity=10),
}


def name_of(model) -> str:
    return "Tent (episodic)" if getattr(model, "episodic", False) else type(model).__name__


@pytest.fixture(params=METHODS)
def model(request, trained, digits):
    return METHODS[request.param](trained(), digits)


# --- bad input: a clear error or a defined behaviour, and the state after it is the state before it -----------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.empty(0, 1, 8, 8), "batch is empty"),
        (torch.tensor(1.0), "batch is empty"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), "normalized as in its training"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.int64), "normalized as in its training"),
        (torch.zeros(1, 8, 8), "(8D|3D|shape|batch|B, C, H, W)"),
        (torch.zeros(4, 3, 8, 8), r"does not take input of shape|holds images"),
        (torch.zeros(4, 1, 8, 8, device="meta"), "on meta and the net on cpu"),
        ([1, 2], "one tensor"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(model, bad, words, stream):
    model(stream([16])[0])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=words):
        model(bad)
    assert trees_equal(before, model.state_dict())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_rows_are_left_out_as_if_they_had_not_been_there(model, value, stream, trained, digits):
    twin = METHODS[name_of(model)](trained(), digits)
    for x in stream([16, 12]):
        spoiled = torch.cat([x[:3], x[:1], x[3:], x[:1]])
        spoiled[3, 0, 2, 5] = value
        spoiled[-1] = value
        got = model(spoiled)
        want = twin(x)
        assert torch.isnan(got[3]).all()
        assert torch.isnan(got[-1]).all()
        assert torch.equal(got[[0, 1, 2, *range(4, len(x) + 1)]], want)
    assert model.stats.rejected == 4
    assert twin.stats.rejected == 0
    left, right = model.state_dict(), twin.state_dict()
    left["stats"]["rejected"] = 0
    assert trees_equal(left, right)


def test_a_batch_of_bad_rows_only(model):
    got = model(torch.full((5, 1, 8, 8), math.nan))
    assert got.shape == (5, 10)
    assert torch.isnan(got).all()
    assert model.stats.rejected == 5
    assert model.stats.forwards == model.stats.steps == 0


class Broken(nn.Module):
    """A net whose output is infinite where the first pixel is above 5."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) + torch.where(x[:, 0, 0, 0] > 5, math.inf, 0.0)[:, None]


def test_non_finite_logits_for_finite_input_are_counted_and_not_learnt_from(trained, stream):
    model = eata.Tent(Broken(trained()), lr=0.1)
    x = stream([8])[0]
    x[2, 0, 0, 0] = 6.0
    with pytest.warns(UserWarning, match="no step"):
        model(x)
    assert (model.stats.rejected, model.stats.steps, model.stats.backwards) == (1, 0, 0)
    assert all(torch.equal(p, model.source[n]) for n, p in model.parameters.items())


def test_a_gradient_that_is_not_finite_is_no_step(trained, stream):
    model = eata.ETA(trained(), e0=1.0, epsilon=1.0, lr=0.1)
    model.penalty = lambda: torch.tensor(math.inf) * next(iter(model.parameters.values())).sum()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="not finite"):
        model(stream([8])[0])
    after = model.state_dict()
    assert after["stats"]["steps"] == after["stats"]["backwards"] == 0
    assert after["memory"]["average"] is None
    assert trees_equal(before["parameters"], after["parameters"])
    assert trees_equal(before["optimizer"], after["optimizer"])


def test_a_batch_of_one_predicts_and_points_to_window_once(trained, stream):
    model = eata.Tent(trained())
    x = stream([1, 1])
    with pytest.warns(UserWarning, match=r"eata\.Window"):
        assert model(x[0]).shape == (1, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x[1])


def test_one_value_per_channel_falls_back_to_the_source_statistics():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    x = torch.randn(1, 3)
    want = net(x).detach()
    model = eata.Tent(net)
    with pytest.warns(UserWarning, match="batch of 1"):
        torch.testing.assert_close(model(x), want)


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        eata.Tent(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))(torch.randn(4, 3))


def test_a_net_that_reshapes_the_batch_away_is_refused():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(0))
    with pytest.raises(ValueError, match="batch first"):
        eata.Tent(net)(torch.randn(4, 3))


def test_only_a_module_can_be_wrapped():
    with pytest.raises(TypeError, match="wraps a"):
        eata.Source(lambda x: x)


def test_a_net_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        net = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="inference_mode"):
        eata.Tent(net)


def test_nothing_to_adapt_is_said():
    with pytest.raises(ValueError, match="no normalization layer"):
        eata.Tent(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="affine=False"):
        eata.Tent(nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)))


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        eata.preset("cifar-10")
    with pytest.raises(ValueError, match="did you mean 'tent'"):
        eata.method("tend")


# --- callers, outputs, shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_changes_nothing(context, trained, stream, digits):
    plain, guarded = make_eata(trained(), digits), make_eata(trained(), digits)
    for x in stream([16, 16, 16]):
        want = plain(x)
        with context():
            got = guarded(x * 1.0)  # under inference_mode this input is an inference tensor
            assert not got.requires_grad
        assert torch.equal(got, want)
    assert guarded.stats.steps > 0
    assert trees_equal(plain.state_dict(), guarded.state_dict())


def test_autocast_steps_in_full_precision(trained, stream):
    model = eata.Tent(trained(), lr=0.01)
    for x in stream([16, 16]):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
    assert logits.dtype == torch.bfloat16
    assert model.stats.steps == 2
    for name, parameter in model.parameters.items():
        assert parameter.dtype == torch.float32
        assert torch.isfinite(parameter).all()
        assert not torch.equal(parameter, model.source[name])


Output = namedtuple("Output", ["hidden", "logits"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, y * 0),
        lambda y: [y],
        lambda y: {"logits": y, "loss": None},
        lambda y: Output(y * 0, y),
    ],
)
def test_which_output_counts(wrap, trained, stream):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = trained()

        def forward(self, x):
            return wrap(self.net(x))

    x = stream([16])[0]
    assert torch.equal(eata.Tent(Wrapped())(x), eata.Tent(trained())(x))


def test_an_output_without_logits_is_refused():
    for output in (3.0, {"scores": torch.zeros(1, 2)}, ()):
        with pytest.raises(TypeError, match="no tensor"):
            logits_of(output)


def test_dense_prediction_selects_whole_samples():
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1))
    net[3].weight.data *= 10
    model = eata.ETA(net, e0=0.8, epsilon=1.0, lr=0.01)
    x = torch.randn(6, 1, 7, 9)
    logits = model(x)
    assert logits.shape == (6, 5, 7, 9)
    pixels = torch.distributions.Categorical(logits=logits.permute(0, 2, 3, 1))
    entropies = pixels.entropy().mean((1, 2))
    assert model.stats.reliable == int((entropies < 0.8 * math.log(5)).sum())
    assert model.average.shape == (5,)


def test_inputs_of_any_shape():
    sequence = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    assert eata.Tent(sequence)(torch.randn(5, 2, 11)).shape == (5, 3)
    video = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 3))
    assert eata.Tent(video)(torch.randn(5, 1, 4, 6, 5)).shape == (5, 3)
    text = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(24, 3))
    assert eata.Tent(text)(torch.randint(0, 10, (5, 6))).shape == (5, 3)


# --- life and state -------------------------------------------------------------------------------------------------


def test_reset_leaves_no_trace(model, stream):
    fresh = copy.deepcopy(model.state_dict())
    batches = stream([16, 16, 16])
    first = [model(x) for x in batches]
    model.reset()
    assert trees_equal(fresh, model.state_dict())
    assert all(torch.equal(a, model(x)) for a, x in zip(first, batches, strict=True))


def test_a_saved_state_resumes_bit_for_bit(model, stream, trained, digits, tmp_path):
    batches = stream([16] * 8)
    for x in batches[:4]:
        model(x)
    model.save(tmp_path / "state.safetensors")
    other = METHODS[name_of(model)](trained(), digits)
    other.load(tmp_path / "state.safetensors")
    for x in batches[4:]:
        assert torch.equal(model(x), other(x))
    assert trees_equal(model.state_dict(), other.state_dict())


def test_a_state_dict_is_a_copy(trained, digits, stream):
    model = make_eata(trained(), digits)
    x, y = stream([16, 16])
    model(x)
    saved = model.state_dict()
    kept = copy.deepcopy(saved)
    model(y)
    assert trees_equal(saved, kept)
    model.load_state_dict(saved)
    model(y)
    assert trees_equal(saved, kept)


def refused(model, path, words):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        model.load(path)
    assert trees_equal(before, model.state_dict())


def test_states_that_do_not_fit_are_refused_and_change_nothing(trained, digits, stream, tmp_path):
    model = make_eata(trained(), digits)
    model(stream([16])[0])
    good = tmp_path / "good.safetensors"
    model.save(good)

    refused(model, tmp_path / "missing", "There is no state file")
    truncated = tmp_path / "truncated"
    truncated.write_bytes(good.read_bytes()[:-100])
    refused(model, truncated, "truncated")
    (tmp_path / "text").write_text("hello")
    refused(model, tmp_path / "text", "truncated or not a state file")

    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    refused(model, tmp_path / "foreign", "not a state saved by eata")
    save_file({"x": torch.zeros(1)}, tmp_path / "newer", {"eata": "999", "state": "{}"})
    refused(model, tmp_path / "newer", "newer eata")

    eta = eata.ETA(trained())
    refused(eta, good, "state is of eata.EATA")
    refused(make_eata(trained(), digits, lr=0.02), good, "saved with lr=0.01")
    other = trained()
    other[0].weight.data[0] += 1
    refused(make_eata(other, digits), good, "another model")
    with pytest.raises(ValueError, match="not an adaptation state"):
        model.load_state_dict({"weights": 1})


def test_a_failed_save_keeps_the_old_file(trained, stream, tmp_path, monkeypatch):
    model = eata.Tent(trained())
    path = tmp_path / "state.safetensors"
    model.save(path)
    before = path.read_bytes()

    def full(tensors, name, metadata):
        Path(name).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_file", full)
    model(stream([8])[0])
    with pytest.raises(OSError, match="No space"):
        model.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_unwrap_gives_the_callers_net_back(model, stream, trained):
    net = model.net
    net_before = trained()
    x = stream([16])[0]
    model(x)
    assert model.unwrap() is net
    for (name, new), (_, old) in zip(net.named_buffers(), net_before.named_buffers(), strict=True):
        assert torch.equal(new, old), name
    assert all(p.requires_grad for p in net.parameters())
    assert all(a.training == b.training for a, b in zip(net.modules(), net_before.modules(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    with pytest.raises(RuntimeError, match="unwrapped"):
        model(x)


def test_mixed_flags_and_modes_come_back(trained):
    net = trained()
    net.eval()
    net[1].train()
    net[0].weight.requires_grad_(False)
    flags = [p.requires_grad for p in net.parameters()]
    modes = [m.training for m in net.modules()]
    eata.Tent(net).unwrap()
    assert flags == [p.requires_grad for p in net.parameters()]
    assert modes == [m.training for m in net.modules()]


def test_a_net_is_wrapped_once_at_a_time(trained, digits):
    net = trained()
    model = eata.Tent(net)
    with pytest.raises(ValueError, match=r"wrapped by eata\.Tent"):
        eata.ETA(net)
    with pytest.raises(ValueError, match=r"wrapped by eata\.Tent"):
        eata.fisher(net, digits[0][:64])
    del model  # a forgotten adapter gives the net back as well
    again = eata.ETA(net)
    assert again.unwrap() is net


def test_frozen_predicts_only(model, stream):
    x, y = stream([16, 16])
    model(x)
    before = copy.deepcopy(model.state_dict())
    with model.frozen():
        first = model(y)
        assert torch.equal(first, model(y))
    after = model.state_dict()
    assert after["stats"]["forwards"] == before["stats"]["forwards"] + 32
    after["stats"]["forwards"] -= 32
    assert trees_equal(before, after)


CHILD = """
import sys, torch
sys.path.insert(0, {tests!r})
import eata
from conftest import small_net
from pathlib import Path
torch.set_num_threads(1)
torch.manual_seed(0)
net = small_net()
images = torch.randn(64, 1, 8, 8)
model = eata.EATA(net, eata.fisher(net, images), beta=1.0, e0=1.0, epsilon=1.0, lr=0.05)
folder = Path(sys.argv[1])
if (folder / "state").exists():
    model.load(folder / "state")
for number in range(model.stats.forwards // 16, 30):
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(number))
    logits = model(x)
    with open(folder / "predictions", "a") as file:
        file.write(f"{{number}} {{logits.double().sum().item().hex()}}\\n")
    model.save(folder / "state")
    print(number, flush=True)
"""


def test_kill_9_in_the_middle_of_a_stream_loses_nothing(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(tests=str(Path(__file__).parent)))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    subprocess.run([sys.executable, script, whole], check=True, stdout=subprocess.DEVNULL)
    for stop_after in (4, 17):
        child = subprocess.Popen([sys.executable, script, broken], stdout=subprocess.PIPE, text=True)
        for line in child.stdout:
            if int(line) >= stop_after:
                child.send_signal(signal.SIGKILL)
                break
        child.wait()
        child.stdout.close()
        assert child.returncode == -signal.SIGKILL
    subprocess.run([sys.executable, script, broken], check=True, stdout=subprocess.DEVNULL)
    # A batch may be predicted twice (killed between prediction and save), but always with the same result.
    assert set((whole / "predictions").read_text().split("\n")) == set((broken / "predictions").read_text().split("\n"))
    assert trees_equal(state.read(whole / "state"), state.read(broken / "state"))


def test_importing_eata_is_quick():
    """Light imports only: nothing that is heavy and not torch comes along."""
    heavy = {"kornia", "sklearn", "matplotlib", "timm", "jinja2", "typer", "scipy"}
    code = f"import sys, eata; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


# --- found by review ------------------------------------------------------------------------------------------------


def test_a_constructor_that_fails_leaves_the_net_as_it_was(trained, digits):
    net = trained()
    before = copy.deepcopy(net.state_dict())

    def bad(parameters):
        raise KeyError("no such optimizer")

    with pytest.raises(KeyError) as caught:  # the traceback still holds the half-made adapter
        eata.Tent(net, optimizer=bad)
    assert eata.check(net) == []
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert trees_equal(dict(net.state_dict()), dict(before))
    eata.Tent(net)
    del caught


def test_a_copy_and_the_state_dict_of_a_wrapped_net_are_whole(trained, stream):
    net = trained()
    names = list(net.state_dict())
    model = eata.Tent(net, lr=0.1)
    x = stream([16])[0]
    model(x)
    assert list(net.state_dict()) == names
    copied = copy.deepcopy(net)
    source = eata.Source(copied)
    plain = trained()
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(source(x), plain.eval()(x).detach())


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_a_snapshot_is_a_net_of_its_own_that_predicts_as_the_adapter_does(norm, trained, stream):
    model = eata.Tent(trained(norm), lr=0.1)
    x, y, z = stream([32, 32, 32])
    model(x)
    net = model.snapshot(y) if norm == "bn" else model.snapshot()
    with model.frozen():
        torch.testing.assert_close(net(y), model(y), atol=1e-5, rtol=1e-4)
    before = net(y)
    model(z)
    assert torch.equal(net(y), before)
    assert not net.training
    exported = torch.export.export(net, (y,)).module()
    torch.testing.assert_close(exported(y), before, atol=1e-5, rtol=1e-4)
    if norm == "bn":
        with pytest.raises(eata.EataError, match=r"model\.snapshot\(x\)"):
            model.snapshot()
        mixed = eata.BN(trained(), prior=16)
        torch.testing.assert_close(mixed.snapshot(y)(y), mixed(y), atol=1e-5, rtol=1e-4)


def test_what_is_saved_is_what_is_used(trained, digits, stream):
    model = make_eata(trained(), digits)
    model.e0, model.lr = 0.9, 0.02
    saved = model.state_dict()
    assert (saved["settings"]["e0"], saved["settings"]["lr"]) == (0.9, 0.02)
    with pytest.raises(eata.StateError, match=r"saved with lr=0\.02"):
        make_eata(trained(), digits, e0=0.9).load_state_dict(saved)
    with pytest.raises(eata.StateError, match=r"saved with e0=0\.9"):
        make_eata(trained(), digits, lr=0.02).load_state_dict(saved)
    other = make_eata(trained(), digits, e0=0.9, lr=0.02)
    other.load_state_dict(saved)
    for x in stream([16, 16]):
        assert torch.equal(model(x), other(x))


def test_the_optimizers_kind_belongs_to_the_state(trained, stream):
    adam = eata.Tent(trained(), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    adam(stream([16])[0])
    sgd = eata.Tent(trained(), lr=0.01)
    before = copy.deepcopy(sgd.state_dict())
    with pytest.raises(eata.StateError, match=r"saved with optimizer='Adam\(.*has optimizer='SGD\("):
        sgd.load_state_dict(adam.state_dict())
    assert trees_equal(before, sgd.state_dict())
    nesterov = eata.Tent(trained(), optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True))
    with pytest.raises(eata.StateError, match="nesterov=True"):
        nesterov.load_state_dict(sgd.state_dict())


def test_arguments_after_the_net_are_named(trained):
    with pytest.raises(TypeError):
        eata.Tent(trained(), 0.01)
    with pytest.raises(TypeError):
        eata.EATA(trained(), {}, 5.0)
    with pytest.raises(TypeError, match="learning_rate"):
        eata.ETA(trained(), learning_rate=0.1)


def test_a_preset_gives_each_method_its_own_learning_rate():
    assert eata.preset("digits", eata.TTT)["lr"] == 0.001
    assert eata.preset("digits", eata.Tent)["lr"] == 0.05

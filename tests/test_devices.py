"""Any device: how often a step waits for it, half precision, compiled nets, moves. No accelerator is needed."""

import copy
import threading

import pytest
import torch
from benchmarks.nets import resnet50
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import eata
from eata import norm

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default}


class Waits(TorchDispatchMode):
    """Counts what would wait for a device, and copies to the host (``Tensor.cpu``, by its function mode)."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.copies = _Copies(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_host = func is aten._to_copy.default and str(kwargs.get("device")) == "cpu"
        self.count += func in WAITS or to_host
        return func(*args, **kwargs)


class _Copies(TorchFunctionMode):
    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.waits.count += func in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy)
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_the_device_at_most_four_times():
    net = resnet50(10)
    fisher = {name: torch.rand_like(p) for name, p in norm.affine_parameters(net).items()}
    model = eata.EATA(net, fisher, e0=1.0, epsilon=1.0, lr=1e-6, backward="full")
    x = torch.randn(4, 3, 32, 32)
    model(x)
    with Waits() as waits, waits.copies:
        model(x)
    assert model.stats.steps == 2
    # The host's own view of the two masks (numpy) is no further wait, but is counted here.
    assert waits.count - 1 <= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward", ["rows", "full"])
def test_autocast_steps_near_those_of_full_precision(dtype, backward, trained, stream):
    half, full = (eata.ETA(trained(), e0=1.0, epsilon=1.0, lr=0.05, backward=backward) for _ in range(2))
    for x in stream([32] * 4):
        full(x)
        with torch.autocast("cpu", dtype):
            logits = half(x)
    assert logits.dtype == dtype
    assert half.stats.steps == full.stats.steps == 4
    moved = [torch.cat([(p - m.source[n]).flatten() for n, p in m.parameters.items()]) for m in (half, full)]
    assert torch.nn.functional.cosine_similarity(*moved, 0) > 0.9
    assert all(p.dtype == torch.float32 for p in half.parameters.values())


def test_float16_gradients_are_scaled_and_an_overflow_lowers_the_scale(trained, stream):
    model = eata.Tent(trained(), lr=0.01)
    x = stream([16])[0]
    with torch.autocast("cpu", torch.float16):
        model(x)
        assert model.loss_scale == [2.0**16, 1]
        model.loss_scale = [2.0**60, 0]  # overflows float16
        before = {name: p.detach().clone() for name, p in model.parameters.items()}
        with pytest.warns(UserWarning, match="not finite"):
            model(x)
    assert model.loss_scale == [2.0**59, 0]
    assert all(torch.equal(p, before[name]) for name, p in model.parameters.items())
    model(x)  # without autocast nothing is scaled
    assert model.loss_scale == [2.0**59, 0]


def test_a_small_gradient_survives_float16(trained, stream):
    """A loss of a thousandth has gradients below float16's smallest number; scaled up they survive."""
    model = eata.ETA(trained(), e0=1.0, epsilon=1.0, lr=0.05, score=lambda z: 1e-6 * eata.functional.entropy(z))
    with torch.autocast("cpu", torch.float16):
        model(stream([16])[0])
    assert any(not torch.equal(p, model.source[name]) for name, p in model.parameters.items())


@pytest.mark.parametrize("how", ["compile", "module"])
def test_a_compiled_net_adapts_as_a_plain_one(how, trained, stream):
    torch._dynamo.reset()
    net = trained("bn", torch.float64)
    plain = eata.EATA(copy.deepcopy(net), _ones(net), beta=0.1, e0=0.8, epsilon=1.0, lr=0.01, backward="full")
    if how == "module":
        net.compile(backend="aot_eager")
    fisher = _ones(net)
    compiled = torch.compile(net, backend="aot_eager") if how == "compile" else net
    prefix = "_orig_mod." if how == "compile" else ""
    fisher = {prefix + name: value for name, value in fisher.items()}
    model = eata.EATA(compiled, fisher, beta=0.1, e0=0.8, epsilon=1.0, lr=0.01)
    for x in stream([16, 16, 16], torch.float64):
        torch.testing.assert_close(model(x), plain(x))
    assert model.stats == plain.stats
    assert model.stats.steps > 0
    assert torch.equal(net[1].running_mean, plain.net[1].running_mean)
    with pytest.raises(eata.EataError, match="plain net"):
        eata.BN(_again(model), prior=16)(x)


def _again(model):
    return model.unwrap()


def _ones(net):
    return {name: torch.ones_like(p) for name, p in norm.affine_parameters(net).items()}


@pytest.mark.parametrize("change", [lambda net: net.double(), lambda net: net.half(), lambda net: net.to("meta")])
def test_a_net_that_was_moved_behind_the_adapters_back_is_named(change, trained, stream):
    model = eata.Tent(trained(), lr=0.01)
    x = stream([8])[0]
    model(x)
    change(model.net)
    for call in (lambda: model(x), model.reset, model.state_dict):
        with pytest.raises(eata.EataError, match=r"model\.to"):
            call()


def test_to_moves_everything_and_goes_on(trained, stream, digits, tmp_path):
    net = trained()
    model = eata.EATA(net, eata.fisher(net, digits[0][:64]), e0=0.9, epsilon=1.0, beta=1.0, lr=0.01)
    twin = eata.EATA(*_twin(trained, digits), e0=0.9, epsilon=1.0, beta=1.0, lr=0.01)
    first, second = stream([16] * 3), stream([16] * 6)[3:]
    for x in first:
        model(x)
        twin(x)
    assert model.to(torch.float64) is model
    for x in second:
        torch.testing.assert_close(model(x.double()).float(), twin(x), atol=1e-4, rtol=1e-4)
    assert model.average.dtype == model.importance["1.weight"].dtype == torch.float64
    window = eata.Window(eata.Tent(trained(), lr=0.01), length=4)
    for image in first[0]:
        window(image[None])
    window.to(torch.float64)
    for image in first[1]:
        assert window(image[None].double()).dtype == torch.float64


def _twin(trained, digits):
    net = trained()
    return net, eata.fisher(net, digits[0][:64])


def test_eight_threads_take_turns(trained, stream):
    model = eata.Tent(trained(), lr=0.01)
    batches = stream([8] * 64)
    failed = []

    def work(number):
        try:
            for x in batches[number::8]:
                assert model(x).shape == (8, 10)
                model.state_dict()
        except Exception as problem:
            failed.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (model.stats.forwards, model.stats.steps) == (512, 64)
    assert all(torch.isfinite(p).all() for p in model.parameters.values())


def test_auto_takes_rows_on_the_cpu(trained, stream):
    auto, rows = eata.ETA(trained(), lr=0.01), eata.ETA(trained(), lr=0.01, backward="rows")
    for x in stream([16, 16]):
        assert torch.equal(auto(x), rows(x))
    with pytest.raises(eata.EataError, match="lean"):
        eata.Tent(trained(), lean=True, backward="full")


def test_data_parallel_and_scripted_nets_are_named(trained):
    assert any("net.module" in finding for finding in eata.check(nn.DataParallel(trained())))

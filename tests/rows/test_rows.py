"""The row-sparse gradient against plain autograd, in float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eata import rows
from eata.errors import InputError
from eata.inputs import Inputs
from eata.mixture import OWN_ALONE
from eata.models.resnet26 import ResNet26
from eata.norm import Statistics
from eata.passes import Pass, Runner
from eata.rows import batchnorm
from eata.rows.gradient import Place, RowGradient, Rows

SOURCE = Statistics(math.inf)
CHOSEN = torch.tensor([1, 4, 5])
B = 9


def sharp(logits: Tensor) -> Tensor:
    """A loss whose gradient is large and different in each row."""
    return (logits.square() * torch.arange(1, logits.numel() + 1).view_as(logits)).sum() / 10


def norm_parameters(net: nn.Module) -> list[Tensor]:
    layers = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
    return [p for m in net.modules() if isinstance(m, layers) for p in m.parameters(recurse=False)]


def prepared(net: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    """As an adapter leaves it: eval mode, float64, only normalization layers learn; no parameter at its default."""
    torch.manual_seed(1)
    net = net.double().eval().requires_grad_(False)
    parameters = norm_parameters(net)
    with torch.no_grad():
        for p in parameters:
            p.add_(0.2 * torch.randn_like(p))
    for p in parameters:
        p.requires_grad_(True)
    return net, parameters


def by_batch(net: nn.Module) -> nn.Module:
    for m in net.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.running_mean = m.running_var = None
            m.track_running_stats = False
    return net


def forward(engine: rows.Engine, net: nn.Module, x: Tensor, parameters: Sequence[Tensor]) -> Pass:
    return Runner(net, engine)(Inputs(x), SOURCE, parameters)


def both(
    net: nn.Module,
    x: Tensor,
    parameters: Sequence[Tensor],
    chosen: Tensor = CHOSEN,
    loss: Callable[[Tensor], Tensor] = sharp,
) -> tuple[rows.Engine, Tensor, Tensor]:
    """Engine, its gradient and autograd's, each as one vector."""
    engine = rows.Engine()
    ours = forward(engine, net, x, parameters).gradients(chosen, loss)
    textbook = torch.autograd.grad(loss(net(x)[chosen]), parameters, allow_unused=True)
    assert [g is None for g in ours] == [g is None for g in textbook]
    return engine, vector(ours), vector(textbook)


def vector(gradients: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients if g is not None])


def assert_exact(net: nn.Module, x: Tensor, dense: Sequence[str] = (), chosen: Tensor = CHOSEN) -> None:
    net, parameters = prepared(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, ours, textbook = both(net, x.double(), parameters, chosen)
    assert engine.rows is not None, "took the full path"
    assert textbook.abs().max() > 1e-3
    assert (ours - textbook).abs().max() <= 1e-10 * max(1.0, float(textbook.abs().max()))
    assert sorted({name.removeprefix("aten.") for name in engine.rows.dense}) == sorted(dense)


def images(*shape: int) -> Tensor:
    return torch.randn(B, *shape, generator=torch.Generator().manual_seed(0))


# --- architectures ----------------------------------------------------------------------------------------------------


class ViT(nn.Module):
    """A vision transformer, written plainly."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width))
        self.heads = heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "n2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)),
                }
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            b, n, w = x.shape
            qkv = block["qkv"](block["n1"](x)).reshape(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w)
            x = x + block["out"](a)
            x = x + block["mlp"](block["n2"](x))
        return self.head(self.norm(x)[:, 0])


class Encoder(nn.Module):
    """Token sequences through nn.TransformerEncoder."""

    def __init__(self, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class Convolutions(nn.Module):
    """Grouped, depthwise, dilated, strided, transposed and 1-D convolutions, concatenation, residual, broadcasting."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.n0, self.n1, self.n2, self.n3, self.n4 = norm(8), norm(8), norm(8), norm(16), norm(16)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 16, 3, stride=2, padding=1, output_padding=1)
        self.squeeze = nn.Linear(16, 16)
        self.line = nn.Conv1d(16, 6, 3)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n0(self.stem(x)))
        y = x + F.relu(self.n1(self.grouped(x)))
        z = torch.cat([y, F.silu(self.n2(self.depthwise(y)))], 1)
        z = self.up(F.relu(self.n3(self.down(z))))
        gate = torch.sigmoid(self.squeeze(z.mean((2, 3))))[:, :, None, None]
        z = self.n4(z * gate) - 0.5 * z
        return self.head(self.line(z.flatten(2)).amax(2))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
    "batch-eval": nn.BatchNorm2d,
}


@pytest.mark.parametrize("norm", NORMS)
def test_convolutional_net_is_exact(norm: str) -> None:
    # amax's own backward scales by a mask of the maxima; nothing else leaves the rows
    assert_exact(Convolutions(NORMS[norm]), images(3, 8, 8))


def test_resnet26_with_group_norm_is_exact() -> None:
    assert_exact(ResNet26(10, "gn"), images(3, 16, 16))


def test_vision_transformer_is_exact() -> None:
    assert_exact(ViT(), images(3, 16, 16))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_is_exact(batch_first: bool, norm_first: bool) -> None:
    assert_exact(Encoder(batch_first, norm_first), images(6, 8))


def test_long_sequence_uses_flash_attention_exactly() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            q = self.norm(x).view(len(x), -1, 2, 4).transpose(1, 2)
            mask = torch.linspace(-1, 0, len(x) * 40 * 40, dtype=x.dtype).view(len(x), 1, 40, 40)
            a = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return self.head(a.transpose(1, 2).flatten(2).mean(1))

    assert_exact(Attention(), images(40, 8))


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), nn.PReLU(), nn.RReLU(), nn.ELU(), nn.CELU(), nn.SELU(), nn.GELU(),
    nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish(), nn.Sigmoid(), nn.Tanh(), nn.Hardtanh(), nn.Hardswish(),
    nn.Hardsigmoid(), nn.Softplus(), nn.LogSigmoid(), nn.Softsign(), nn.Tanhshrink(), nn.Hardshrink(0.1),
    nn.Softshrink(0.1), nn.Threshold(0.1, 0.0), nn.GLU(1), nn.Softmax(1), nn.LogSoftmax(1), nn.Softmin(1),
    nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Dropout(),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_activation_is_exact(activation: nn.Module) -> None:
    head = nn.LazyLinear(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), activation, nn.Flatten(), head)
    net(images(3, 6, 6))
    assert_exact(net, images(3, 6, 6))


POOLS_2D = [
    nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2), nn.Upsample(scale_factor=2),
    nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ReflectionPad2d(1),
    nn.ReplicationPad2d(1), nn.ZeroPad2d(1), nn.ZeroPad2d(-1), nn.Unfold(2), nn.Identity(),
]  # fmt: skip


@pytest.mark.parametrize("pool", POOLS_2D, ids=repr)
def test_pooling_and_resizing_is_exact(pool: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), pool, nn.Flatten(), nn.LazyLinear(3))
    net(images(3, 8, 8))
    assert_exact(net, images(3, 8, 8), dense=["zeros_like.default"] if isinstance(pool, nn.LPPool2d) else [])


@pytest.mark.parametrize("pool", [nn.MaxPool1d(2), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(2)], ids=repr)
def test_one_dimensional_net_is_exact(pool: nn.Module) -> None:
    net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True), pool, nn.Flatten(), nn.LazyLinear(3))
    net(images(3, 10))
    assert_exact(net, images(3, 10))


@pytest.mark.parametrize("pool", [nn.MaxPool3d(2), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(2)], ids=repr)
def test_three_dimensional_net_is_exact(pool: nn.Module) -> None:
    net = nn.Sequential(nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4), pool, nn.Flatten(), nn.LazyLinear(3))
    net(images(2, 6, 6, 6))
    assert_exact(net, images(2, 6, 6, 6))


class Glue(nn.Module):
    """A norm, a piece of tensor code, a linear layer."""

    def __init__(self, piece: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.n1, self.n2, self.piece, self.head = nn.LayerNorm(8), nn.LayerNorm(8), piece, nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.piece(self.n2(torch.tanh(self.n1(x)))).flatten(1))


PIECES: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda x: torch.cat(x.split([3, 5], 2)[::-1], 2),
    "one chunk": lambda x: x.chunk(2, 2)[0],
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll((1, 2), (1, 2)),
    "slice": lambda x: x[:, 1:, ::2],
    "select": lambda x: x[:, 1],
    "broadcast": lambda x: x * x.mean(2, keepdim=True) + x.sum(1, keepdim=True) / x.norm(dim=2, keepdim=True),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "maximum": lambda x: torch.maximum(x, -0.3 * x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "powers": lambda x: x**2 + x.abs().sqrt() + torch.exp(-x),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "time into batch": lambda x: (x.reshape(-1, 8) @ torch.ones(8, 8, dtype=x.dtype).tril()).view(x.shape),
    "batch in the middle": lambda x: x.transpose(0, 1).contiguous().view(-1, 8).tanh().view(4, -1, 8).transpose(0, 1),
    "time-major product": lambda x: (
        (x.transpose(0, 1).reshape(-1, 8) @ torch.ones(8, 8, dtype=x.dtype).tril()).view(4, -1, 8).transpose(0, 1)
    ),
    "in place": lambda x: x.clone().mul_(2).add_(1).relu_(),
    "half is used": lambda x: x[:, :2] + x[:, 2:],
}


@pytest.mark.parametrize("piece", PIECES)
def test_tensor_code_is_exact_on_rows(piece: str) -> None:
    net = Glue(PIECES[piece])
    net(images(4, 8))
    assert_exact(net, images(4, 8))


DENSE_PIECES: dict[str, Callable[[Tensor], Tensor]] = {
    "cumulative": lambda x: x.cumsum(1),
    "gather": lambda x: x.index_select(1, torch.tensor([0, 0, 3])),
    "whole batch": lambda x: x + x.flip(0),
    "softmax over the batch": lambda x: x.softmax(0),
    "batch mean": lambda x: x - x.mean(0),
    "batch slice": lambda x: torch.cat([x[2:], x[:2]]),
    "written slice": lambda x: F.pad(x, (0, 1)).index_fill(1, torch.tensor([1]), 0.5),
}


@pytest.mark.parametrize("piece", DENSE_PIECES)
def test_operation_without_a_rule_goes_dense_and_stays_exact(piece: str) -> None:
    net = Glue(DENSE_PIECES[piece])
    net(images(4, 8))
    net, parameters = prepared(net)
    engine, ours, textbook = both(net, images(4, 8).double(), parameters)
    assert (ours - textbook).abs().max() < 1e-10 * textbook.abs().max()
    assert not engine.failed


def test_gradient_comes_back_to_rows_after_a_dense_operation() -> None:
    net = Glue(lambda x: x.cumsum(1))
    net(images(4, 8))
    net, parameters = prepared(net)
    seen: list[type] = []

    def watched(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda g: seen.append(type(g)))  # runs after the engine's own

    net.n2.register_forward_hook(watched)
    engine, ours, textbook = both(net, images(4, 8).double(), parameters)
    assert (ours - textbook).abs().max() < 1e-10
    assert engine.rows is not None
    assert len(engine.rows.dense) == 1  # the cumulative sum's own backward, nothing below it
    assert seen == [RowGradient, Tensor]  # ours, then autograd's


# --- what a model may do ----------------------------------------------------------------------------------------------


def small(norm: Callable[[int], nn.Module] = NORMS["group"], inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(inplace), nn.Conv2d(4, 4, 3), norm(4), nn.ReLU(inplace),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


@pytest.mark.parametrize("whole", [True, False], ids=["module", "function inside"])
def test_compiled_model_gets_the_textbook_gradient(whole: bool) -> None:
    net, parameters = prepared(small())
    x = images(3, 8, 8).double()
    if whole:
        compiled: nn.Module = torch.compile(net, backend="aot_eager")  # type: ignore[assignment]
    else:

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net
                self.run = torch.compile(net.forward, backend="aot_eager")

            def forward(self, x: Tensor) -> Tensor:
                return self.run(x)

        compiled = Outer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, ours, _ = both(compiled, x, parameters)
    textbook = vector(torch.autograd.grad(sharp(net(x)[CHOSEN]), parameters))
    assert (ours - textbook).abs().max() < 1e-10


def test_loss_that_differentiates_twice_gets_the_textbook_gradient() -> None:
    net, parameters = prepared(small())
    first = parameters[0]

    def loss(chosen: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(sharp(chosen), first, create_graph=True)
        return sharp(chosen) + inner.square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, ours, textbook = both(net, images(3, 8, 8).double(), parameters, loss=loss)
    assert (ours - textbook).abs().max() < 1e-10 * textbook.abs().max()


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_gradient_checkpointing_gets_a_right_gradient(norm: str) -> None:
    net, parameters = prepared(by_batch(small(nn.BatchNorm2d if norm == "batch" else NORMS["group"])))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            features = checkpoint(net[:6], x, use_reentrant=False)
            return net[6:](features)  # type: ignore[no-any-return]

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine, ours, textbook = both(Checkpointed(), images(3, 8, 8).double(), parameters)
    assert engine.rows is not None or any("row-sparse" in str(w.message) for w in seen)
    if norm == "group" or engine.rows is None:
        assert (ours - textbook).abs().max() < 1e-10


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_autocast(norm: str) -> None:
    net, parameters = prepared(small(nn.BatchNorm2d if norm == "batch" else NORMS["group"]))
    net = by_batch(net).float()
    x = images(3, 8, 8)
    engine = rows.Engine()
    with torch.autocast("cpu", torch.bfloat16):
        batch = forward(engine, net, x, parameters)
        assert batch.logits.dtype == torch.bfloat16
        ours = vector(batch.gradients(CHOSEN, lambda z: sharp(z.float())))
        textbook = vector(torch.autograd.grad(sharp(net(x)[CHOSEN].float()), parameters))
    assert engine.rows is not None
    assert ours.dtype == torch.float32
    assert F.cosine_similarity(ours, textbook, 0) > (0.999 if norm == "group" else 0.9)


def test_channels_last_stays_on_rows() -> None:
    net, parameters = prepared(ResNet26(10, "gn"))
    x = images(3, 16, 16).double()
    engine = rows.Engine()
    ours = forward(engine, net, x.to(memory_format=torch.channels_last), parameters).gradients(CHOSEN, sharp)
    textbook = torch.autograd.grad(sharp(net(x)[CHOSEN]), parameters)
    assert (vector(ours) - vector(textbook)).abs().max() < 1e-9
    assert engine.rows is not None
    assert not engine.rows.dense


def test_model_that_needs_plain_layout_gets_it() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4 * 36, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.conv(x)).view(len(x), -1))  # fails on channels-last

    assert_exact(Views(), images(3, 8, 8))


def test_error_of_the_model_itself_comes_through() -> None:
    net, parameters = prepared(small())
    runner = Runner(net, rows.Engine())
    with pytest.raises(InputError, match="channels"):
        runner(Inputs(images(4, 8, 8).double()), SOURCE, parameters)
    assert runner(Inputs(images(3, 8, 8).double()), SOURCE, parameters).logits.shape == (B, 3)
    net[0].weight.data = net[0].weight.data.float()
    with pytest.raises(RuntimeError, match="type"):
        runner(Inputs(images(3, 8, 8).double()), SOURCE, parameters)


def test_shared_modules_and_in_place_operations_are_exact() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
            self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for _ in range(3):
                y = self.norm(self.conv(x))
                y += x
                x = self.relu(y)
            x = x * 2
            x[:, 0] *= 0.5
            return self.head(x.mean((2, 3)))

    net, parameters = prepared(Shared())
    _, ours, textbook = both(net, images(3, 8, 8).double(), parameters)
    assert (ours - textbook).abs().max() < 1e-10


class _Odd(torch.autograd.Function):
    """Backward code that needs a real tensor."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return torch.from_numpy(g.numpy() * 1.0)


class _Writes(_Odd):
    """Backward code that writes into a view."""

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        g = g.clone()
        g.diagonal(0, 1, 2).mul_(2)
        return g


@pytest.mark.parametrize("odd", [_Odd, _Writes])
def test_any_failure_inside_gives_the_full_gradient_and_one_warning(odd: type[torch.autograd.Function]) -> None:
    net = Glue(odd.apply)
    net(images(8, 8))
    net, parameters = prepared(net)
    x = images(8, 8).double()
    engine = rows.Engine()
    runner = Runner(net, engine)
    textbook = vector(torch.autograd.grad(sharp(net(x)[CHOSEN]), parameters))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            ours = vector(runner(Inputs(x), SOURCE, parameters).gradients(CHOSEN, sharp))
            assert torch.equal(ours, textbook)
    assert len([w for w in seen if "row-sparse" in str(w.message)]) == 1
    assert engine.failed


def test_loss_that_touches_other_rows_gets_the_textbook_gradient() -> None:
    net, parameters = prepared(small())
    x = images(3, 8, 8).double()
    engine = rows.Engine()
    with engine.watch([], SOURCE) as watch:
        logits = net(x)
    ours = engine.gradients(watch, logits, CHOSEN, lambda z: sharp(z) + logits.square().sum(), parameters)
    again = net(x)
    textbook = torch.autograd.grad(sharp(again[CHOSEN]) + again.square().sum(), parameters)
    assert (vector(ours) - vector(textbook)).abs().max() < 1e-10


def test_parameter_with_a_batch_dimension_gets_a_plain_tensor() -> None:
    offset = torch.zeros(B, 3, dtype=torch.float64, requires_grad=True)
    net, parameters = prepared(small())
    _, ours, textbook = both(nn.Sequential(net, _Add(offset)), images(3, 8, 8).double(), [*parameters, offset])
    assert type(ours) is Tensor
    assert (ours - textbook).abs().max() < 1e-10


class _Add(nn.Module):
    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


def test_trainable_weights_get_their_gradients_too() -> None:
    net = small().double()
    _, ours, textbook = both(net, images(3, 8, 8).double(), list(net.parameters()))
    assert (ours - textbook).abs().max() < 1e-10


# --- input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (torch.tensor([1, 1]), "twice"),
        (torch.tensor([0, 9]), "Row 9 is outside of the batch of 9"),
        (torch.tensor([-1, 2]), "Row -1"),
        (torch.tensor([], dtype=torch.int64), "skip the step"),
        (torch.tensor([True, False]), "int64"),
        (torch.tensor([[1, 2]]), "vector"),
    ],
)
def test_bad_index(index: Tensor, words: str) -> None:
    net, parameters = prepared(small())
    with pytest.raises(ValueError, match=words):
        both(net, images(3, 8, 8).double(), parameters, chosen=index)


def test_logits_without_a_batch_dimension() -> None:
    with pytest.raises(ValueError, match="first dimension"):
        rows.Engine().gradients(rows.Watch([], SOURCE), torch.tensor(1.0), CHOSEN, sharp, [])


def test_logits_of_another_batch_size_than_the_layers_take_the_full_path() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = by_batch(small(nn.BatchNorm2d))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.cat([x, x.flip(3)])).view(2, len(x), -1).mean(0)

    net, parameters = prepared(Pairs())
    engine, ours, textbook = both(net, images(3, 8, 8).double(), parameters)
    assert engine.rows is None
    assert (ours - textbook).abs().max() < 1e-10


def test_index_in_any_order() -> None:
    net, parameters = prepared(small())
    _, ours, textbook = both(net, images(3, 8, 8).double(), parameters, chosen=torch.tensor([5, 0, 3]))
    assert (ours - textbook).abs().max() < 1e-10


def test_many_chosen_rows_take_the_full_path() -> None:
    net, parameters = prepared(small())
    engine, ours, textbook = both(net, images(3, 8, 8).double(), parameters, chosen=torch.arange(B))
    assert engine.rows is None
    assert (ours - textbook).abs().max() < 1e-10


# --- the tensor -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_view_keeps_every_value_in_place(data: st.DataObject) -> None:
    """Any reshape of a row gradient, made dense, is the reshape of the dense gradient."""
    before = data.draw(st.lists(st.integers(1, 3), max_size=2))
    after = data.draw(st.lists(st.integers(1, 3), max_size=2))
    batch = data.draw(st.integers(2, 5))
    index = torch.tensor(sorted(data.draw(st.sets(st.integers(0, batch - 1), min_size=1, max_size=batch))))
    kept = torch.randn(*before, len(index), *after)
    g = RowGradient(kept, Rows(index, batch), Place(len(before)))
    sizes = [*before, batch, *after]
    total = math.prod(sizes)
    first = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
    second = data.draw(st.sampled_from([d for d in range(1, total // first + 1) if (total // first) % d == 0]))
    shape = (first, second, total // first // second)
    with torch.no_grad():
        viewed = torch.ops.aten.view.default(g, shape)
    dense = viewed.dense() if isinstance(viewed, RowGradient) else viewed
    assert torch.equal(dense, g.dense().reshape(shape))


def test_repr_says_what_is_stored() -> None:
    assert (
        repr(RowGradient(torch.ones(2, 3), Rows(torch.tensor([0, 2]), 5), Place())) == "RowGradient((2, 3) of (5, 3))"
    )


# --- batch statistics -------------------------------------------------------------------------------------------------


def naive_rule(g: Tensor, x: Tensor, kept: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The docstring's equation, one row and channel at a time."""
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    count = x.numel() // x.shape[1]
    result = torch.empty_like(g)
    for c in range(x.shape[1]):
        y = (x[kept, c] - mean[c]) / (var[c] + 1e-5).sqrt()
        for k in range(len(kept)):
            back = g[:, c].sum() / count + y[k] * (g[:, c] * y).sum() / count
            result[k, c] = scale[c] / (var[c] + 1e-5).sqrt() * (g[k, c] - weight[k] * back)
    return result


@pytest.mark.parametrize("channels_last", [False, True])
def test_rule_is_the_equation(channels_last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, 4).double() * 2 + 1
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(True)
    scale, shift = torch.rand(3).double(), torch.rand(3).double()
    kept, weight = torch.tensor([0, 2, 5]), torch.tensor([1.5, 3.0, 1.5]).double()
    g = torch.randn(3, 3, 4, 4).double()
    y = batchnorm.BatchNorm.apply(x, scale, shift, 1e-5, OWN_ALONE, batchnorm.row_moments(x), False)
    (dx,) = torch.autograd.grad(y, x, RowGradient(g, Rows(kept, 6, weight), Place()))
    assert isinstance(dx, RowGradient)
    torch.testing.assert_close(dx.kept, naive_rule(g, x.detach(), kept, weight, scale), atol=1e-12, rtol=1e-9)


def test_all_rows_stored_with_weight_one_is_the_exact_gradient() -> None:
    net, parameters = prepared(by_batch(ResNet26(10, "bn")))
    x = images(3, 16, 16).double()
    with rows.Watch([], SOURCE):
        logits = net(x)
    every = Rows(torch.arange(B), B, torch.ones(B))
    ours = torch.autograd.grad(sharp(rows.select_rows(logits, CHOSEN, every)), parameters)
    textbook = torch.autograd.grad(sharp(net(x)[CHOSEN]), parameters)
    assert (vector(ours) - vector(textbook)).abs().max() < 1e-9


@pytest.mark.parametrize("shape", [(16, 5), (16, 5, 7), (16, 5, 6, 6), (16, 5, 3, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_forward_is_that_of_pytorch(shape: tuple[int, ...], dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) + offset).to(dtype)
    weight, bias = torch.rand(5, dtype=dtype, requires_grad=True), torch.rand(5, dtype=dtype)
    with rows.Watch([], SOURCE):
        y = F.batch_norm(x, None, None, weight, bias, True)
    torch.testing.assert_close(y, F.batch_norm(x, None, None, weight, bias, True), atol=2e-5, rtol=1e-4)


def test_batch_statistics_gradient_is_close_to_the_textbook_one() -> None:
    net, parameters = prepared(by_batch(ResNet26(10, "bn")))
    x = torch.randn(32, 3, 16, 16).double()
    for count in (1, 2, 3, 8, 16, 20):
        engine, ours, textbook = both(net, x, parameters, chosen=torch.arange(count))
        assert engine.rows is not None
        assert engine.rows.count > count
        assert F.cosine_similarity(ours, textbook, 0) > 0.9
        assert 0.6 < ours.norm() / textbook.norm() < 1.3


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 40), st.data())
def test_stand_ins_stand_for_the_batch(batch: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, batch - 1), min_size=1))
    index = torch.tensor(sorted(chosen))
    torch.manual_seed(batch)
    layers = [batchnorm.Moments(torch.randn(batch, 6), torch.rand(batch, 6)) for _ in range(2)]
    stored, weight = batchnorm.stand_ins(layers, index)
    assert chosen <= set(stored.tolist())
    assert torch.equal(stored, stored.unique())
    assert (weight >= 0).all()
    assert float(weight.sum()) == pytest.approx(batch, rel=0.1)
    if len(index) == batch:
        torch.testing.assert_close(weight, torch.ones(batch, dtype=weight.dtype))


def test_rows_that_are_all_alike_need_no_luck() -> None:
    layers = [batchnorm.Moments(torch.ones(8, 3), torch.ones(8, 3))]
    stored, weight = batchnorm.stand_ins(layers, torch.tensor([2]))
    assert torch.isfinite(weight).all()
    assert float(weight.sum()) == pytest.approx(8, rel=0.05)
    assert 2 in stored

"""Any input: positional and keyword tensors, text and images; what is refused, and how."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import eata
from eata.inputs import Inputs, finite_rows, joined


class Output(dict):
    """As Hugging Face models give: a dict with attributes."""

    __getattr__ = dict.__getitem__


class Vision(nn.Module):
    """Takes pixel_values by name, as a Hugging Face image classifier."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, pixel_values=None, labels=None, return_dict=True):
        return Output(logits=self.net(pixel_values), hidden_states=None)


class Text(nn.Module):
    """Takes input_ids and attention_mask by name, as a Hugging Face text classifier."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None, scale=None):
        x = self.norm(self.embed(input_ids))
        x = (x * attention_mask[:, :, None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return Output(logits=self.head(x if scale is None else x * scale))


def test_a_keyword_is_as_good_as_a_position(trained, stream):
    by_name, by_place = eata.Tent(Vision(trained()), lr=0.01), eata.Tent(trained(), lr=0.01)
    for x in stream([16, 16, 16]):
        assert torch.equal(by_name(pixel_values=x, return_dict=True), by_place(x))
    assert by_name.stats == by_place.stats
    assert by_name.stats.steps == 3


def test_text_with_a_mask_is_adapted_and_resumes(tmp_path):
    torch.manual_seed(0)
    net = Text()
    source = {name: value.clone() for name, value in net.state_dict().items()}
    model = eata.Tent(net, lr=0.1)
    batches = [
        (torch.randint(0, 20, (8, 5)), torch.randint(0, 2, (8, 5)).index_fill(1, torch.tensor(0), 1)) for _ in range(6)
    ]
    answers = [model(input_ids=ids, attention_mask=mask) for ids, mask in batches]
    assert answers[0].shape == (8, 3)
    assert not torch.equal(net.norm.weight, source["norm.weight"])
    assert torch.equal(net.head.weight, source["head.weight"])
    model.reset()
    for (ids, mask), answer in zip(batches[:3], answers, strict=False):
        assert torch.equal(model(ids, attention_mask=mask), answer)
    window = eata.Window(model, length=4)
    for ids, mask in zip(*batches[0], strict=True):
        assert window(input_ids=ids[None], attention_mask=mask[None]).shape == (1, 3)
    assert window.stats.steps == 3 + 2


def test_bad_rows_are_found_in_every_floating_tensor():
    model = eata.Tent(Text(), lr=0.1)
    ids, mask, scale = torch.randint(0, 20, (6, 5)), torch.ones(6, 5), torch.ones(6, 1)
    mask[2, 1], scale[4] = math.nan, math.inf
    answer = model(ids, mask, scale=scale)
    assert torch.isnan(answer).all(1).tolist() == [False, False, True, False, True, False]
    assert (model.stats.rejected, model.stats.forwards) == (2, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        ((), {}, TypeError, "no tensor"),
        ((torch.zeros(2, 3),), {"mask": torch.zeros(3, 3)}, ValueError, "2, 3 rows"),
        ((torch.zeros(2, 3), torch.zeros(0, 3)), {}, ValueError, "empty"),
        (({"x": torch.zeros(2, 3)},), {}, TypeError, "is a dict"),
    ],
)
def test_what_is_no_batch_is_said(args, kwargs, error, words):
    model = eata.Source(nn.Linear(3, 2))
    with pytest.raises(error, match=words):
        model(*args, **kwargs)


def test_an_error_of_the_nets_own_keeps_its_type():
    class Buggy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            raise RuntimeError("the size of the cache is wrong")  # not about the input

    with pytest.raises(RuntimeError, match="cache") as caught:
        eata.Tent(Buggy())(torch.randn(4, 3))
    assert not isinstance(caught.value, eata.EataError)
    with pytest.raises(eata.InputError, match=r"does not take input of shape \(4, 2\)"):
        eata.Tent(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))(torch.randn(4, 2))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_splitting_and_joining_are_inverse(sizes):
    parts = [Inputs(torch.randn(size, 2), mask=torch.rand(size), flag=True) for size in sizes]
    whole = joined(parts)
    assert len(whole) == sum(sizes)
    assert whole.kwargs["flag"] is True
    again = joined(whole.split(1))
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors, again.tensors, strict=True))
    assert Inputs.of(whole.tree()).kind == whole.kind


@given(st.lists(st.sampled_from([0.0, 1.0, 3e38, math.nan, math.inf, -math.inf]), min_size=1, max_size=12))
def test_finite_rows_are_those_of_a_plain_loop(values):
    mask = finite_rows([torch.tensor(values)[:, None]])
    want = [math.isfinite(value) for value in values]
    assert (mask is None and all(want)) or mask.tolist() == want

"""What eata.check finds, and that it says it in sentences."""

import subprocess
import sys

import pytest
import torch
from torch import distributed, nn

import eata


def test_findings_are_sentences(trained):
    assert eata.check(trained()) == []
    cases = {
        "no normalization layer": nn.Linear(2, 2),
        "affine=False": nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)),
        "no running statistics": nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2)),
        "half precision": nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).half(),
        "at least 2 classes": nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)),
        "compiled": torch.compile(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))),
        "data-parallel": nn.DataParallel(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))),
        "meta device": nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).to("meta"),
    }
    with torch.inference_mode():
        cases["inference_mode"] = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    broken = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    broken[1].weight.data[0, 0] = float("nan")
    cases["NaN"] = broken
    for words, net in cases.items():
        findings = eata.check(net)
        assert any(words in finding for finding in findings), (words, findings)
        assert all(finding.endswith(".") for finding in findings)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net.eval(), torch.zeros(2, 3))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_net_is_named_and_refused(make):
    net = make(small())
    assert [finding.split(":")[0] for finding in eata.check(net)] == ["This is a TorchScript model"]
    for method in (eata.Tent, eata.Source):
        with pytest.raises(eata.EataError, match="TorchScript"):
            method(net)
    assert "TorchScript" in eata.check(nn.Sequential(net, nn.LayerNorm(3)))[0]


@pytest.fixture
def alone():
    """A group of this process alone, as FSDP needs one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # FSDP would like an accelerator
def test_an_fsdp_net_is_named(alone):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    pieces = [FullyShardedDataParallel(small(), use_orig_params=own, device_id=torch.device("cpu"))
              for own in (False, True)]  # fmt: skip
    newer = small()
    fully_shard(newer, mesh=init_device_mesh("cpu", (1,)))
    for net in (*pieces, newer, nn.Sequential(pieces[0], nn.LayerNorm(3))):
        assert [finding.split(":")[0] for finding in eata.check(net)] == ["This is an FSDP wrapper"]
    with pytest.raises(eata.EataError, match="FSDP"):
        eata.Tent(pieces[0])  # its scale and shift are part of one long vector


@pytest.mark.filterwarnings("ignore")
def test_a_data_parallel_net_is_named(alone):
    for net in (nn.DataParallel(small()), nn.parallel.DistributedDataParallel(small())):
        assert ["data-parallel" in finding for finding in eata.check(net)] == [True]


def test_a_wrapped_net_is_a_finding(trained):
    net = trained()
    model = eata.Tent(net)
    assert any("wrapped by eata.Tent" in finding for finding in eata.check(net))
    model.unwrap()
    assert eata.check(net) == []


def test_it_works_in_a_program_that_never_imported_fsdp():
    code = "import torch, eata; print(eata.check(torch.nn.ReLU()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing to adapt" in done.stdout

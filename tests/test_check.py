"""What eata.check finds, and that it says it in sentences."""

import subprocess
import sys

import torch
from torch import nn

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

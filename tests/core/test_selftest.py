"""The self-test passes here, and finds what is planted: a wrong element, a hang, a crash."""

import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_nvfp4 import NVFP4Experts, stages
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.cli import main
from moe_nvfp4.kernels.cpu import CPU
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.selftest import cases, report, run
from moe_nvfp4.selftest.compare import LIMITS, Finding, Limit, compare, same_bits
from tests.common import Kernels, PlainKernels, stand_for_hopper

needs_library = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels cannot be compiled: {cpu.missing()}")
# Python runs it first in every process that finds it, such as those of the groups.
PLANTED = """
import ctypes, os, time
from moe_nvfp4.kernels.cpu import CPU
right = CPU.experts
def experts(self, x, ids, p, w):
    y = right(self, x, ids, p, w)
    if len(y) >= 40:
        {mistake}
    return y
CPU.experts = experts
"""
MISTAKES = {
    "y[3, 7] += 0.5 * y[3].norm() / y.shape[1] ** 0.5": r"element \[3, 7\] is",
    "y[-1] = float('nan')": r"elements are NaN or Inf",
    "y += 1e-2 * y.norm() / y.numel() ** 0.5 * (time.time_ns() % 7)": r"relative error|other bits",
    "time.sleep(1000)": r"not over after 8 s",
    "os.abort()": r"ended by SIGABRT",
    "ctypes.string_at(0)": r"ended by SIGSEGV",
    "raise RuntimeError('/home/somebody/kernels/gone.so')": r"exit code 1: RuntimeError",
}


# ---- what is right -------------------------------------------------------------------------------


def test_one_wrong_element_is_enough():
    g = torch.Generator().manual_seed(0)
    want = torch.randn(64, 4096, generator=g).double()
    noise = want * (1 + (torch.rand(want.shape, generator=g) - 0.5) * 2**-8)
    limit = LIMITS["half"]
    assert compare("", noise, want, limit).right
    for change in (0.1, -0.5, 3.0):  # too small for the whole, all of them
        wrong = noise.clone()
        wrong[9, 17] += change
        assert abs(change) < limit.of_all * want.norm()
        found = compare("", wrong, want, limit)
        assert found.right is False and "[9, 17]" in found.why
    small = want.clone()
    small[5] *= 1e-2  # a row of small numbers has limits of its own
    wrong = small.clone()
    wrong[5, 0] += 0.01
    assert compare("", small, small, limit).right and compare("", wrong, small, limit).right is False


def test_what_is_no_result_at_all():
    want, limit = torch.ones(2, 3), Limit(1.0, 1.0)
    assert "shape" in compare("", torch.ones(3, 2), want, limit).why
    for bad in (torch.nan, torch.inf):
        nothing = torch.tensor([[1, 1, 1], [1, bad, 1]])
        assert compare("", nothing, want, limit).right is compare("", want, nothing, limit).right is False
    assert compare("", torch.zeros(2, 3), want, Limit(0.5, 2.0)).right is False
    assert compare("", torch.ones(0, 3), torch.ones(0, 3), limit).right
    assert same_bits("", want, want.clone()).right and not same_bits("", want, want, want + 1e-7).right
    assert not same_bits("", want, want.half()).right


def test_the_dtype_of_a_result(monkeypatch):
    here, forward = cases.place("reference", "cpu", True), NVFP4Experts.forward
    case = next(cases.gates(here))
    assert case.check(here).right
    monkeypatch.setattr(NVFP4Experts, "forward", lambda *args: forward(*args).float())
    assert case.check(here).why == "the result is float32, not bfloat16, as x is"


# ---- this machine --------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(
    "name", sorted(cases.GROUPS.keys() - {"joined", "top_k", "router_linear", "merged_codes"})
)  # which CPUs lack
def test_this_cpu(name):
    found = list(cases.findings(cases.place("cpu", "cpu", True), name))
    assert found and not [finding for finding in found if finding.right is not True]


def test_a_backend_that_does_not_take_a_case_is_not_wrong():
    """Hopper's kernels take no fp32; nothing runs, so that no GPU is needed."""
    place = cases.Place(cases.named("sm90"), torch.device("cpu"))
    case = cases.Case("fp32", cases.layer_of(4, 64, 32), cases.batch_of(3, 64, 4, 2, torch.float32))
    (found,) = cases.check(place, [case])
    assert found.right is None and "sm90 takes bfloat16" in found.why


# ---- what is planted -----------------------------------------------------------------------------


@needs_library
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(PLANTED.format(mistake=mistake))
    monkeypatch.syspath_prepend(tmp_path)
    # Calls that are all wrong in the same way have the same bits.
    name = "gates" if "element" in MISTAKES[mistake] else "repeated"
    group = run.run_group("cpu", "cpu", name, quick=True, limit=8 if "sleep" in mistake else 120)
    assert any(re.search(MISTAKES[mistake], finding.why) for finding in group.wrong), group
    assert "/home" not in json.dumps([report.scrubbed(finding.why) for finding in group.wrong])


def _spoil_scales(change):
    return lambda x, ids, p, w: (x, ids, p, replace(w, w13=w.w13._replace(sf=change(w.w13.sf))))


def _spoil_biases(x, ids, p, w):
    float32 = w.w13.bias is not None and w.w13.bias.dtype == torch.float32
    return x, ids, p, w.biased(w.w13.bias, torch.zeros_like(w.w2.bias)) if float32 else w


def _spoil_clamps(x, ids, p, w):
    return x, ids, p, w if w.gate.clamp_after else replace(w, gate=replace(w.gate, limit=math.inf))


def _without_biases(w):
    return w if w.w13.bias is None else w.biased(torch.zeros_like(w.w13.bias), torch.zeros_like(w.w2.bias))


def _spoil_many(x, *others):
    return torch.cat([x[:300], x[:-300]]) if len(x) > 300 else x, *others


def _without_subnormals(x):
    return x.where(x.abs() >= torch.finfo(x.dtype).tiny, 0)


SPOILT = {  # group, function, what its arguments become
    "block scales below the normal ones": ("gates", "experts", _spoil_scales(lambda sf: sf.where(sf >= 8, 0))),
    "block scales above 2": ("gates", "experts", _spoil_scales(lambda sf: sf.clamp(max=0x40))),
    "fp32 biases": ("gates", "experts", _spoil_biases),
    "a limit before the activation": ("gates", "experts", _spoil_clamps),
    "negative weights": ("routing", "experts", lambda x, ids, p, w: (x, ids, p.abs(), w)),
    "many rows": ("routing", "experts", _spoil_many),
    "many rows of a linear": ("linears", "linear", _spoil_many),
    "biases of W4A4": ("w4a4", "experts", lambda x, ids, p, w: (x, ids, p, _without_biases(w) if w.quantized else w)),
    "fp16 of W4A4": (
        "w4a4",
        "experts",
        lambda x, ids, p, w: (2 * x if w.quantized and x.dtype == torch.float16 else x, ids, p, w),
    ),
    "many rows of W4A4": ("w4a4", "experts", _spoil_many),
    "the stages' biases": ("gates", "gemm2_combine", lambda h, w, *others: (h, _without_biases(w), *others)),
    "the stages' four over six": ("w4a4", "quantize_rows", lambda *args: args[:4]),
    "a linear's bias": ("linears", "linear", lambda x, w: (x, w._replace(matrix=w.matrix._replace(bias=None)))),
    "a linear's scale": ("linears", "linear", lambda x, w: (x, w._replace(input_scale=None))),
    "tiny x": ("extremes", "experts", lambda x, *others: (x.where(x.abs() > 1e-20, 0), *others)),
    "tiny fp16 x of a linear": ("extremes", "linear", lambda x, w: (_without_subnormals(x), w)),
    "huge x": ("extremes", "linear", lambda x, w: (x.clamp(-3e4, 3e4), w)),
    "small blocks": (
        "extremes",
        "experts",
        lambda x, ids, p, w: (x.where(x.abs() * 2**12 > x.abs().amax(-1, keepdim=True), 0), ids, p, w),
    ),
    "gates far from 0": ("extremes", "experts", _spoil_clamps),
    "x beyond static scales": ("extremes", "experts", lambda x, ids, p, w: (x, ids, p, replace(w, x_scale=None))),
    "strides": ("inputs", "experts", lambda x, *others: (x.as_strided(x.shape, (x.shape[1], 1)), *others)),
    "strides of ids": ("inputs", "experts", lambda x, i, p, w: (x, i.as_strided(i.shape, (i.shape[1], 1)), p, w)),
    "strides of a linear's x": ("inputs", "linear", lambda x, w: (x.as_strided(x.shape, (x.shape[1], 1)), w)),
    "NaN": ("inputs", "experts", lambda x, *others: (x.nan_to_num(), *others)),
    "NaN of other tokens": ("inputs", "linear", lambda x, w: (x + 0 * x.sum(), w)),
}


def test_adapters_that_change_places_are_found(monkeypatch):
    """Products that take each expert's first adapter for its second."""
    right, other = stages._Parts.of, torch.arange(15).view(5, 3)[:, [1, 0, 2]].flatten()

    def mixed(adapter, groups):
        parts = right(adapter, groups)
        return parts._replace(a=parts.a[other], b=parts.b[other]) if len(parts.a) == 15 else parts

    monkeypatch.setattr(stages._Parts, "of", mixed)
    place = cases.Place(cases.named("reference"), torch.device("cpu"), quick=True)
    found = [(finding.case[:3], finding.right) for finding in cases.findings(place, "adapters")]
    assert found == [("one", True)] * 4 + [("3 o", True)] + [("3 o", False)] * 3  # a token alone has none


@needs_library
@pytest.mark.parametrize("what", SPOILT)
def test_kernels_that_neglect_something_are_found(what, monkeypatch):
    group, function, spoil = SPOILT[what]
    right, place = getattr(cpu, function), cases.place("cpu", "cpu", False)
    monkeypatch.setattr(CPU, function, lambda self, *args: right(*spoil(*args)))
    assert any(finding.right is False for finding in cases.findings(place, group))


@pytest.mark.parametrize("layout", [True, False])
@pytest.mark.parametrize("wrong", [False, True])
def test_linears_as_one_that_take_one_scale_for_all(wrong, layout, monkeypatch):
    """On kernels that stand for a GPU's; those of a CPU compute each linear by itself."""
    kernels = Kernels if layout else PlainKernels
    right = kernels.linear

    def linear(self, x, w):
        scale = w.matrix.global_scale[:1].expand_as(w.matrix.global_scale).contiguous()
        return right(self, x, w._replace(matrix=w.matrix._replace(global_scale=scale)) if wrong else w)

    monkeypatch.setattr(kernels, "linear", linear)
    with stand_for_hopper(layout):
        found = list(cases.findings(cases.Place(kernels(), torch.device("cpu")), "joined"))
    assert len(found) == 40 and {finding.right for finding in found} == ({True, False} if wrong else {True})


def test_merged_codes_are_rounded_to_even():
    """A merge that takes what is in the middle of two codes for more than that is found."""

    def merge(codes, sf, scale, a, b):
        dense = nvfp4.dequantize(codes, sf, scale)
        dense[..., : a.shape[2]] += b @ a
        return nvfp4.encode(dense * factor, sf, scale)

    here = cases.Place(SimpleNamespace(merged_codes=merge), torch.device("cpu"))
    for factor in (1.0, 1 + 1e-6):
        assert next(cases.merged_codes(here)).right is (factor == 1)


@needs_library
@pytest.mark.slow  # a process for each group
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["selftest", "--device", "cpu", "--quick", "--no-speed", "--report", "mine.json"]) == 0
    assert "0 wrong" in capsys.readouterr().out
    text = Path("mine.json").read_text() + Path("mine.md").read_text()
    found = json.loads(Path("mine.json").read_text())
    assert found["summary"]["right"] > 40 and {g["name"] for g in found["groups"]} == set(cases.QUICK)
    for private in (str(Path.home()), str(tmp_path), sys.prefix, os.environ.get("USER") or "\0"):
        assert private not in text
    wrong = run.Group("cpu", "cpu", "gates", 1.0, (Finding("a case", False, "element [0, 0] is 1, not 2"),))
    monkeypatch.setattr(run, "run", lambda *_: [wrong])
    assert main(["selftest", "--device", "cpu", "--no-speed"]) == 2
    said = capsys.readouterr()
    assert "WRONG: a case: element [0, 0]" in said.out and "do not use these kernels" in said.err
    Path("README.md").write_text("mine")
    for name, why in (("README.json", "README.md is written, too"), ("mine.md", "the page beside FILE is called so")):
        assert main(["selftest", "--report", name]) == 2 and why in capsys.readouterr().err
    assert Path("README.md").read_text() == "mine" and Path("mine.md").read_text().startswith("# Self-test: ")
    assert main(["selftest", "--report", "missing/mine.json"]) == 2
    assert main(["selftest", "--report", "."]) == 2  # before all cases ran
    assert "does not exist" in capsys.readouterr().err


@needs_library
@pytest.mark.slow
def test_speeds():
    (roof, *rows), crash = run.run_speed("cpu", "cpu", quick=True)
    assert not crash and roof["bandwidth"] > 1e9 and roof["flops"] > 1e9
    assert [row["tokens"] for row in rows] == [1, 16] and all(0 < row["of_roof"] < 5 for row in rows)
    one = rows[0]  # of eight experts, whose weights have 4.5 bits each
    assert one["GB/s"] * one["us"] * 1e3 == pytest.approx(8 * 3 * 2048 * 768 * 9 / 16)
    assert one["TFLOP/s"] * one["us"] * 1e6 == pytest.approx(8 * 2 * 3 * 2048 * 768)

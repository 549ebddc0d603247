"""On a GPU: what is planted into the best backend is found in the process that checks it, and the next one runs."""

import json
import re

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moe_nvfp4 import NVFP4Experts, backends
from moe_nvfp4.kernels import proof
from moe_nvfp4.selftest.cases import batch_of, reference_of
from moe_nvfp4.selftest.compare import LIMITS, compare
from moe_nvfp4.selftest.run import candidates, run_group

# Python runs it first in every process that finds it, such as the one that checks.
PLANTED = """
import sys
import torch

if "moe_nvfp4.selftest" in sys.orig_argv:
    import triton
    import triton.language as tl
    from moe_nvfp4.kernels import {backend} as planted
    from moe_nvfp4.selftest import cases

    @triton.jit
    def hang(flag):
        while tl.load(flag, volatile=True) == 0:
            pass

    @triton.jit
    def write_anywhere(pointer):
        tl.store(pointer + (1 << 44), 1)

    cases.SECONDS = 20.0
    right = planted.BACKEND.experts

    def experts(x, ids, p, w):
        y = right(x, ids, p, w)
        if y.is_cuda:
            {mistake}
        return y

    planted.BACKEND.experts = experts  # of its own: others inherit its class
"""
FLAG = "torch.zeros(1, dtype=torch.int32, device=y.device)"
MISTAKES = {
    "y[-1, 5] += 0.5 * y[-1].norm() / y.shape[1] ** 0.5": "relative error|element",
    f"hang[(1,)]({FLAG})": "not over after 20 s",
    f"write_anywhere[(1,)]({FLAG})": "illegal memory access",
}


@pytest.fixture
def unproven(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOE_NVFP4_CHECK", raising=False)
    monkeypatch.setattr(proof, "PROVEN", {})
    backends.forget()
    yield tmp_path
    backends.forget()


def right(layer):
    """Whether the layer gives the reference's results on the GPU."""
    x, ids, p = batch_of(40, 256, 8, 2)
    y = layer(x.cuda(), ids.cuda(), p.cuda())
    return compare("", y, reference_of(x, ids, p, layer.to("cpu").weights), LIMITS["half"]).right


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes(mistake, unproven, monkeypatch):
    best, *others = candidates(torch.device("cuda"))
    (unproven / "sitecustomize.py").write_text(PLANTED.format(backend=best.name, mistake=mistake))
    monkeypatch.syspath_prepend(unproven)
    layer = NVFP4Experts.from_dense(torch.randn(8, 384, 256) / 16, torch.randn(8, 256, 192) / 16).cuda()
    with pytest.warns(UserWarning, match=f"{best.name} gave wrong results") as caught:
        assert layer.backend().name == (others[0].name if others else "reference")
    assert re.search(MISTAKES[mistake], str(caught[0].message))
    assert right(layer)
    notes = [json.loads(file.read_text()) for file in (unproven / "cache/checks").glob("*.json")]
    assert {note["backend"]: note["right"] for note in notes} == {b.name: b is not best for b in (best, *others[:1])}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_self_test_finds_them(mistake, tmp_path, monkeypatch):
    best, *_ = candidates(torch.device("cuda"))
    (tmp_path / "sitecustomize.py").write_text(PLANTED.format(backend=best.name, mistake=mistake))
    monkeypatch.syspath_prepend(tmp_path)
    group = run_group(best.name, "cuda", "routing", limit=30 if "hang" in mistake else 120)
    assert any(re.search(MISTAKES[mistake].replace("20 s", "30 s"), finding.why) for finding in group.wrong), group


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_right_results(activations, unproven):
    layer = NVFP4Experts.from_dense(
        torch.randn(8, 384, 256) / 16, torch.randn(8, 256, 192) / 16, activations=activations
    ).cuda()
    assert layer.backend() is candidates(torch.device("cuda"))[0]
    (note,) = [json.loads(file.read_text()) for file in (unproven / "cache/checks").glob("*.json")]
    assert note["right"] and note["device"] == torch.cuda.get_device_name()
    layer.prepare()
    stream, (x, ids, p) = torch.cuda.Stream(), (t.cuda() for t in batch_of(40, 256, 8, 2))
    with torch.cuda.stream(stream):
        eager, graph = layer(x, ids, p), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = layer(x, ids, p)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, eager)

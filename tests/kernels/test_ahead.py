"""Kernels that are compiled before the first call include all that calls launch, whatever the number of tokens."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moe_nvfp4 import NVFP4Experts, reference, stages
from moe_nvfp4.backends import Gpu, Selected, named
from moe_nvfp4.kernels import calls
from moe_nvfp4.kernels.backend import Backend
from moe_nvfp4.kernels.calls import Call
from moe_nvfp4.kernels.common import ahead
from moe_nvfp4.kernels.common.ahead import Build, planned_tokens, token_counts
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.routing import Groups
from moe_nvfp4.stages import Adapter, Extras
from moe_nvfp4.weights import SILU, Gate
from tests.common import ROOT

GPUS = {"sm90": Gpu((9, 0), 132), "sm100": Gpu((10, 0), 148), "sm80": Gpu((8, 0), 108), "portable": Gpu((8, 6), 82)}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_every_number_of_tokens_is_planned_as_one_of_few(top_k):
    counts = list(token_counts(top_k))
    assert counts == sorted({planned_tokens(T, top_k) for T in range(1, 1 << 17)}) and len(counts) < 420
    for T in range(1, ahead.MAX_ROWS // top_k):
        assert T <= planned_tokens(T, top_k) < max(T + 1, 1.032 * T)


def noted(gpu, run, *arguments):
    with ahead.noting(gpu) as jobs:
        run(*arguments)
    return set(jobs)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def check(name, sizes, top_k, gate, activations, static, bias, fused, counts):
    """Check that the kernels that launch for `counts` tokens are among those that are compiled ahead; if the layer is
    not fused, with adapters too: one of all tokens, or several."""
    backend, gpu, (E, H, I) = named(name), GPUS[name], sizes
    layer = NVFP4Experts(E, H, I, gate, activations, torch.bfloat16 if bias else None, static, device="meta")
    layer._prepare_for(Selected(name, backend.layout))
    w, S, rank = layer.weights, E % 3, 8 + 16 * (H % 2)
    whole, whatever = fused and gate.kind != "raw", Call.of(w, torch.bfloat16, top_k, fused, expert_map=I % 3 > 0)
    expert_map = [empty(2 * E, dtype=torch.int32)] if whatever.expert_map and backend.maps else []
    listed = set(calls.kernels_of(backend, whatever, gpu))
    with_adapters = set() if whole else set(calls.kernels_of(backend, whatever._replace(adapters=(rank, S)), gpu))
    assert listed
    offsets, parts = empty(E + 1, dtype=torch.int32), empty(E * S + 1, dtype=torch.int32)
    low = lambda N, K: Adapter(*(empty(E, *[S] * (S > 0), *shape) for shape in ((rank, K), (N, rank))))
    plain = getattr(backend.functions, "quantize_rows", None) is reference.quantize_rows  # a second each
    with mock.patch.object(Backend, "quantize_rows", calls._quantized) if plain else nullcontext():
        for T in counts:
            x, p = empty(T, H), empty(T, top_k, dtype=torch.float32)
            if whole:
                for dtype in (torch.int32, torch.int64):
                    assert noted(gpu, backend.experts, x, empty(T, top_k, dtype=dtype), p, w, *expert_map) <= listed
                continue
            order, dtype = empty(T * top_k, dtype=torch.int32), torch.float32 if w.quantizes_h else torch.bfloat16
            groups = Groups(order, offsets, top_k, position=order)
            assert noted(gpu, stages.up_rows, x, Extras(), w, groups, backend, dtype) <= listed
            h = empty(T * top_k, I, dtype=dtype)
            assert noted(gpu, stages.down_rows, h, p, Extras(), w, groups, backend, x.dtype) <= listed
            if S:
                groups = replace(groups, parts=parts, bare=empty(T * top_k, dtype=torch.bool))
            up, down, h = Extras(adapter=low(w.w13.N, H)), Extras(adapter=low(H, I)), empty(T * top_k, I)
            assert noted(gpu, stages.up_rows, x, up, w, groups, backend, x.dtype) <= with_adapters
            assert noted(gpu, stages.down_rows, h, p, down, w, groups, backend, x.dtype) <= with_adapters
            if T * top_k <= backend.sorts:
                ids, chosen = (empty(T, *more, dtype=torch.int64) for more in ((top_k,), ()))
                sort = noted(gpu, backend.group, ids, E, chosen if S else None, S)
                assert len(sort) == 1 and sort <= with_adapters


def check_linear(name, linear, counts):
    """The same check for a linear."""
    backend, gpu = named(name), GPUS[name]
    linear._prepare_for(Selected(name, backend.layout))
    w = linear.weights
    listed = set(calls.kernels_of(backend, Call.of(w, torch.bfloat16), gpu))
    assert listed
    for T in counts:
        assert noted(gpu, backend.linear, empty(T, linear.in_features), w) <= listed


PHASES = [Phase.generate]  # examples take seconds, too long to look for smaller ones
LAYERS = dict(
    E=st.integers(1, 300), H=st.integers(1, 200).map(lambda n: 32 * n), I=st.integers(1, 200).map(lambda n: 32 * n),
    bias=st.booleans(), static=st.booleans(), activations=st.sampled_from(["bf16", "nvfp4"]),
    gate=st.sampled_from([SILU, Gate("relu2", gated=False), Gate("silu", alpha=1.702, limit=7.0, up_offset=1.0)]),
    counts=st.lists(st.integers(1, 65536), min_size=20, max_size=20), data=st.data(),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=4, deadline=None, phases=PHASES)
@given(**LAYERS)
def test_hopper(E, H, I, bias, static, activations, gate, counts, data):
    pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
    top_k, fused = data.draw(st.integers(1, min(E, 16))), activations == "nvfp4" or data.draw(st.booleans())
    check("sm90", (E, H, I), top_k, gate, activations, static, bias, fused, counts)
    linear = NVFP4Linear(H, I, torch.bfloat16 if bias else None, activations, static, device="meta")
    check_linear("sm90", linear, counts)


def test_what_triton_does_for_hopper():
    """With many tokens and few tiles a Triton kernel dequantizes the weights; it is listed even if Triton
    interprets."""
    pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
    for activations in ("bf16", "nvfp4"):
        check_linear("sm90", NVFP4Linear(32, 32, activations=activations, device="meta"), [1, 300, 5000])


@pytest.mark.slow
@settings(max_examples=4, deadline=None, phases=PHASES)
@given(**LAYERS)
def test_blackwell(E, H, I, bias, static, activations, gate, counts, data):
    pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
    top_k = data.draw(st.integers(1, min(E, 16)))
    check("sm100", (E, H, I), top_k, gate, activations, static, bias, data.draw(st.booleans()), counts)


def sm80(example):
    """One example of `test_sm80`, in a process where Triton does not interpret."""
    sizes, top_k, gate, activations, *rest = example
    check("sm80", sizes, top_k, Gate(**gate), activations, *rest)
    check_linear("sm80", NVFP4Linear(sizes[1], sizes[2], activations=activations, device="meta"), rest[-1])


def portable(example):
    """One example of `test_portable`, in a process where Triton does not interpret."""
    sizes, top_k, gate, *rest = example
    if sizes[0] % 2:  # NVFP4 times NVFP4
        GPUS["portable"] = Gpu((12, 0), 170)
    check("portable", sizes, top_k, Gate(**gate), *rest)
    check_linear("portable", NVFP4Linear(sizes[1] // 16 * 16, sizes[2], activations=rest[0], device="meta"), rest[-1])
    GPUS["portable"] = Gpu((9, 0), 132)  # dense weights
    check("portable", (2, 96, 64), 1, SILU, rest[0], False, False, True, [1, 300, 9000])
    check_linear("portable", NVFP4Linear(96, 64, activations=rest[0], device="meta"), [1, 300])


def fresh(code, **environment):
    """Run in a process where Triton does not interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "0"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # another process
@settings(max_examples=2, deadline=None, phases=PHASES)
@given(**LAYERS)
def test_sm80(E, H, I, bias, static, activations, gate, counts, data):
    pytest.importorskip("cutlass", reason="CuTe DSL compiles the GEMMs")
    pytest.importorskip("triton", reason="all kernels but the GEMMs are Triton's")
    top_k, fused = data.draw(st.integers(1, min(E, 16))), activations == "nvfp4" or data.draw(st.booleans())
    example = ((E, H, I), top_k, json.loads(gate.spec), activations, static, bias, fused, counts)
    fresh(f"from math import inf; Infinity = inf; from tests.kernels.test_ahead import sm80; sm80({example!r})")


@pytest.mark.slow  # another process
@settings(max_examples=2, deadline=None, phases=PHASES)
@given(**LAYERS)
def test_portable(E, H, I, bias, static, activations, gate, counts, data):
    pytest.importorskip("triton", reason="the portable backend's kernels are Triton's")
    top_k, fused = data.draw(st.integers(1, min(E, 16))), data.draw(st.booleans())
    example = ((E, H, I), top_k, json.loads(gate.spec), activations, static, bias, fused, counts)
    fresh(f"from math import inf; Infinity = inf; from tests.kernels.test_ahead import portable; portable({example!r})")


JOBS = [
    Build("moe_nvfp4.kernels.sm90.backend", "_gather", (True, False)),
    Build("moe_nvfp4.kernels.sm90.backend", "_combine_kernel", (2, 1, torch.float32, torch.float32)),
]


NOTED = """
import sys, torch
from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.backends import Selected, named
from moe_nvfp4.joined import as_one
from moe_nvfp4.kernels.calls import Call, kernels_of
from moe_nvfp4.linear import NVFP4Linear
from tests.kernels.test_ahead import GPUS
light = lambda: not {"torch._dynamo", "sympy"} & set(sys.modules)
assert light()
for name, gpu in GPUS.items():
    backend = named(name)
    for activations in ("bf16", "nvfp4"):
        made = [NVFP4Experts(8, 256, 128, activations=activations)]
        made += [NVFP4Linear(128, N, torch.bfloat16, activations) for N in (256, 128)]
        for module in made:
            module._prepare_for(Selected(name, backend.layout))
        weights = [module.weights for module in made]
        if backend.joins((256, 128)):
            weights.append(as_one(made[1:]))
        for w in weights:
            assert kernels_of(backend, Call.of(w, torch.bfloat16, 2), gpu)
            assert light(), (name, activations, w)
"""


@pytest.mark.slow
def test_what_is_noted_without_torch_dynamo():
    """Some of torch's functions of tensors on meta import it, which takes seconds of every start."""
    fresh(NOTED)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path))
    ahead.kernel_folder.cache_clear()
    yield tmp_path / "kernels"
    ahead.kernel_folder.cache_clear()


def test_whatever_is_compiled_is_in_the_key(tmp_path):
    """Files with kernels take numbers from files that `sources` hashes; `Groups` is what their host code returns."""
    for path in ahead.KERNELS.rglob("*.py"):
        if re.search(r"@(cute|triton)\.(jit|kernel)", text := path.read_text()):
            outside = set(re.findall(r"^ *from moe_nvfp4(?!\.kernels)\.?(\w*) import (?!Groups$)", text, re.M))
            assert {f"{name}.py" for name in outside} <= set(ahead.BESIDE), path
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for name in (*ahead.BESIDE, "kernels/sm90.py"):
        (tmp_path / name).write_text("")
    hashes = [ahead.hash_of(kernels, ".py")]
    for name in (*ahead.BESIDE, "kernels/sm90.py"):
        (tmp_path / name).write_text(f"# {name}")
        hashes.append(ahead.hash_of(kernels, ".py"))
    assert len(set(hashes)) == 4


@pytest.mark.slow
def test_kernels_are_built_once(own_cache, tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
    assert ahead.build(JOBS, GPUS["sm90"], progress=False) == 2
    assert len(list(own_cache.glob("*.o"))) == 2
    before = ahead.compilations
    assert ahead.build(JOBS, GPUS["sm90"], progress=False) == 0 and ahead.compilations == before
    # and not at all where a wheel brought them
    built = {file.name: file.read_bytes() for file in own_cache.glob("*.o")}
    with zipfile.ZipFile(tmp_path / "compiled.zip", "w") as archive:
        for name in built:
            archive.writestr(name, built[name])
            (own_cache / name).unlink()
    monkeypatch.setattr(ahead, "BROUGHT", tmp_path / "compiled.zip")
    ahead._brought.cache_clear()
    try:
        assert ahead.build(JOBS, GPUS["sm90"], progress=False) == 0
    finally:
        ahead._brought.cache_clear()
    assert {file.name: file.read_bytes() for file in own_cache.glob("*.o")} == built


@pytest.mark.parametrize("brought", [False, True])
def test_a_folder_that_is_gone(own_cache, tmp_path, monkeypatch, brought):
    """What cannot be kept, as on a full disk, runs all the same."""
    launch = pytest.importorskip("moe_nvfp4.kernels.portable.launch", reason="compiles Triton's kernels")
    variant = (8, 0), "module", "kernel", (), (), ()
    if brought:
        with zipfile.ZipFile(tmp_path / "compiled.zip", "w") as archive:
            archive.writestr(launch.cubins.file(*variant).name, b"code")
        monkeypatch.setattr(ahead, "BROUGHT", tmp_path / "compiled.zip")
    monkeypatch.setattr(ahead, "_brought", ahead._brought.__wrapped__)
    monkeypatch.setattr(launch, "compile_kernel", lambda *variant: b"code")
    shutil.rmtree(ahead.kernel_folder())
    assert launch.cubins.code(*variant) == b"code" and not own_cache.exists()


@pytest.mark.slow
def test_what_a_compiler_says_is_raised(own_cache, monkeypatch):
    pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
    broken = Build("tests.kernels.test_ahead", "BROKEN", ("why",))
    with pytest.raises(RuntimeError, match="ZeroDivisionError: why"):
        ahead.build([broken], GPUS["sm90"], progress=False)


class _Broken(ahead.Variants):
    def file(self, *arguments):
        return ahead.kernel_file(".o", *arguments)

    def build(self, *arguments):
        raise ZeroDivisionError(*arguments)


BROKEN = _Broken()


def test_jobs_travel():
    assert pickle.loads(pickle.dumps(JOBS)) == JOBS

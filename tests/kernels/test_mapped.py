"""Experts that stay in their files: the same bits as in memory, and what happens when files change."""

import copy
import os
import pickle
import re

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvfp4 import NVFP4Experts, backends
from moe_nvfp4 import mapped as mapped_files
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.mapped import Matrix
from moe_nvfp4.weights import Gate
from tests.common import random_layer
from tests.kernels.test_cpu import path  # noqa: F401, a fixture

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler")

GATES = [Gate("silu"), Gate("gelu_tanh"), Gate("relu2", gated=False), Gate("raw")]


def in_files(layer, folder, seed=0):
    """A copy of `layer` with its weights in two files: matrix by matrix, in any order, with bytes between them."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda n: int(torch.randint(n, (), generator=generator))
    files, contents, found, todo = [folder / "a", folder / "b"], [bytearray(), bytearray()], {}, []
    for name in (layer.up_name, "down_proj"):
        parts = 2 if name == "gate_up_proj" else 1
        found[name] = [[{} for _ in range(parts)] for _ in range(layer.num_experts)]
        for kind in ("", "_sf"):
            matrices = [matrix.chunk(parts) for matrix in getattr(layer, f"{name}{kind}").data]
            todo += [
                (found[name][e][i], kind, part)
                for e, of_parts in enumerate(matrices)
                for i, part in enumerate(of_parts)
            ]
    for i in torch.randperm(len(todo), generator=generator).tolist():
        where, kind, matrix = todo[i]
        file = random(2)
        contents[file] += bytes(random(20))
        where[kind] = (files[file], len(contents[file]))
        contents[file] += matrix.contiguous().numpy().tobytes()
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    matrices = {n: [[Matrix(p[""], p["_sf"]) for p in parts] for parts in experts] for n, experts in found.items()}
    return copy.deepcopy(layer).map_files(matrices), files


def batch(layer, T, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, layer.num_experts + 1, (T, 2), generator=generator)
    x = torch.randn(T, layer.hidden_size, generator=generator).to(dtype)
    return x, ids, torch.rand(T, 2, generator=generator)


@pytest.mark.slow_after(1)
def test_the_bits_of_weights_in_memory(path, tmp_path_factory):  # noqa: F811
    sizes = dict(E=st.integers(1, 5), H=st.sampled_from([16, 40, 264, 512]), I=st.sampled_from([16, 33, 176, 400]))

    @settings(max_examples=12, deadline=None, database=None)
    @given(st.fixed_dictionaries(sizes), st.sampled_from(GATES), st.sampled_from(["bf16", "nvfp4"]), st.integers(0, 99))
    def check(sizes, gate, activations, seed):
        layer = random_layer(**sizes, gate=gate, activations=activations, seed=seed, bias=torch.float32)
        if gate.kind == "raw":
            layer.own_gate = lambda h: h.chunk(2, -1)[0] * h.chunk(2, -1)[1]
        mapped, _ = in_files(layer, tmp_path_factory.mktemp("weights"), seed)
        for T, dtype in ((1, torch.bfloat16), (9, torch.float32), (60, torch.bfloat16)):
            inputs = batch(layer, T, dtype, seed)
            assert torch.equal(mapped(*inputs), layer(*inputs))
        assert mapped.mapped

    check()


def test_gradients_too(tmp_path):
    layer = random_layer(3, 64, 48)
    mapped, _ = in_files(layer, tmp_path)
    found = []
    for experts in (layer, mapped):
        x, ids, p = batch(layer, 20, torch.float32)
        x.requires_grad_(), p.requires_grad_()
        experts(x, ids, p).square().sum().backward()
        found.append((x.grad, p.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("lost", ["a", "b"])
@pytest.mark.parametrize("strange", [[], ["another's file, of which the system says that all is in memory"]])
def test_a_file_that_became_shorter_is_an_error(tmp_path, monkeypatch, lost, strange):
    """Not a SIGBUS; when the file is whole again, the layer works again."""
    monkeypatch.setattr("moe_nvfp4.mapped._strange", strange)
    layer = random_layer(4, 256, 256)
    mapped, _ = in_files(layer, tmp_path)
    inputs, file = batch(layer, 30), tmp_path / lost
    want, content = mapped(*inputs), file.read_bytes()
    for size in (len(content) // 2, 0):
        os.truncate(file, size)
        with pytest.raises(
            OSError, match=f"{file} became shorter, was deleted or cannot be read.*load the model again"
        ):
            mapped(*inputs)
    with pytest.raises(OSError, match="became shorter"):
        mapped.keep_on_cpu(False).to("cpu")  # reads all
    file.write_bytes(content)  # the same file, not another one
    assert torch.equal(mapped(*inputs), want)


def test_new_files_in_the_place_of_old_ones(tmp_path, monkeypatch):
    """As after a new conversion: a layer with the old files keeps them, the next layer gets the new ones. Of other
    users' files it is not known what is in memory."""
    monkeypatch.setattr(mapped_files, "_strange", [])
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    layers, found = [random_layer(3, 64, 48, seed=seed) for seed in range(2)], []
    for seed, layer in enumerate(layers):
        assert mapped_files.known()
        found.append(in_files(layer, tmp_path, seed))
        for file in found[-1][1]:
            file.unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    in_files(layer, tmp_path)
    assert not mapped_files.known()
    for layer, (mapped, _) in zip(layers, found, strict=True):
        assert torch.equal(mapped(*batch(layer, 9)), layer(*batch(layer, 9)))
        for name, tensor in mapped.keep_on_cpu(False).to("cpu").state_dict().items():
            assert torch.equal(tensor, layer.state_dict()[name])


def test_a_file_that_is_too_short_is_not_mapped(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    at = (tmp_path / "a", 0)
    layer, matrix = random_layer(1, 64, 48), Matrix(at, at)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'a'} has 100 bytes, but 1536 are needed")):
        layer.map_files({"gate_up_proj": [[matrix, matrix]], "down_proj": [[matrix]]})


def edits():
    """What is done to parameters in place, and whether the result is still a table."""
    random = lambda p: torch.randint(256, p.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    yield lambda p: p.zero_()
    yield lambda p: p.fill_(255)
    yield lambda p: p.copy_(random(p))
    yield lambda p: p.copy_((p.float() * 0.999).to(torch.uint8))  # an average that was rounded down
    for byte in range(8):
        yield lambda p, byte=byte: p[..., byte].add_(1)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_table_that_was_edited_is_an_error(path, tmp_path, name):  # noqa: F811
    """Not a SIGSEGV, and not the weights at another address. Experts may change places."""
    layer = random_layer(4, 64, 48)
    mapped, _ = in_files(layer, tmp_path)
    x, _, p = batch(layer, 30)
    inputs = x, torch.arange(60).view(30, 2) % 4, p
    table, want = getattr(mapped, name).data, mapped(*inputs)
    before = table.clone()
    for edit in edits():
        edit(table)
        for call in (lambda: mapped(*inputs), lambda: copy.deepcopy(mapped).keep_on_cpu(False).to("cpu")):
            with pytest.raises(ValueError, match="was edited has the addresses of experts that stay in their files"):
                call()
        for kind, columns in ((0, 2), (1, 16)):
            to = torch.empty(layer.state_dict()[name].numel() * 2 // columns, dtype=torch.uint8)
            with pytest.raises(ValueError, match="load the model again"):
                cpu.gather(table, kind, to)
        table.copy_(before)
        assert torch.equal(mapped(*inputs), want)
    for name in ("gate_up_proj", "gate_up_proj_sf", "down_proj", "down_proj_sf"):
        for experts in (layer, mapped):
            if (tensor := getattr(experts, name).data).numel():
                tensor.copy_(tensor.flip(0))
    assert torch.equal(mapped(*inputs), layer(*inputs)) and not torch.equal(mapped(*inputs), want)


def resident():
    """The bytes of this process that are its own, and those that are of files."""
    with open("/proc/self/status") as f:
        status = dict(line.split(":", 1) for line in f)
    return [int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssFile")]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc")
def test_they_take_no_memory(tmp_path):
    E, H, I = 48, 1024, 1024
    size, file = 3 * H * I * 9 // 16, tmp_path / "sparse"
    with open(file, "wb") as f:
        f.truncate(E * size)
    at = lambda e, i: Matrix((file, e * size + i * H * I // 2), (file, e * size + 3 * H * I // 2 + i * H * I // 16))
    before = resident()
    with torch.device("meta"):
        empty = NVFP4Experts(E, H, I)
    layer = empty.map_files({"gate_up_proj": [[at(e, 0), at(e, 1)] for e in range(E)],
                             "down_proj": [[at(e, 2)] for e in range(E)]})  # fmt: skip
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(layer, f"{name}_global_scale", torch.nn.Parameter(torch.ones(E), requires_grad=False))
    y = layer(torch.randn(E, H).bfloat16(), torch.arange(E)[:, None], torch.ones(E, 1))
    own, of_files = (b - a for a, b in zip(before, resident(), strict=True))
    assert not y.any() and own < 20 << 20 < 80 << 20 < of_files, (own, of_files)
    assert layer.mapped_bytes == E * size


def test_what_becomes_of_the_module(tmp_path):
    layer = random_layer(3, 64, 48, bias=torch.bfloat16)
    mapped, _ = in_files(layer, tmp_path)
    inputs = batch(layer, 5)
    want = layer(*inputs)
    assert "backend='cpu'" in repr(mapped)
    again = copy.deepcopy(mapped).keep_on_cpu()
    assert again.mapped and torch.equal(again(*inputs), want)
    assert again.half().mapped and again.down_proj_bias.dtype == torch.float16
    with pytest.raises(TypeError, match="cannot go to another process"):
        pickle.dumps(mapped)
    state, whole = mapped.state_dict(), layer.state_dict()
    assert {n: (t.shape, t.dtype) for n, t in state.items()} == {n: (t.shape, t.dtype) for n, t in whole.items()}
    assert torch.equal(state["down_proj_global_scale"], whole["down_proj_global_scale"]) and "down_proj" in repr(state)
    for save in (copy.deepcopy, safetensors.torch.save, lambda state: torch.save(state, tmp_path / "state")):
        with pytest.raises(NotImplementedError, match="are saved already: copy those, or load the model without map_f"):
            save(state)
    assert mapped.load_state_dict({"another": torch.ones(1)}, strict=False).unexpected_keys and mapped.mapped
    mapped.keep_on_cpu(False).to("cpu")  # as before it goes to a GPU
    assert not mapped.mapped and torch.equal(mapped(*inputs), want)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(mapped.state_dict()[name], tensor)


def test_without_a_library_it_says_so(tmp_path, monkeypatch):
    layer = random_layer(3, 64, 48)
    mapped, _ = in_files(layer, tmp_path)
    inputs, way_out = batch(layer, 5), "reference takes weights in memory, not those that stay in their files; or unset"
    with monkeypatch.context() as m:
        m.setenv("MOE_NVFP4_BACKEND", "reference")
        with pytest.raises(ValueError, match=f"MOE_NVFP4_BACKEND=reference on cpu: {way_out}"):
            mapped(*inputs)
    monkeypatch.setattr(cpu, "missing", lambda: "cannot be compiled (no cc): install a C compiler")
    backends.forget()
    for call in (lambda: mapped(*inputs), lambda: in_files(layer, tmp_path)):
        with pytest.raises(NotImplementedError, match="stay in their files: cpu cannot be compiled.*without map_files"):
            call()
    backends.forget()

"""Whole models on Hopper GPUs: what transformers and accelerate do with weights that are packed in place."""

import copy
import warnings
from functools import partial
from types import MethodType

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._device import _device_constructors
from transformers.initialization import meta_device_safe_creation_ops

from moe_nvfp4.backends import named
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, set_activations, swap_experts
from moe_nvfp4.integrations.huggingface.distill import grouped_matmul
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from tests.common import on_gpu, on_two_gpus, relative_error
from tests.models import FAMILIES, IDS, folder, load, logits, make, mixtral, qwen3_moe, same_tensors

pytestmark = on_gpu


def quantized(path, **kwargs):
    return load(path, quantization_config=MoeNvfp4Config(), **kwargs)


def experts(model):
    return [m for m in model.modules() if isinstance(m, HFExperts)]


def parts(layers):
    """A device_map of a model with two layers."""
    last = next(device for device in reversed(layers) if device != "cpu")
    ends = {"model.embed_tokens": layers[0], "model.rotary_emb": layers[0], "model.norm": last, "lm_head": last}
    return ends | {f"model.layers.{i}": device for i, device in enumerate(layers)}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_every_family_runs_saves_and_moves(family, tmp_path):
    """The logits are the CPU's up to bf16 rounding in a random model; the files are the CPU's byte for byte."""
    source = folder(tmp_path, family)
    on_cpu, model = quantized(source), quantized(source, device_map="cuda")
    assert all(bool(m.packed) == (m.gate.kind != "raw") for m in experts(model))
    want, got = logits(on_cpu), logits(model)
    assert relative_error(got, want) < 0.05
    on_cpu.save_pretrained(tmp_path / "cpu")
    model.save_pretrained(tmp_path / "gpu")
    same_tensors(tmp_path / "cpu", tmp_path / "gpu")
    assert torch.equal(logits(model), got)
    assert torch.equal(logits(copy.deepcopy(model)), got)
    assert torch.equal(logits(load(tmp_path / "gpu", device_map="cuda")), got)
    assert torch.equal(logits(model.cpu()), want)


def test_swapped_on_the_gpu(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    swapped = swap_experts(load(source, device_map="cuda"), progress=False)
    assert all(m.packed for m in experts(swapped))
    assert torch.equal(logits(swapped), logits(quantized(source, device_map="cuda")))


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_static_scales(activations, tmp_path):
    """Layers with the scales that calibration leaves, for either kind of rows."""
    models = [set_activations(quantized(folder(tmp_path, mixtral), device_map=d), activations) for d in ("cpu", "cuda")]
    for model in models:
        for layer in experts(model):
            layer.set_input_scales(torch.tensor(2e-3), torch.tensor(3e-3))
    want, got = (logits(model) for model in models)
    assert relative_error(got, want) < 0.05


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_generates_with_the_compiled_static_cache(activations, tmp_path):
    """transformers compiles the step and puts it into a CUDA graph."""
    model = set_activations(quantized(folder(tmp_path, qwen3_moe), device_map="cuda"), activations)
    how = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    eager = model.generate(IDS.cuda(), **how)
    compiled = model.generate(IDS.cuda(), cache_implementation="static", **how)
    # after two tokens near ties may go either way: where rows are quantized, a rounding becomes a whole step
    for a, b in zip(compiled.logits[:2], eager.logits[:2], strict=True):
        assert relative_error(a, b) < (0.05 if activations == "bf16" else 0.2)
    assert all(m.packed for m in experts(model))


def test_compiles_before_its_first_call(tmp_path):
    source = folder(tmp_path, mixtral)
    want = logits(quantized(source, device_map="cuda"))
    model = quantized(source, device_map="cuda")
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "4-bit weights are brought into the layout")
        got = compiled(IDS.cuda(), use_cache=False).logits.cpu()
    assert relative_error(got, want) < 0.05


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.20"), reason="not tried with transformers 5.17")
@pytest.mark.parametrize("graphs", [False, True])
def test_generate_batch(graphs, tmp_path):
    model = quantized(folder(tmp_path, qwen3_moe), device_map="cuda")
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.generation.ContinuousBatchingConfig(use_cuda_graph=graphs)
    outputs = model.generate_batch(
        inputs=[IDS[0].tolist()], generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    (result,) = outputs.values()
    expected = model.generate(IDS.cuda(), generation_config=config)[0, IDS.shape[1] :]
    assert result.generated_tokens == expected.tolist()
    assert all(m.packed for m in experts(model))


def test_a_layer_on_the_cpu(tmp_path):
    """Its weights come for each call; the other layer's stay on the GPU, packed."""
    from moe_nvfp4.kernels.common.tensors import warn_unpacked

    warn_unpacked.cache_clear()
    source = folder(tmp_path, qwen3_moe)
    whole = quantized(source, device_map="cuda")
    model = quantized(source, device_map=parts([0, "cpu"]))
    with pytest.warns(UserWarning, match="no offloading"):
        got = logits(model)
    assert torch.equal(got, logits(whole))
    assert [bool(m.packed) for m in experts(model)] == [True, False]
    whole.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    same_tensors(tmp_path / "a", tmp_path / "b")
    assert torch.equal(logits(model), got)


@on_two_gpus
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_layers_on_two_gpus(activations, tmp_path):
    source = folder(tmp_path, qwen3_moe)
    whole = set_activations(quantized(source, device_map="cuda:0"), activations)
    model = set_activations(quantized(source, device_map=parts([0, 1])), activations)
    got = logits(model)
    assert torch.equal(got, logits(whole))
    assert all(m.packed for m in experts(model))
    assert [m.down_proj.device.index for m in experts(model)] == [0, 1]
    assert torch.equal(logits(quantized(source, device_map="cuda:1")), logits(quantized(source, device_map="cuda:0")))
    greedy = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(IDS.cuda(), **greedy), whole.generate(IDS.cuda(), **greedy))
    model.save_pretrained(tmp_path / "b")
    whole.save_pretrained(tmp_path / "a")
    same_tensors(tmp_path / "a", tmp_path / "b")


def test_merged_adapters_move_with_their_model():
    """What a call on the CPU has merged is undone on the GPU."""
    pytest.importorskip("peft")
    from peft import get_peft_model

    from moe_nvfp4.integrations.huggingface.peft import MergeableLoraConfig

    lora = MergeableLoraConfig(r=4, target_parameters=["experts.down_proj"], init_lora_weights=False)
    model = get_peft_model(swap_experts(make(qwen3_moe), progress=False), lora)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    logits(model)
    model.to("cuda")
    logits(model)
    for name, t in model.state_dict().items():
        assert t.is_cuda and torch.equal(t.cpu(), before[name]), name


def test_adapters_that_are_trained_to_be_merged(tmp_path):
    """From the second step on, weights change in their kernels' layout: to the bits of a fresh merge."""
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    from moe_nvfp4.integrations.huggingface.peft import MergeableLoraConfig

    torch.manual_seed(0)
    config = MergeableLoraConfig(
        nvfp4_mergeable=True, r=4, lora_alpha=8, init_lora_weights=False, target_modules=["q_proj", "k_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    model = swap_experts(load(folder(tmp_path, qwen3_moe), device_map="cuda"), linears="attention", progress=False)
    before = {name: p.cpu() for name, p in model.state_dict().items()}
    mine = peft.get_peft_model(copy.deepcopy(model), config)
    logits(mine)
    optimizer = torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], lr=0.5)
    seen = []
    for _ in range(3):
        mine(input_ids=IDS.cuda(), labels=IDS.cuda()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        places = [m.down_proj.data_ptr() for m in experts(mine)]
        seen.append(logits(mine))  # without gradients, where q, k and v are one
        assert places == [m.down_proj.data_ptr() for m in experts(mine)], "in place"
        fresh = peft.get_peft_model(copy.deepcopy(model), config)
        fresh.load_state_dict({n: p for n, p in mine.named_parameters() if "lora_" in n}, strict=False)
        assert torch.equal(logits(fresh), seen[-1])
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(logits(copy.deepcopy(mine).merge_and_unload()), seen[-1])
    mine.unmerge_adapter()
    for name, p in mine.base_model.model.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(p.cpu(), before[name.replace("base_layer.", "")]), name


@pytest.mark.parametrize("counts", [[0, 5, 0, 700, 3, 0], [0, 0, 0], [1, 0, 2047]], ids=str)
@pytest.mark.parametrize("K", [256, 20])
def test_products_of_recipe_distill(counts, K):
    """Experts without rows get a gradient of zero, whatever was in the memory before."""
    g = torch.Generator("cuda").manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=g, device="cuda").bfloat16()
    x, w, dy = new(sum(counts), K), new(len(counts), 128, K).requires_grad_(), new(sum(counts), 128)
    dirty = [torch.full_like(w, torch.nan) for _ in range(20)]
    del dirty
    y = grouped_matmul(x, w, counts)
    (gradient,) = torch.autograd.grad(y, w, dy)
    for e, (rows, found, d) in enumerate(zip(x.split(counts), y.split(counts), dy.split(counts), strict=True)):
        want = rows.double() @ w[e].detach().double().T, d.double().T @ rows.double()
        for value, reference in zip((found, gradient[e]), want, strict=True):
            assert (value - reference).abs().max() <= 2**-8 * reference.abs().max() if len(rows) else not value.any()


def late(*_):
    torch.cuda._sleep(400_000_000)  # 0.2 s of the current stream


def slow(makes):
    """`makes`, whose tensors come late, into memory that holds other bytes meanwhile."""

    def slowed(*args):
        found = makes(*args)
        made = [torch.full_like(t, 77) if isinstance(t, torch.Tensor) else t for t in found]
        late()
        for t, to_come in zip(made, found, strict=True):
            if isinstance(t, torch.Tensor):
                t.copy_(to_come)
        return made

    return slowed


def spoil(model):
    """Fill memory that is free on the current stream."""
    garbage = [torch.full_like(p, 77) for p in model.parameters() for _ in range(3)]
    del garbage


@pytest.mark.parametrize("linears", [None, "all"])
def test_streams_beside_one_that_moves_weights(linears, monkeypatch):
    """Whoever asks for a model's state dict has its weights moved, and the next call moves them back. Another stream
    neither reads them before they are written, nor has them overwritten before it has read them."""
    family = partial(qwen3_moe, experts=2, intermediate=1024, hidden_size=1024)  # all are routed to: no near ties
    model = swap_experts(make(family).cuda(), linears=linears, progress=False)
    ids = torch.randint(3, 96, (1, 8), device="cuda")
    compute = torch.no_grad()(lambda: model(input_ids=ids, use_cache=False).logits)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    want = compute()

    def right(got):
        torch.cuda.synchronize()
        return relative_error(got, want) < 0.02  # linears are joined, or not yet again

    for stream in (one, other):  # each has memory of its own
        with torch.cuda.stream(stream):
            assert right(compute())

    with monkeypatch.context() as patch:
        backend = named(experts(model)[0].packed_for)
        patch.setattr(backend, "pack", slow(backend.pack))
        model.state_dict()
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            compute()
        with torch.cuda.stream(other):
            packed_late = compute()
        are_right = [right(packed_late)]

    with monkeypatch.context() as patch:
        patch.setattr(backend, "unpack", slow(backend.unpack))
        model.state_dict()
        with torch.cuda.stream(other):
            read_late = compute()
        are_right += [right(read_late)]

    hooks = [layer.mlp.register_forward_pre_hook(late) for layer in model.model.layers]
    with torch.cuda.stream(one):
        used_late = compute()
    [hook.remove() for hook in hooks]
    model.state_dict()
    for stream in (one, other):
        with torch.cuda.stream(stream):
            spoil(model)
    spoil(model)
    are_right += [right(used_late)]
    assert are_right == [True, True, True]


def test_an_activation_for_gpus_only_stays_fused():
    """What transformers' use_kernels assigns: the method of another class, which calls an op that CPUs do not have. It
    is asked on the GPU whether it computes the same; also in a process that used torch.device for the first time when
    from_pretrained had replaced torch.linspace, which it then leaves on the CPU."""
    _device_constructors.cache_clear()
    with torch.device("meta"), meta_device_safe_creation_ops():
        torch.empty(1)
    library = torch.library.Library("moe_nvfp4_gpus_only", "DEF")

    def kernel(name, function):
        def write(out, x):
            out.copy_(function(x))

        def forward(self, x):
            out = torch.empty_like(x)
            getattr(torch.ops.moe_nvfp4_gpus_only, name)(out, x)
            return out

        library.define(f"{name}(Tensor! out, Tensor x) -> ()")
        library.impl(name, write, "CUDA")
        forward.__qualname__ = "Kernel.forward"
        return forward

    model = swap_experts(make(qwen3_moe).cuda(), progress=False)
    want = logits(model)
    for function, kind in ((torch.nn.functional.silu, "silu"), (torch.tanh, "raw")):
        forward = kernel(function.__name__, function)
        for module in experts(model):
            module.act_fn.forward = MethodType(forward, module.act_fn)
        got = logits(model)
        assert {module.gate.kind for module in experts(model)} == {kind}
        assert torch.equal(got, want) == (kind == "silu")
    _device_constructors.cache_clear()

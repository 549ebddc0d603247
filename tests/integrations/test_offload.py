"""Experts that stay on the CPU: which layers, how they load and move, and what the GPU does meanwhile."""

import copy
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.integrations.huggingface import (
    MoeNvfp4Config,
    checkpoint_config,
    describe_placement,
    keep_experts_on_cpu,
    set_activations,
    swap_experts,
)
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.offload import CONTEXT, SHARED, SharedAhead, cache_bytes
from moe_nvfp4.integrations.huggingface.packed import PackedConverter
from moe_nvfp4.integrations.placement import SCRATCH
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.kernels.offload import backend as offload
from tests.common import random_layer, relative_error
from tests.models import (
    IDS,
    SMALL,
    aria,
    deepseek,
    folder,
    gemma4,
    gpt_oss,
    granite,
    llama4,
    load,
    logits,
    make,
    mixtral,
    nemotron_h,
    qwen3_moe,
    step3p7,
)

needs_library = pytest.mark.skipif(not cpu.available(), reason="no C compiler")
no_interface = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="transformers 5.17's Aria lacks the experts interface"
)
newer = partial(pytest.param, marks=no_interface)
on_any_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def load_with_info(path, **kwargs):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True, **kwargs)
    return model.eval(), info


def on_cpu(model):
    return [m.on_cpu for m in model.modules() if isinstance(m, HFExperts)]


def swapped(tmp_path, **kwargs):
    return swap_experts(load(folder(tmp_path, qwen3_moe)), recipe="max", progress=False, **kwargs)


def test_the_first_layers_stay(tmp_path):
    model = swapped(tmp_path, cpu_experts=1)
    assert on_cpu(model) == [True, False]
    assert describe_placement(model).startswith("experts of 1 of 2 layers stay on the CPU (")
    keep_experts_on_cpu(model, "all")
    assert on_cpu(model) == [True, True]
    keep_experts_on_cpu(model, 0)
    assert on_cpu(model) == [False, False]
    with pytest.raises(ValueError, match="cpu_experts=3: Qwen3MoeForCausalLM has 2 layers of experts"):
        keep_experts_on_cpu(model, 3)


def attention_beside_experts():
    return nemotron_h("moe", "attention", "mamba", "attention")


@pytest.mark.parametrize(
    "family",
    [qwen3_moe, deepseek, granite, attention_beside_experts, partial(gpt_oss, sliding_window=32),
     partial(gemma4, head_dim=32, global_head_dim=64, num_global_key_value_heads=1)],
)  # fmt: skip
def test_the_room_for_the_cache_is_what_a_cache_takes(family):
    """Latent vectors rather than heads, no more than a window, attention layers only, and heads that differ by
    layer."""
    model, tokens = make(family), 100
    with torch.no_grad():
        cache = model(torch.ones(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    tensors = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    sizes = [t.nbytes // t.shape[2] * (32 if t.shape[2] == 31 else tokens) for t in tensors if t is not None]
    assert cache_bytes(model, tokens) == sum(sizes) > 0, "of its window, a layer keeps all but the last"


@pytest.mark.slow
def test_auto_fills_the_gpu_first(tmp_path):
    """With one byte less than a layer needs, the layer stays on the CPU."""
    model = swapped(tmp_path)
    experts = [m for m in model.modules() if isinstance(m, HFExperts)]
    size = lambda module: (
        sum(p.numel() * p.element_size() for p in module.parameters())
        + sum(b.numel() * b.element_size() for b in module.buffers())
    )
    each, others = size(experts[0]), size(model) - sum(map(size, experts))
    config = model.config
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    assert cache_bytes(model, CONTEXT) == CONTEXT * per_token
    base = others + CONTEXT * per_token + SCRATCH
    for memory, stay in ((base, 2), (base + each - 1, 2), (base + each, 1), (base + 2 * each, 0), (1 << 50, 0)):
        assert len(keep_experts_on_cpu(model, "auto", memory=memory)) == stay
    assert len(keep_experts_on_cpu(model, "auto", context=CONTEXT + 1, memory=base + 2 * each)) == 1
    with pytest.raises(ValueError, match="are too few even with all experts on the CPU"):
        keep_experts_on_cpu(model, "auto", memory=base - 1)
    for given in ({"memory": base}, {"context": 1}):
        with pytest.raises(ValueError, match="context and memory have no effect on layers=1"):
            keep_experts_on_cpu(model, 1, **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="cpu_experts='auto' asks the GPU for its memory, and there is none"):
        swapped(tmp_path, cpu_experts="auto")


@pytest.mark.parametrize("wrong", ["some", "3", -1, True, 1.5])
def test_what_is_no_number_of_layers(wrong):
    with pytest.raises(ValueError, match="cpu_experts must be a number of layers, 'all' or 'auto'"):
        MoeNvfp4Config(cpu_experts=wrong)


def test_more_layers_than_there_are_leave_the_model_as_it_was():
    model = make(qwen3_moe)
    with pytest.raises(ValueError, match="cpu_experts=3: Qwen3MoeForCausalLM has 2 layers of experts"):
        swap_experts(model, cpu_experts=3, progress=False)
    assert not any(isinstance(m, HFExperts) for m in model.modules())


def test_files_load_with_experts_that_stay_and_do_not_say_so(tmp_path):
    model = swapped(tmp_path)
    want, path = logits(model), tmp_path / "saved"
    model.save_pretrained(path)
    model = load(path, quantization_config=MoeNvfp4Config(cpu_experts=1))
    assert on_cpu(model) == [True, False] and torch.equal(logits(model), want)
    model.save_pretrained(tmp_path / "again")
    assert "cpu_experts" not in (tmp_path / "again" / "config.json").read_text()
    assert on_cpu(load(tmp_path / "again")) == [False, False]
    with pytest.raises(ValueError, match="cpu_experts with device_map=.*name the GPU that everything else goes to"):
        load(path, quantization_config=MoeNvfp4Config(cpu_experts=1), device_map={"": "meta"})
    with pytest.raises(ValueError, match="give it to from_pretrained"):
        checkpoint_config(path, cpu_experts=1)


def test_dense_files_load_with_experts_that_stay(tmp_path):
    source = folder(tmp_path, mixtral)
    model = load(source, quantization_config=MoeNvfp4Config(cpu_experts="all"))
    assert on_cpu(model) == [True, True]
    assert torch.equal(logits(model), logits(load(source, quantization_config=MoeNvfp4Config())))


def saved(tmp_path, family, **kwargs):
    """(folder of 4-bit files, the logits of the model in them)"""
    config = MoeNvfp4Config(recipe="max", **kwargs)
    model = load(folder(tmp_path, family), quantization_config=config)
    model.save_pretrained(tmp_path / "4bit", max_shard_size="40KB")
    return tmp_path / "4bit", logits(model)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("device_map", ["cuda:1", {"": 1}, {"": torch.device("cuda", 1)}])
def test_the_rest_goes_to_the_gpu_of_device_map(tmp_path, monkeypatch, device_map):
    path, _ = saved(tmp_path, qwen3_moe)
    moved = []
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, device: moved.append((on_cpu(self), device)))
    load(path, quantization_config=MoeNvfp4Config(cpu_experts=1), device_map=device_map)
    assert moved == [([True, False], torch.device("cuda", 1))]


@pytest.mark.slow_after(2)
@needs_library
@pytest.mark.parametrize("family", [qwen3_moe, mixtral, granite, nemotron_h])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_experts_stay_in_their_files(tmp_path, monkeypatch, family, dialect):
    """Nothing reads them while the model loads, and its logits are the same."""
    path, want = saved(tmp_path, family, dialect=dialect)
    read, convert = [], PackedConverter.convert

    def noted(self, layer_name, *args, **kwargs):
        read.append(layer_name.rpartition(".")[2])
        return convert(self, layer_name, *args, **kwargs)

    monkeypatch.setattr(PackedConverter, "convert", noted)
    model, info = load_with_info(path, quantization_config=MoeNvfp4Config(map_files=True))
    assert "down_proj_global_scale" in read and not any(name.endswith(("_proj", "_sf")) for name in read)
    assert not any(info.values()), info
    assert all(m.mapped and m.on_cpu for m in model.modules() if isinstance(m, HFExperts))
    assert "layers stay in their files" in describe_placement(model)
    assert torch.equal(logits(model), want)
    before = {file: file.read_bytes() for file in path.iterdir()}
    set_activations(model, "nvfp4")
    for one in (model, copy.deepcopy(model)):
        for where in (path, tmp_path / "new" / "folder"):
            with pytest.raises(NotImplementedError, match="are saved already"):
                one.save_pretrained(where)
    assert {file: file.read_bytes() for file in path.iterdir()} == before  # config.json, too
    assert not (tmp_path / "new").exists()


@needs_library
def test_a_model_that_initializes_its_experts_weights_by_name(tmp_path):
    """Qwen3-Omni's blocks do, whatever is loaded."""
    from transformers import Qwen3OmniMoeThinkerTextModel
    from transformers.models.qwen3_omni_moe import Qwen3OmniMoeTextConfig

    config = Qwen3OmniMoeTextConfig(**SMALL, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2)
    model = make(lambda: Qwen3OmniMoeThinkerTextModel(config), torch.bfloat16)
    swap_experts(model, progress=False).save_pretrained(tmp_path)
    read = partial(Qwen3OmniMoeThinkerTextModel.from_pretrained, tmp_path, dtype=torch.bfloat16)
    mapped = read(quantization_config=MoeNvfp4Config(map_files=True))
    assert all(m.mapped for m in mapped.modules() if isinstance(m, HFExperts))
    with torch.no_grad():
        assert torch.equal(mapped(IDS).last_hidden_state, read()(IDS).last_hidden_state)


@needs_library
def test_experts_of_some_layers_stay_in_their_files(tmp_path):
    path, want = saved(tmp_path, qwen3_moe)
    model = load(path, quantization_config=MoeNvfp4Config(cpu_experts=1, map_files=True))
    mapped = [m.mapped for m in model.modules() if isinstance(m, HFExperts)]
    assert mapped == on_cpu(model) == [True, False] and torch.equal(logits(model), want)
    keep_experts_on_cpu(model, 0)
    model.to("cpu").save_pretrained(tmp_path / "again")  # they are in memory now
    assert torch.equal(logits(load(tmp_path / "again")), want)


def test_what_cannot_stay_in_its_files(tmp_path):
    source = folder(tmp_path, mixtral)
    with pytest.raises(NotImplementedError, match="map_files: the experts of these files are dense, and the kernels"):
        load(source, quantization_config=MoeNvfp4Config(map_files=True))
    for fields in ({"map_files": True}, {"cpu_experts": 1}):  # test_distributed.py asks two ranks
        with pytest.raises(NotImplementedError, match=f"{min(fields)} keeps whole experts .* is split over ranks"):
            load(
                source,
                distributed_config=DistributedConfig(tp_size=1, fsdp_size=1),
                quantization_config=MoeNvfp4Config(**fields),
            )
    with pytest.raises(ValueError, match="map_files is True or False, got 'all'"):
        MoeNvfp4Config(map_files="all")
    for field in ("activations", "recipe", "dialect"):
        with pytest.raises(ValueError, match="''|unknown recipe"):
            MoeNvfp4Config(**{field: ""})
    with pytest.raises(ValueError, match="give it to from_pretrained, as .*map_files="):
        checkpoint_config(source, map_files=True)
    places = {
        "model.embed_tokens": "cpu",
        "model.layers": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    with pytest.raises(ValueError, match="map_files with device_map=.*name the GPU that everything else goes to"):
        load(source, device_map=places, offload_folder=tmp_path, quantization_config=MoeNvfp4Config(map_files=True))


@pytest.mark.parametrize("layers", [1, "all"])
def test_what_device_map_has_offloaded(layers, tmp_path):
    path, want = saved(tmp_path, qwen3_moe)
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers.0": "cpu" if layers == "all" else "disk", "model.layers.1": "disk"}
    model = load(path, device_map=places, offload_folder=tmp_path)
    with pytest.raises(NotImplementedError, match="device_map has offloaded .* load without it"):
        keep_experts_on_cpu(model, layers)
    assert on_cpu(model) == [False, False] and torch.equal(logits(model), want)


def test_no_experts_no_layers():
    with pytest.raises(ValueError, match="Linear has no 4-bit experts to keep on the CPU"):
        keep_experts_on_cpu(torch.nn.Linear(2, 2), "all")


@on_any_gpu
@needs_library
def test_beside_a_gpu_the_model_says_the_same(tmp_path):
    model = swapped(tmp_path, cpu_experts="all")
    want = logits(model)
    model.to("cuda")
    assert {p.device.type for m in model.modules() if isinstance(m, HFExperts) for p in m.parameters()} == {"cpu"}
    assert model.lm_head.weight.is_cuda
    assert relative_error(logits(model), want) < 0.05  # attention's bf16, in a model with random weights
    assert torch.equal(logits(model.cpu()), want)


@torch.no_grad()
def test_the_tokens_of_llama_4_count_once(monkeypatch):
    """It passes each token to every expert; the rows of those that it did not choose are zeros."""
    model, counted = swap_experts(make(llama4), recipe="max", progress=False, cpu_experts="all"), []
    experts = next(m for m in model.modules() if isinstance(m, HFExperts))
    experts.meanwhile = lambda: None
    kernels = lambda x, ids, p, w, routed, *_: counted.append((len(x), routed)) or x
    monkeypatch.setattr("moe_nvfp4.experts._kernels", lambda device: SimpleNamespace(experts=kernels))
    T, E = 5, experts.num_experts
    experts(torch.empty(E * T, experts.hidden_size, device="meta"))  # anywhere but on the CPU
    assert counted == [(E * T, T)]


EVENTS = []


@pytest.fixture
def events(monkeypatch):
    """Experts on the CPU run as beside a GPU: they are asked, start what the GPU does meanwhile, and answer."""
    EVENTS.clear()
    forward = NVFP4Experts.forward

    def asked_and_answered(self, *args):
        EVENTS.append("asked")
        if self.meanwhile is not None and not torch.compiler.is_compiling():
            self.meanwhile()
        EVENTS.append("answered")
        return forward(self, *args)

    monkeypatch.setattr(NVFP4Experts, "forward", asked_and_answered)
    return EVENTS


def note_shared(*_):
    EVENTS.append("shared")


def blocks(model):
    """Blocks with shared experts, which note when they compute."""
    names = [(b, n) for b in model.modules() for n in SHARED if hasattr(b, "experts") and hasattr(b, n)]
    for block, name in names:
        getattr(block, name).down_proj.register_forward_hook(note_shared)
    return [block for block, _ in names]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("family, ahead", [(nemotron_h, True), (llama4, True), newer(aria, True), (step3p7, False)])
def test_shared_experts_run_while_the_cpu_does(family, ahead, events):
    model = swap_experts(make(family), recipe="max", progress=False)
    want = logits(model)
    count = len(blocks(model))
    assert count
    for _ in range(2):
        keep_experts_on_cpu(model, "all")
    usual = ["asked", "answered", "shared"] if ahead else ["shared", "asked", "answered"]
    overlapped = ["asked", "shared", "answered"] if ahead else usual
    for i, layer in enumerate((usual, overlapped, overlapped)):
        events.clear()
        assert torch.equal(logits(model), want), i
        assert events == layer * count
    for twin in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(1) if p.is_floating_point() and p.dim() == 2 else None
        events.clear()
        assert torch.equal(logits(model), want) and not torch.equal(logits(twin), want)
        assert events == overlapped * count * 2  # the copy's own
    keep_experts_on_cpu(model, 0)
    events.clear()
    assert torch.equal(logits(model), want) and events == usual * count


class Block(torch.nn.Module):
    """Calls its experts and its shared experts as `order` says, which may change from call to call."""

    def __init__(self, experts):
        super().__init__()
        self.experts, self.order = experts, lambda x, routed, shared: routed(x) + shared(x)
        self.shared_experts = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        T = x.numel() // 64
        ids = torch.arange(T)[:, None] % 4
        routed = lambda x: self.experts(x.reshape(-1, 64), ids, torch.ones(T, 1)).view(x.shape)
        return self.order(x, routed, self.shared_experts)


ORDERS = {
    "other rows": lambda x, routed, shared: routed(x) + shared(x + 1),
    "rows written to": lambda x, routed, shared: routed(x) + shared(x.add_(1)),
    "the first rows": lambda x, routed, shared: routed(x) + shared(x[:1]),
    "not at all": lambda x, routed, shared: routed(x),
    "twice": lambda x, routed, shared: routed(x) + shared(x) * shared(x + 2),
    "first": lambda x, routed, shared: shared(x) * routed(x),
    "in another shape": lambda x, routed, shared: routed(x) + shared(x.view(-1, 64)).view(x.shape),
}


@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_shared_experts_that_are_called_otherwise(order, events):
    """After a call of the usual order, whatever comes next gives what it gives without this."""
    torch.manual_seed(0)
    block = Block(random_layer(E=4, H=64, I=48))
    usual, x = block.order, torch.randn(2, 3, 64)
    calls = [usual, ORDERS[order], ORDERS[order], usual, usual]
    inputs = [x + i for i in range(len(calls))]  # none is another's

    def results():
        found = []
        for block.order, given in zip(calls, inputs, strict=True):
            found.append(block(given.clone()).detach())
        return found

    want = results()
    block.experts.keep_on_cpu()
    SharedAhead(block, block.shared_experts)
    block.experts.meanwhile = block.shared_experts.forward.start
    for _ in range(2):
        for found, wanted in zip(results(), want, strict=True):
            assert torch.equal(found, wanted)
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            assert all(torch.equal(found, wanted) for found, wanted in zip(results(), want, strict=True))


@torch.no_grad()
def test_shared_experts_compile_whole():
    block, x = Block(random_layer(E=4, H=64, I=48).keep_on_cpu()), torch.randn(2, 3, 64)
    want = block(x)
    block.experts.meanwhile = SharedAhead(block, block.shared_experts).start
    torch.compiler.reset()
    assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(x), want)


@on_any_gpu
@needs_library
@pytest.mark.parametrize("family", [llama4, deepseek, newer(aria)])
def test_beside_a_gpu_shared_experts_give_the_same_bits(family, monkeypatch):
    monkeypatch.setattr(offload, "_better_on_gpu", lambda *_: False)
    model = swap_experts(make(family), recipe="max", progress=False, cpu_experts="all").to("cuda")
    layers = [m for m in model.modules() if isinstance(m, HFExperts)]
    found = [logits(model) for _ in range(4)]
    for layer in layers:
        assert layer.meanwhile is not None and layer.meanwhile.__self__.useful
        layer.meanwhile = None
    want = logits(model)
    assert all(torch.equal(f, want) for f in found)


def first_logits(model, **kwargs):
    how = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return model.generate(IDS.to(model.device), **how, **kwargs).logits[:2]  # then a near tie may go either way


@on_any_gpu
@needs_library
def test_beside_a_gpu_a_compiled_step_is_one_cuda_graph(tmp_path):
    """A layer that gets other weights makes another graph."""
    model, before = swapped(tmp_path, cpu_experts="all").to("cuda"), None
    layers = [m for m in model.modules() if isinstance(m, HFExperts)]
    for _ in range(2):
        compiled, eager = first_logits(model, cache_implementation="static"), first_logits(model)
        for a, b in zip(compiled, eager, strict=True):
            assert relative_error(a, b) < 0.05
        assert before is None or relative_error(eager[1], before) > 0.3
        before = eager[1]
        assert len(layers) in [len(w.calls) for w in offload._graphs]
        for layer in layers:
            layer.load_state_dict({name: t.flip(0) for name, t in layer.state_dict().items()}, assign=True)

"""Steps that are captured once and replayed: what `generate` says is what it says without.

Where there is no GPU a graph is the list of torch's operators that a step ran, which is run again on the same tensors:
as in a CUDA graph, nothing of the model's Python runs any more.
"""

import copy
import gc
import pickle
import runpy
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, GenerationConfig, StaticCache

from moe_nvfp4.cli import answers
from moe_nvfp4.integrations.huggingface import graphs, swap_experts, use_cuda_graphs
from tests.common import ROOT
from tests.models import IDS, deepseek, gpt_oss, granite, llama4, load, logits, make, nemotron_h, qwen3_moe

pytestmark = pytest.mark.usefixtures("as_on_gpu")

STEPS = 12
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in WAITS, f"{func}: the host waits for the device, which ends a capture"
        made = func(*args, **kwargs or {})
        inside = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self.list.append((func, args, kwargs or {}, made, inside))
        return made

    def again(self):
        for func, args, kwargs, made, inside in self.list:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in inside:  # no view
                    old.copy_(new)


@pytest.fixture
def as_on_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "_on_gpu", lambda model: True)


@pytest.fixture
def recorded(as_on_gpu, monkeypatch):
    """Count how often steps are captured and replayed, on a CPU too."""
    counts = {"captured": 0, "replayed": 0}
    real = graphs.record

    def record(work, device):
        counts["captured"] += 1
        if device.type == "cuda":
            again = real(work, device)
        else:
            with Operators() as operators:
                made = work()
            first = iter([made])  # what a capture does not do yet is done here
            again = lambda: next(first, None) or operators.again() or made

        def replay():
            counts["replayed"] += 1
            return again()

        return replay

    monkeypatch.setattr(graphs, "record", record)
    return counts


def ready(family):
    """A 4-bit model that meets transformers' criteria for compiling its steps on a CPU too."""
    model = swap_experts(make(family), progress=False).to("cuda" if torch.cuda.is_available() else "cpu")
    model._valid_auto_compile_criteria = lambda kwargs, config: not config.disable_compile
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def said(model, **options):
    ids = IDS.to(model.device).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padded on the left
    how = dict(max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return model.generate(ids, attention_mask=mask, cache_implementation="static", **how, **options)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, granite, deepseek], ids=lambda f: f.__name__)
def test_the_same_as_without(family, recorded):
    model = ready(family)
    want = said(model, disable_compile=True)
    got = said(use_cuda_graphs(model), output_hidden_states=True)
    assert recorded == {"captured": 1, "replayed": STEPS - 2}  # the prompt gives one token, a step as it is another
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    last = [step[-1] for step in got.hidden_states[1:]]
    assert not any(torch.equal(a, b) for a, b in zip(last, last[1:], strict=False))  # each step has its own


@pytest.mark.slow
def test_nobody_needs_to_ask(recorded, monkeypatch, caplog):
    """A swapped model on a GPU decodes by graphs if its cache is static, and so do its copies. With a dynamic cache
    there is a hint, once; a compile_config, and a model that graphs do not take, get transformers' own step."""
    monkeypatch.setattr(graphs.Hint, "said", False)
    model = swap_experts(make(qwen3_moe), progress=False)
    model.generation_config = GenerationConfig(pad_token_id=0)
    for _ in range(2):
        model.generate(IDS, max_new_tokens=STEPS, do_sample=False)
    assert caplog.text.count('generate(cache_implementation="static") decodes this model several times faster') == 1
    static = dict(max_new_tokens=STEPS, do_sample=False, cache_implementation="static")
    want = model.generate(IDS, **static, disable_compile=True)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda model, kwargs, config: True)
    for i, one in enumerate((model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        got = one.generate(IDS, **static)
        assert torch.equal(got, want) and recorded["captured"] == i + 1
        assert one.get_compiled_call().model is one
    other = swap_experts(make(gpt_oss), progress=False)
    for one in (model, other):
        monkeypatch.setattr(type(one), "get_compiled_call", lambda model, compile_config: "transformers' own")
    assert model.get_compiled_call(CompileConfig()) == other.get_compiled_call() == "transformers' own"
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "reference")  # waits for the GPU, which ends a capture of a compiled step
    for one in (model, other):
        assert one.get_compiled_call() is one and one.get_compiled_call(CompileConfig()) == "transformers' own"


@pytest.mark.slow
def test_each_call_of_generate_has_a_graph_of_its_own(recorded):
    model = use_cuda_graphs(ready(qwen3_moe))
    assert torch.equal(said(model).sequences, said(model).sequences)
    assert recorded["captured"] == 2
    assert copy.deepcopy(model).get_compiled_call().model is not model
    with pytest.raises(ValueError, match="compile_config has no effect after use_cuda_graphs"):
        said(model, compile_config=CompileConfig())


def test_a_model_is_freed_when_python_looks_for_cycles(tmp_path):
    """docs/faq.md; it has methods that hold it, so that swap_experts(...).save_pretrained(...) works, too."""
    swap_experts(make(qwen3_moe), progress=False).save_pretrained(tmp_path)
    model = load(tmp_path)
    logits(model)
    weights = weakref.ref(model.model.layers[0].mlp.experts.down_proj)
    del model
    gc.collect()
    assert weights() is None


def test_a_capture_that_fails_is_said_and_left_out(monkeypatch, caplog):
    def fails(work, device):
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    model = ready(qwen3_moe)
    want = said(model, disable_compile=True)
    monkeypatch.setattr(graphs, "record", fails)
    monkeypatch.setattr(graphs.logger, "propagate", True)  # to caplog
    got = said(use_cuda_graphs(model))
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    assert [r.message for r in caplog.records if "CUDA graphs" in r.message] == [
        "slower, without CUDA graphs: a step of Qwen3MoeForCausalLM has failed in one: operation not permitted when "
        "stream is capturing"
    ]


REFUSED = {
    "gpt-oss": (gpt_oss, "the cache of StaticSlidingWindowLayer"),
    "Llama 4": (llama4, "the cache of StaticSlidingWindowLayer"),
    "Nemotron-H": (nemotron_h, "the cache of (DummyLayer|LinearAttentionLayer)"),
    "dynamic": (lambda: qwen3_moe(rope_parameters=DYNAMIC), "rotary_emb of type 'dynamic'"),
}


@pytest.mark.parametrize(("family", "why"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_would_get_wrong_is_refused(family, why, monkeypatch):
    model = ready(family)
    with pytest.raises(NotImplementedError, match=why):
        use_cuda_graphs(model)
    monkeypatch.setattr(answers, "_free_memory", lambda device: 1 << 40)
    assert answers._cache(model, 8, None) is None  # the command line does without, and says nothing


def test_the_model_that_peft_wraps_decodes_by_graphs():
    """PEFT's generate is that model's."""
    model = ready(qwen3_moe)
    wrapper = SimpleNamespace(get_base_model=lambda: model)
    assert use_cuda_graphs(wrapper) is wrapper and model.get_compiled_call().model is model


def test_hooks_of_the_user_are_called_at_each_step(recorded, monkeypatch):
    """A graph would call them for the last time while it is captured. Those of PEFT and transformers stay in it."""
    model, seen = ready(qwen3_moe), []
    hook = partial(lambda seen, module, args, output: seen.append(output), seen)
    handle = model.model.layers[1].register_forward_hook(hook)
    with pytest.raises(NotImplementedError, match="the forward hooks of model.layers.1: a graph would not call"):
        use_cuda_graphs(model)
    handle.remove()
    handle = use_cuda_graphs(model).register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(NotImplementedError, match="the forward hooks of the model: a graph would not call"):
        said(model)
    handle.remove()
    said(model, output_hidden_states=True)
    assert model.model.layers[1]._forward_hooks and recorded["captured"] == 1, "transformers' hooks are no longer hooks"
    said(model)
    assert recorded["captured"] == 2

    model = ready(qwen3_moe)  # nobody asked for graphs
    monkeypatch.setattr(type(model), "get_compiled_call", lambda model, compile_config: model.__call__)
    model.model.layers[1].register_forward_hook(hook)
    said(model)
    assert len(seen) == STEPS and recorded["captured"] == 2


def test_a_model_on_a_cpu_is_refused(monkeypatch):
    """There, `generate` never asks for the step that would be captured."""
    monkeypatch.undo()
    model = swap_experts(make(qwen3_moe), progress=False)
    for one in (model, SimpleNamespace(get_base_model=lambda: model)):
        with pytest.raises(NotImplementedError, match="Qwen3MoeForCausalLM: .* on an NVIDIA GPU, this one is on cpu"):
            use_cuda_graphs(one)


def test_other_models_are_refused(monkeypatch):
    model = ready(qwen3_moe)
    model._can_compile_fullgraph = False
    with pytest.raises(NotImplementedError, match="steps transformers can compile whole"):
        use_cuda_graphs(model)
    del model._can_compile_fullgraph
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(NotImplementedError, match="on several devices"):
        use_cuda_graphs(model)
    del model.hf_device_map
    model.config.layer_types = ["heavily_compressed_attention"] * 2  # DeepSeek V4's
    with pytest.raises(NotImplementedError, match="which has no layers of 'heavily_compressed_attention'"):
        use_cuda_graphs(model)
    del model.config.layer_types
    layer = use_cuda_graphs(model).model.layers[1].mlp.experts.keep_on_cpu()
    use_cuda_graphs(model)
    with monkeypatch.context() as patch:
        patch.setenv("MOE_NVFP4_BACKEND", "reference")
        with pytest.raises(NotImplementedError, match="layers.0.mlp.experts: it runs as plain torch operations"):
            use_cuda_graphs(model)
    layer.add_pre_quant_scales(torch.bfloat16)
    with pytest.raises(NotImplementedError, match="layers.1.mlp.experts: it is on the CPU, and waits for the GPU"):
        use_cuda_graphs(model)


def test_steps_that_are_not_alike_run_as_they_are(recorded, caplog):
    model = use_cuda_graphs(ready(qwen3_moe))
    step, x = model.get_compiled_call(), IDS.to(model.device)
    with torch.no_grad():
        for n in (1, 1, 2, 3):  # tokens; the second is replayed
            assert torch.equal(step(input_ids=x[:, :n]).logits, model(input_ids=x[:, :n]).logits)
    assert recorded == {"captured": 1, "replayed": 1}
    assert "inputs of different shapes" in caplog.text


def test_a_cache_that_moves_its_tensors_is_not_captured(recorded):
    cache = StaticCache(config=qwen3_moe().config, max_cache_len=4)
    cache.offloading = True  # cache_implementation="offloaded_static", which asks for a GPU
    step = graphs.GraphedStep(lambda **inputs: inputs["input_ids"] + 1)
    for i in range(4):
        assert step(input_ids=torch.tensor([i]), **{graphs.CACHE: cache}) == i + 1
    assert recorded["captured"] == 0


def test_a_graph_keeps_the_weights_that_it_reads(monkeypatch):
    """Of a model that has others meanwhile: where a thread asks for its state dict, they change their layout."""
    monkeypatch.setattr(graphs, "record", lambda work, device: [work()].copy)
    model, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    model.device, step = x.device, graphs.GraphedStep(model)
    for _ in range(2):
        step(input=x)
    old = StorageWeakRef(model.weight.untyped_storage())
    model.weight.data = torch.zeros(4, 4)
    assert not old.expired()
    del step
    assert old.expired()


@pytest.fixture
def streams(monkeypatch):
    """CUDA's streams and graphs of two GPUs, as far as `record` asks; as torch's, a graph that fails leaves its own."""
    made, state = [], {"device": "cuda:0", "cuda:0": "default 0", "cuda:1": "default 1"}

    @contextmanager
    def stream(s):
        device = s.device if hasattr(s, "device") else f"cuda:{s[-1]}"
        before, state["device"], state[device] = dict(state), device, s
        try:
            yield
        finally:
            state.update(before)

    @contextmanager
    def graph(graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        state["device"], state[stream.device], before = stream.device, stream, dict(state)
        graph.stream = stream
        yield
        state.update(before)

    def new_stream():
        made.append(SimpleNamespace(device=state["device"]))
        return made[-1]

    replace = {"CUDAGraph": type("Graph", (), {"replay": lambda self: None}), "graph": graph, "stream": stream,
               "Stream": new_stream, "current_stream": lambda device: state[device]}  # fmt: skip
    for name, value in replace.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graphs, "_idle", type(graphs._idle)(list))
    return made, state


def test_graphs_that_live_together_have_streams_of_their_own(streams):
    """On the GPU of the model, whichever is the current one."""
    made, state = streams
    before, seen = dict(state), []

    def work():
        seen.append(state[state["device"]])

    graphs.record(work, "cuda:1")  # is gone
    first, second = graphs.record(work, "cuda:1"), graphs.record(work, "cuda:1")
    other = graphs.record(work, "cuda:0")
    assert [s.device for s in seen] == ["cuda:1"] * 3 + ["cuda:0"] and made == [seen[0], seen[2], seen[3]]
    assert seen[1] is seen[0] and state == before and first and second and other
    with pytest.raises(ZeroDivisionError):
        graphs.record(lambda: 1 / 0, "cuda:1")
    assert state == before


@pytest.mark.slow
def test_a_sliding_window_would_be_wrong(recorded, monkeypatch):
    """Its cache counts in Python, which a graph does not run, so the comparison above would fail."""
    monkeypatch.setattr(graphs, "_check", lambda model: None)
    model = ready(gpt_oss)
    want = said(model, disable_compile=True)
    got = said(use_cuda_graphs(model))
    assert not all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def test_the_benchmark_generates(capsys, monkeypatch):
    """examples/benchmark_offload.py, in all its ways."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    model = swap_experts(make(qwen3_moe), progress=False)
    runpy.run_path(str(ROOT / "examples" / "benchmark_offload.py"))["time_generate"](model, 96, "cpu", 2)
    said = capsys.readouterr().out
    assert said.count(" tokens/s, ") == 5 and said.endswith("without it: True\n")


@pytest.mark.parametrize("steps, prefill", [(0, 8), (7, 8), (8, 0)])
def test_the_benchmark_times_what_it_says(monkeypatch, steps, prefill):
    """examples/benchmark_model.py needs 8 steps, and had taken as many where fewer were asked for."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    benchmark = runpy.run_path(str(ROOT / "examples" / "benchmark_model.py"))["benchmark"]
    with pytest.raises(SystemExit, match=f"--steps {steps} --prefill {prefill}: 8 steps or more"):
        benchmark("tiny", "cpu", steps, prefill)

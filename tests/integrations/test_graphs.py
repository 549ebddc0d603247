"""Steps that are captured once and replayed: what `generate` says is what it says without.

Where there is no GPU a graph is the list of torch's operators that a step ran, which is run again on the same tensors:
as in a CUDA graph, nothing of the model's Python runs any more.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig

from moe_nvfp4.integrations.huggingface import graphs, swap_experts, use_cuda_graphs
from tests.models import IDS, SMALL, gpt_oss, granite, llama4, make, nemotron_h, qwen3_moe

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
def recorded(monkeypatch):
    """How often steps were captured and replayed, on a CPU too."""
    counts = {"captured": 0, "replayed": 0}
    real = graphs.record

    def record(work):
        counts["captured"] += 1
        if torch.cuda.is_available():
            again = real(work)
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


def deepseek():
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"} | dict(num_key_value_heads=4), intermediate_size=48,
        moe_intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
    ))  # fmt: skip


def ready(family):
    """A model that asks for no compilation, with transformers' own condition for it met on a CPU too."""
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


def test_each_call_of_generate_has_a_graph_of_its_own(recorded):
    model = use_cuda_graphs(ready(qwen3_moe))
    assert torch.equal(said(model).sequences, said(model).sequences)
    assert recorded["captured"] == 2
    assert copy.deepcopy(model).get_compiled_call().model is not model
    with pytest.raises(ValueError, match="compile_config has no effect after use_cuda_graphs"):
        said(model, compile_config=CompileConfig())


REFUSED = {
    "gpt-oss": (gpt_oss, "the cache of StaticSlidingWindowLayer"),
    "Llama 4": (llama4, "the cache of StaticSlidingWindowLayer"),
    "Nemotron-H": (nemotron_h, "the cache of (DummyLayer|LinearAttentionLayer)"),
    "dynamic": (lambda: qwen3_moe(rope_parameters=DYNAMIC), "rotary_emb of type 'dynamic'"),
}


@pytest.mark.parametrize(("family", "why"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_would_get_wrong_is_refused(family, why):
    with pytest.raises(NotImplementedError, match=why):
        use_cuda_graphs(ready(family))


def test_other_models_are_refused():
    model = ready(qwen3_moe)
    model._can_compile_fullgraph = False
    with pytest.raises(NotImplementedError, match="steps transformers can compile whole"):
        use_cuda_graphs(model)
    del model._can_compile_fullgraph
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(NotImplementedError, match="on several devices"):
        use_cuda_graphs(model)


def test_steps_that_are_not_alike_run_as_they_are(recorded, caplog):
    model = use_cuda_graphs(ready(qwen3_moe))
    step, x = model.get_compiled_call(), IDS.to(model.device)
    with torch.no_grad():
        for n in (1, 1, 2, 3):  # tokens; the second is replayed
            assert torch.equal(step(input_ids=x[:, :n]).logits, model(input_ids=x[:, :n]).logits)
    assert recorded == {"captured": 1, "replayed": 1}
    assert "inputs of different shapes" in caplog.text


def test_a_sliding_window_would_be_wrong(recorded, monkeypatch):
    """Its cache counts in Python, which a graph does not run: what is compared above is different here."""
    monkeypatch.setattr(graphs, "_check", lambda model: None)
    model = ready(gpt_oss)
    want = said(model, disable_compile=True)
    got = said(use_cuda_graphs(model))
    assert not all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))

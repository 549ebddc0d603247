"""A whole model in 4 bits (experts, or linears too) against the same model in bf16: `generate.py --random NAME`.

It has the real config and random weights, made layer by layer, so that the 4-bit model is never in bf16 as a whole.
Decoding is greedy, with transformers' static cache and one CUDA graph per step (eager on a CPU). To see where a step's
time goes, parts of the model are left out, one after the other, and the differences are taken.

Without a graph, a layer is 70 kernel launches, and the model often waits for the host. So steps are also timed without
a graph. For the prompt (in a graph, transformers would write out its causal mask) both its time and the time that the
GPU is busy are measured. The latter takes a profiler, which makes every later launch slower (5.0 to 6.3 ms a step of
`tiny`, H200, 2026-11-24), so prompts come when all steps have been timed. torch.compile makes 23 kernels per layer;
with it, only whole steps are timed.
"""

import datetime
import gc
import os
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

# CUPTI may crash when it attaches again to CUDA graphs that it has seen before: keep it attached.
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("TEARDOWN_CUPTI", "0")

import torch
import transformers
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, StaticCache

from moe_nvfp4 import NVFP4Experts, ready, reference
from moe_nvfp4.integrations.huggingface import swap_experts
from moe_nvfp4.integrations.huggingface.graphs import CACHE
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.recipes import quantize_matrix
from moe_nvfp4.routing import Rows, group_by_expert

CONFIGS = {
    "Qwen3-30B-A3B": dict(
        hidden_size=2048, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, intermediate_size=6144,
        max_position_embeddings=40960, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "tiny": dict(
        hidden_size=64, num_hidden_layers=3, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=1024,
    ),
}  # fmt: skip
PROMPTS = {1: 32, 32: 128}  # batch: tokens of each prompt. 32 and 4096 rows occur elsewhere, too: fewer kernels
LINEARS = "4-bit linears"  # of attention, and the head
COMPARED = 8  # steps that are also decoded without a graph
# Relative error of a layer against the reference backend, as in tests/common.py
THRESHOLDS = {"bf16": 4e-3, "nvfp4": 2e-2}
# What the second, third and fourth measurement of a step leave out: modules of a layer, and what they return instead
PARTS = {
    "experts": (lambda layer: layer.mlp.experts, lambda x, *_: x),
    "attention and its linears": (lambda layer: layer.self_attn, lambda hidden_states, **_: (hidden_states, None)),
    "router, norms, residuals": (lambda layer: layer, lambda x, **_: x),
}


def build(name, device, activations=None, linears=False):
    """The model with random weights; with `activations`, a layer's experts are 4-bit before the next layer is made, and
    with `linears`, those of attention and the head too."""
    config = Qwen3MoeConfig(norm_topk_prob=True, **CONFIGS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    inner = model.eval().model
    inner.rotary_emb = type(inner.rotary_emb)(config).to(device)
    for part in (inner.embed_tokens, *inner.layers, inner.norm, model.lm_head):
        part.to_empty(device=device)
        for parameter in part.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(std=0.02)
        if activations and hasattr(part, "mlp"):  # the choice of scales does not matter here: the fastest recipe
            swap_experts(nn.ModuleList([part]), activations, recipe="max", progress=False)
        if linears and hasattr(part, "self_attn"):
            for child in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(part.self_attn, child, four_bit(getattr(part.self_attn, child)))
            ready.prepare(part.self_attn)
    if linears:
        model.lm_head = four_bit(model.lm_head)
        ready.prepare(model.lm_head)
    inner.embed_tokens.weight.normal_()  # large enough that tokens differ, and with them their experts
    return model


def four_bit(linear):
    codes, sf, scale = quantize_matrix(linear.weight, "max")
    new = NVFP4Linear(linear.in_features, linear.out_features, device=linear.weight.device).eval()
    new.weight.data, new.weight_sf.data = codes, sf.view(torch.uint8)
    new.weight_global_scale.data.copy_(scale)
    return new


def set_activations(model, activations):
    for experts in (m for m in model.modules() if isinstance(m, NVFP4Experts)):
        experts.activations = activations  # layers were swapped one by one: no config knows


def check_layer(layer, activations):
    """The relative error of a layer's experts against the reference backend, on 32 tokens."""
    experts = layer.mlp.experts
    x = torch.randn(32, experts.hidden_size, device=experts.down_proj.device).bfloat16()
    _, scores, ids = layer.mlp.gate(x)
    experts.unpack()  # the reference reads the checkpoint's bytes
    w, groups = experts.weights, group_by_expert(ids, experts.num_experts)
    rows = Rows(x, index=groups.token)
    if activations == "nvfp4":
        rows = reference.quantize_rows(x, groups.token, None, groups)
    h = reference.gemm1_swiglu(rows, w, groups, x.dtype)
    if activations == "nvfp4":
        h = reference.quantize_rows(h.values, None, None, groups)
    want = reference.gemm2_combine(h, w, groups, scores, torch.float32).double()
    return ((experts(x, ids, scores) - want).norm() / want.norm()).item()


# ---- running -------------------------------------------------------------------------------------


def seconds(call, repeats, device):
    """The mean time of `repeats` calls."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats


def captured(step, device):
    """`step` as one launch of a CUDA graph. It must have run before on this stream."""
    if device != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay


def prefill(model, ids, room):
    """(a cache with `ids` [B, T] and room for `room` more tokens, the next token [B, 1])."""
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + room)
    logits = model(ids, **{CACHE: cache}, logits_to_keep=1).logits
    assert logits.isfinite().all(), "the model makes NaN or Inf"
    return cache, logits[:, -1].argmax(-1, keepdim=True)


def time_prefill(model, ids, device):
    """Milliseconds: (GPU busy with a prompt, the same without experts, whole time of the prompt)."""
    call = lambda: prefill(model, ids, 1)
    call()
    whole = min(seconds(call, 1, device) for _ in range(5))
    _, busy = kernels_of(call, device)
    with without("experts", model):
        _, rest = kernels_of(call, device)
    return busy / 1e3, rest / 1e3, whole * 1e3


def kernels_of(call, device):
    """(the kernels of a call, as the profiler saw them; the microseconds in which at least one of them ran). Without a
    GPU: no kernels, and how long the call takes."""
    if device != "cuda":
        return [], seconds(call, 1, device) * 1e6
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    busy, until = 0.0, 0.0
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    return kernels, busy


class Decoder:
    """`batch` random prompts, and a step that appends one token to each. `experts`: transformers' implementation of the
    experts in the steps."""

    def __init__(self, model, batch, steps, device, experts=None):
        torch.manual_seed(batch)
        ids = torch.randint(model.config.vocab_size, (batch, PROMPTS[batch]), device=device)
        self.model, self.steps, self.device, self.prompt = model, steps, device, PROMPTS[batch]
        self.cache, self.first = prefill(model, ids, self.steps)
        self.token = self.first.clone()
        if experts:
            model.set_experts_implementation(experts)

    def step(self):
        logits = self.model(self.token, **{CACHE: self.cache}).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def run(self, step, steps):
        """Start again from the end of the prompt; returns the tokens [B, steps] after it."""
        self.token.copy_(self.first)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.prompt)
        tokens = []
        for _ in range(steps):
            step()
            tokens.append(self.token.clone())
        return torch.cat(tokens, dim=1)

    def touched(self):
        """How many experts per layer have tokens in the first step."""
        counts = []
        count = lambda module, args, output: counts.append(output[2].unique().numel())
        hooks = [layer.mlp.gate.register_forward_hook(count) for layer in self.model.model.layers]
        self.run(self.step, 1)
        for hook in hooks:
            hook.remove()
        return sum(counts) / len(counts)

    def time(self):
        """Seconds of a step."""
        step = captured(self.step, self.device)
        self.run(step, 2)
        return seconds(partial(self.run, step, self.steps), 1, self.device) / self.steps

    def measure(self):
        """Seconds of a step with and without a graph, and whether both decode the same tokens."""
        tokens = self.run(self.step, COMPARED)
        eager = min(seconds(partial(self.run, self.step, COMPARED), 1, self.device) for _ in range(5)) / COMPARED
        equal = torch.equal(tokens, self.run(captured(self.step, self.device), COMPARED))
        return {"step": self.time(), "eager": eager, "equal": equal}

    def measure_parts(self, step):
        """Seconds of each part of a step that takes `step` (the last part: what is outside the layers), and the number
        of experts touched."""
        times, touched = [step], self.touched()
        with ExitStack() as stack:
            for part in PARTS:
                stack.enter_context(without(part, self.model))
                times.append(self.time())
        parts = [a - b for a, b in zip(times, [*times[1:], 0.0], strict=True)]
        return {"parts": parts, "touched": touched}


@contextmanager
def without(part, model):
    """Inside the context, `part` of each layer is replaced by its short cut in PARTS."""
    module_of, instead = PARTS[part]
    modules = [module_of(layer) for layer in model.model.layers]
    for module in modules:
        module.forward = instead
    yield
    for module in modules:
        del module.forward


@contextmanager
def compiled(model):
    """Inside the context, each layer of `model` is compiled. All layers share the first one's code; to compile the
    whole model as one graph takes minutes."""
    layers = model.model.layers
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 4 * len(layers))
    with torch._dynamo.config.patch(**limits):
        for layer in layers:
            layer.compile(dynamic=False, fullgraph=True)
        yield
    for layer in layers:
        layer._compiled_call_impl = None
    torch._dynamo.reset()


# ---- reports -------------------------------------------------------------------------------------


def measure(title, model, device, steps, experts=None, how=nullcontext):
    """One row of each table. experts: decode with this implementation of transformers; how=compiled: time steps of the
    compiled model only."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    row = {"title": title, "GB": weights / 1e9, "batches": {}}
    with peak(row, device):
        for batch in PROMPTS:
            if experts:
                model.set_experts_implementation("grouped_mm")  # the last batch left it at `experts`
            decoder = Decoder(model, batch, steps, device, experts)
            with how(model):
                found = decoder.measure()
            row["batches"][batch] = found if how is compiled else found | decoder.measure_parts(found["step"])
            del decoder
    speeds = ", ".join(f"{batch / b['step']:.0f} tokens/s at batch {batch}" for batch, b in row["batches"].items())
    print(f"{title}: {speeds}", file=sys.stderr, flush=True)
    return row


def measure_prefill(row, model, device, long):
    """Add to a row what a prompt of `long` tokens takes."""
    with peak(row, device):
        ids = torch.randint(model.config.vocab_size, (1, long), device=device)
        row["prefill"] = time_prefill(model, ids, device)


@contextmanager
def peak(row, device):
    """Set or raise row["peak"], GB: the model's weights and what the context allocates. Another model may be in memory,
    so what is there before is not counted."""
    if device != "cuda":
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    beside = (torch.cuda.max_memory_allocated() - before) / 1e9
    row["peak"] = max(row.get("peak", 0.0), row["GB"] + beside)


def table(head, rows):
    print("| " + " | ".join(head) + " |")
    print("|---" + "|--:" * (len(head) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def report(rows, long):
    bf16 = [row for row in rows if row["title"].startswith("bf16")]
    best = {batch: min(row["batches"][batch]["step"] for row in bf16) for batch in PROMPTS}
    lines = []
    for row in rows:
        cells = []
        for batch, b in row["batches"].items():
            cells += [f"{batch / b['step']:.1f} ({best[batch] / b['step']:.2f} x)", f"{batch / b['eager']:.1f}"]
        if "prefill" in row:
            busy, rest, whole = row["prefill"]
            cells += [f"{busy:.1f} ({rest:.1f})", f"{whole:.1f}", f"{long / whole * 1e3:.0f}"]
        else:
            cells += ["", "", ""]
        lines.append([row["title"], *cells, f"{row['GB']:.2f}", f"{row['peak']:.2f}" if "peak" in row else ""])
    head = []
    for batch in PROMPTS:
        head += [f"batch {batch}: tokens/s (x the faster bf16)", "without a graph"]
    head += [f"prefill of {long}: ms of kernels (without experts)", "ms", "tokens/s"]
    table(["experts", *head, "weights GB", "peak GB"], lines)

    lines = []
    for row in rows:
        for batch, b in row["batches"].items():
            if "parts" not in b:
                continue
            cells = [f"{s * 1e6:.0f} ({s / b['step']:.0%})" for s in b["parts"]]
            lines.append([f"{row['title']}, batch {batch}", f"{b['step'] * 1e6:.0f}", *cells, f"{b['touched']:.1f}"])
    head = ["a step of decoding", "us", *(f"{part}: us" for part in PARTS), "embedding, mask, head, argmax: us"]
    table([*head, "experts touched of a layer"], lines)


def report_kernels(title, model, device, steps, batch, us, how=nullcontext):
    """Print the kernels of a step that takes `us` without the profiler: their number, total time, the longest ones."""
    decoder = Decoder(model, batch, steps, device)
    with how(model):
        decoder.run(decoder.step, 1)
        step = captured(decoder.step, device)
        decoder.run(step, 3)
        kernels, busy = kernels_of(step, device)
    if not kernels:
        print(f"{title}, batch {batch}: the profiler saw no kernels, so there is no account of launch gaps")
        return
    spent = {}
    for event in kernels:
        count, total = spent.get(event.name, (0, 0.0))
        spent[event.name] = count + 1, total + event.time_range.end - event.time_range.start
    gaps = f"{us - busy:.0f} us go between them ({(us - busy) / len(kernels):.2f} us each)"
    print(f"\n{title}, batch {batch}: {us:.0f} us a step, {len(kernels)} kernels, which take {busy:.0f} us; {gaps}\n")
    longest = sorted(spent.items(), key=lambda item: -item[1][1])[:12]
    table(["kernel", "times", "us"], [[f"`{name[:90]}`", str(n), f"{total:.0f}"] for name, (n, total) in longest])


@torch.no_grad()
def benchmark(name, device, steps=64, long=4096, compile=True):
    """Measure and print. long: tokens of the prefill; compile: also with torch.compile, and the kernels of a step."""
    if name not in CONFIGS:
        raise SystemExit(f"--random {name}: choose one of {', '.join(CONFIGS)}")
    if steps < COMPARED or long < 1:
        raise SystemExit(
            f"--steps {steps} --prefill {long}: {COMPARED} steps or more are timed, and a prompt has tokens"
        )
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs are not captured on the default stream
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    prompts = " and ".join(f"{tokens} tokens (batch {batch})" for batch, tokens in PROMPTS.items())
    print(f"{name}, random weights; {where}, {versions}, {datetime.date.today()}")
    print(f"{steps} steps of decoding, after prompts of {prompts}\n", flush=True)
    rows, checks = [], []
    model = build(name, device)
    rows.append(measure("bf16, grouped_mm", model, device, steps))
    rows.append(measure("bf16, batched_mm (generate's choice)", model, device, steps, "batched_mm"))
    del model  # the next one needs its memory
    gc.collect()
    model, quantized = build(name, device, "nvfp4"), {}
    for title, activations in (("W4A4", "nvfp4"), ("W4A16", "bf16")):
        set_activations(model, activations)
        error, limit = check_layer(model.model.layers[0], activations), THRESHOLDS[activations]
        checks.append((f"{title}, experts of layer 0 against the reference: {error:.1e} < {limit}", error < limit))
        rows.append(measure(title, model, device, steps))
        quantized[activations] = rows[-1]
    whole = build(name, device, "bf16", linears=True)
    shown = [(rows[-1], model, nullcontext)]
    rows.append(whole_row := measure(f"W4A16, {LINEARS}", whole, device, steps))
    compile = compile and device == "cuda"
    if compile:
        for title, of in (("W4A16, torch.compile", model), (f"W4A16, {LINEARS}, torch.compile", whole)):
            rows.append(measure(title, of, device, steps, how=compiled))
            shown.append((rows[-1], of, compiled))
    # the profiler makes launches slower: what follows comes after all steps
    for activations, row in quantized.items():
        set_activations(model, activations)
        measure_prefill(row, model, device, long)
    measure_prefill(whole_row, whole, device, long)
    for row, of, how in shown if compile else ():
        for batch, b in row["batches"].items():
            report_kernels(row["title"], of, device, steps, batch, b["step"] * 1e6, how)
    of = shown = None
    del model, whole
    gc.collect()
    measure_prefill(rows[0], build(name, device), device, long)
    report(rows, long)
    for row in rows if device == "cuda" else ():
        # only at batch 1: at 32, attention and the bf16 experts give other bits from run to run, graph or not
        equal = row["batches"][1]["equal"]
        checks.append((f"{row['title']}, {COMPARED} tokens with a graph are those without", equal))
    for text, passed in checks:
        print(f"{text}: {passed}", flush=True)
    assert all(passed for _, passed in checks)

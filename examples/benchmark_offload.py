"""Experts on the CPU beside a GPU: `big_model.py --random NAME`.

Real sizes, random weights (random codes and block scales: nothing is quantized), static cache, batch 1, one CUDA graph
for a step. What a step could take is the 4-bit bytes of the experts that a token touches at the rate at which this
host reads memory; so much is said of what is measured. `layer` of a model: one layer alone, with new routing each time,
for models that are too large for this host.
"""

import datetime
import sys
import time

import torch
from benchmark_cpu import cpu_name
from benchmark_model import COMPARED, CONFIGS, Decoder, captured, without
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, StaticCache

from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.backends import named
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.experts import describe, experts_for
from moe_nvfp4.kernels.cpu import backend as cpu

LAYERS = {  # name: (H, I, E, top_k, copies, so that weights are cold)
    "Qwen3-30B-A3B": (2048, 768, 128, 8, 6),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8, 3),
    "DeepSeek-R1, 64 of 256 experts": (7168, 2048, 64, 8, 3),
}
PROMPTS = (4096, 512, 64)
GRAPH = 24  # calls of a layer in one graph


def randomize(experts):
    """Random codes, block scales of ordinary size, global scales that keep the activations' order of magnitude."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        data = torch.empty(parameter.shape, dtype=parameter.dtype)
        data = named("offload").place(data) if data.numel() >= 2 << 20 else data
        if data.dtype == torch.float32:
            data.fill_(1.0 / (40 * experts.hidden_size**0.5))
        else:
            some = torch.randint(48, 64, (1 << 22,)) if name.endswith("_sf") else torch.randint(0, 256, (1 << 22,))
            flat, some = data.view(-1), some.to(torch.uint8)
            for at in range(0, len(flat), len(some) - 7):
                part = flat[at : at + len(some) - 7]
                part.copy_(some[: len(part)])
        setattr(experts, name, torch.nn.Parameter(data, requires_grad=False))
    return experts


def build(name, device):
    """The model with random weights: 4-bit experts on the CPU, everything else on `device`."""
    config = Qwen3MoeConfig(norm_topk_prob=True, **CONFIGS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    inner = model.model
    for layer in inner.layers:
        source = layer.mlp.experts
        layer.mlp.experts = randomize(experts_for(source, describe(source), MoeNvfp4Config(), "meta")).keep_on_cpu()
    inner.rotary_emb = type(inner.rotary_emb)(config).to(device)
    for module in model.modules():
        if isinstance(module, NVFP4Experts):
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            data.fill_(1) if data.dim() == 1 else data.normal_(std=0.02)
            setattr(module, key, torch.nn.Parameter(data, requires_grad=False))
    inner.embed_tokens.weight.data.normal_()
    return model


def read_rate():
    """GB/s of summing 2 GiB with all threads."""
    numbers = named("offload").place(torch.ones(1 << 28, dtype=torch.int64))
    best = min(timed(numbers.sum) for _ in range(5))
    return numbers.nbytes / best / 1e9


def timed(call):
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def graph_seconds(call, repeats=9):
    """Median seconds of `call` as one CUDA graph (on a CPU: as it is)."""
    call()
    if torch.cuda.is_available():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            call()
        call = graph.replay
    times = sorted(timed(call) for _ in range(repeats + 2))
    return times[len(times) // 2]


def touched_bytes(H, I, top_k):
    """4-bit bytes of the experts of one token in one layer."""
    return top_k * 3 * H * I * 9 / 16


def one_layer(name, device, rate):
    """One token: microseconds of a layer, alone on the CPU and beside the GPU, and what part of the roof that is."""
    H, I, E, top_k, copies = LAYERS[name]
    layers = [randomize(NVFP4Experts(E, H, I, device="meta")).keep_on_cpu() for _ in range(copies)]
    x, p = torch.randn(1, H, device=device).bfloat16(), torch.full((1, top_k), 1 / top_k, device=device)
    route = lambda: torch.rand(1, E, device=device).topk(top_k).indices

    def step():
        for i in range(GRAPH):
            layers[i % copies](x, route(), p)

    routing = graph_seconds(lambda: [route() for _ in range(GRAPH)])
    beside = (graph_seconds(step) - routing) / GRAPH
    ids = [torch.rand(1, E).topk(top_k).indices for _ in range(GRAPH)]
    calls = [cpu.Call(x.cpu(), ids[i], p.cpu(), layers[i % copies].weights, x.cpu()) for i in range(GRAPH)]
    times = sorted(timed(call) for _ in range(4) for call in calls)
    alone, roof = times[len(times) // 2], touched_bytes(H, I, top_k) / rate / 1e9
    print(
        f"| {name} ({H}, {I}, {E}, {top_k}) | {roof * 1e6:.0f} | {alone * 1e6:.0f} ({roof / alone:.0%}) "
        f"| {beside * 1e6:.0f} ({roof / beside:.0%}) |",
        flush=True,
    )


def whole_model(name, device, rate, steps=32):
    config = CONFIGS[name]
    start = time.perf_counter()
    model = build(name, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == device) / 1e9
    print(f"{name}, all experts on the CPU, {weights:.2f} GB of weights on the {device} (made in "
          f"{time.perf_counter() - start:.0f} s)", flush=True)  # fmt: skip
    decoder = Decoder(model, 1, steps, device)
    if device == "cuda":
        tokens = decoder.run(decoder.step, COMPARED)
        equal = torch.equal(tokens, decoder.run(captured(decoder.step, device), COMPARED))
        print(f"{COMPARED} tokens with a graph are those without: {equal}", flush=True)
    sizes = config["hidden_size"], config["moe_intermediate_size"], config["num_experts_per_tok"]
    roof = config["num_hidden_layers"] * touched_bytes(*sizes) / rate / 1e9
    seconds = decoder.time()
    print(
        f"{1 / seconds:.1f} tokens/s, {seconds * 1e3:.1f} ms a step; the experts' bytes take {roof * 1e3:.1f} ms "
        f"({roof / seconds:.0%})",
        flush=True,
    )
    with without("experts", model):
        print(f"a step without experts: {decoder.time() * 1e3:.1f} ms", flush=True)
    for tokens in PROMPTS:
        ids = torch.randint(config["vocab_size"], (1, tokens), device=device)
        cache = lambda ids=ids: StaticCache(config=model.config, max_cache_len=ids.shape[1] + 1)
        call = lambda ids=ids, cache=cache: model(ids, past_key_values=cache(), logits_to_keep=1)
        best = min(timed(call) for _ in range(3))
        print(f"prompt of {tokens} tokens: {best * 1e3:.0f} ms, {tokens / best:.0f} tokens/s", flush=True)


@torch.no_grad()
def benchmark(name):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs are not captured on the default stream
    torch.manual_seed(0)
    rate = read_rate()
    where = f"{torch.cuda.get_device_name()} beside " if device == "cuda" else ""
    print(f"{where}{cpu_name()}, {torch.get_num_threads()} threads, path {cpu.path()}, torch {torch.__version__}")
    print(f"{datetime.date.today()}, host reads {rate:.1f} GB/s\n")
    if name == "layers":
        print("| layer (H, I, E, k), one token | bytes at that rate, us | on the CPU | beside the GPU, in a graph |")
        print("|---|--:|--:|--:|")
        for layer in LAYERS:
            one_layer(layer, device, rate)
    elif name in CONFIGS:
        whole_model(name, device, rate)
    else:
        raise SystemExit(f"--random {name}: choose one of {', '.join((*CONFIGS, 'layers'))}")


if __name__ == "__main__":
    benchmark(sys.argv[1] if len(sys.argv) > 1 else "Qwen3-30B-A3B")

"""Experts on the CPU beside a GPU: `big_model.py --random NAME`.

Real sizes, random weights (random codes and block scales: nothing is quantized), static cache, batch 1, one CUDA graph
per step. The bound for a step is the time to read the 4-bit bytes of a token's experts, at this host's memory rate;
measured times are given with their share of it. `layers` measures single layers with new routing each time, also of
models that are too large for this host. `files` measures one layer in memory and in its files (also without a GPU).
"""

import copy
import datetime
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch
from benchmark_cpu import cpu_name
from benchmark_model import COMPARED, CONFIGS, Decoder, captured, seconds, without
from transformers import AutoModelForCausalLM, CompileConfig, Qwen3MoeConfig, StaticCache

from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.integrations.huggingface import use_cuda_graphs
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.experts import experts_for
from moe_nvfp4.integrations.huggingface.graphs import CACHE
from moe_nvfp4.integrations.huggingface.offload import SharedAhead
from moe_nvfp4.integrations.huggingface.recognise import describe
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.kernels.offload import backend as offload
from moe_nvfp4.kernels.offload.pages import pin, place
from moe_nvfp4.mapped import Matrix

LAYERS = {  # name: (H, I, E, top_k, number of copies, so that weights are cold)
    "Qwen3-30B-A3B": (2048, 768, 128, 8, 6),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8, 3),
    "DeepSeek-R1, 64 of 256 experts": (7168, 2048, 64, 8, 3),
}
PROMPTS = (4096, 512, 128, 64, 32)
GRAPH = 24  # calls of a layer in one graph


def randomize(experts):
    """Random codes, block scales of ordinary size, global scales that keep the activations' order of magnitude."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        data = torch.empty(parameter.shape, dtype=parameter.dtype)
        data = place(data) if data.numel() >= 2 << 20 else data
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


@cache
def numbers():
    return place(torch.ones(1 << 28, dtype=torch.int64))


def read_rate():
    """GB/s of summing 2 GiB with all threads. It changes with time: other users of the machine read too."""
    best = min(timed(numbers().sum) for _ in range(5))
    return numbers().nbytes / best / 1e9


def sleep():
    """Wait for the GPU, if there is one, without a core, which the experts need."""
    if torch.cuda.is_available():
        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()


def timed(call):
    start = time.perf_counter()
    call()
    sleep()
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


def in_files(layer, path):
    """A copy of `layer` whose weights are in a new file at `path`, none of which is in memory yet."""
    matrices, at, E = {}, 0, layer.num_experts
    with open(path, "wb") as f:
        for name, parts in ((layer.up_name, 2), ("down_proj", 1)):
            starts = []
            for parameter in (getattr(layer, name), getattr(layer, f"{name}_sf")):
                starts.append((at, parameter.numel() // E // parts))
                at += f.write(parameter.numpy())
            matrices[name] = [
                [Matrix(*((path, start + (e * parts + i) * size) for start, size in starts)) for i in range(parts)]
                for e in range(E)
            ]
        f.flush()
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return copy.deepcopy(layer).map_files(matrices)


class OneToken:
    """Calls of layers of one model, one token each, with new routing and cold weights."""

    def __init__(self, sizes, device):
        H, _, E, top_k = sizes
        self.x, self.p = torch.randn(1, H, device=device).bfloat16(), torch.full((1, top_k), 1 / top_k, device=device)
        self.route = lambda: torch.rand(1, E, device=device).topk(top_k).indices
        self.device = device

    def beside(self, layers):
        """Seconds per layer, with GRAPH calls in one CUDA graph, without the time of routing."""
        step = lambda: [layers[i % len(layers)](self.x, self.route(), self.p) for i in range(GRAPH)]
        routing = graph_seconds(lambda: [self.route() for _ in range(GRAPH)])
        return (graph_seconds(step) - routing) / GRAPH

    def alone(self, layers, rounds=4):
        """Seconds per layer on the CPU."""
        x, p, ids = self.x.cpu(), self.p.cpu(), [self.route().cpu() for _ in range(GRAPH)]
        weights = [layers[i % len(layers)].weights for i in range(GRAPH)]
        calls = [cpu.Call(x, i, p, w, x.clone()) for i, w in zip(ids, weights, strict=True)]
        times = sorted(timed(call) for _ in range(rounds) for call in calls)
        return times[len(times) // 2]


def random_layers(sizes, copies):
    H, I, E, _ = sizes
    return [randomize(NVFP4Experts(E, H, I, device="meta")).keep_on_cpu() for _ in range(copies)]


def one_layer(name, device, rate):
    """For one token, print the microseconds of a layer on the CPU alone and beside the GPU, and their share of the
    roof."""
    *sizes, copies = LAYERS[name]
    layers, token = random_layers(sizes, copies), OneToken(sizes, device)
    H, I, _, top_k = sizes
    roof, alone, beside = touched_bytes(H, I, top_k) / rate / 1e9, token.alone(layers), token.beside(layers)
    print(
        f"| {name} ({', '.join(map(str, sizes))}) | {roof * 1e6:.0f} | {alone * 1e6:.0f} ({roof / alone:.0%}) "
        f"| {beside * 1e6:.0f} ({roof / beside:.0%}) |",
        flush=True,
    )


def layer_in_files(name, device):
    """The same for weights that stay in files: first from the disk, then from memory."""
    *sizes, copies = LAYERS[name]
    H, I, _, top_k = sizes
    layers, token = random_layers(sizes, copies), OneToken(sizes, device)
    with tempfile.TemporaryDirectory() as folder:
        mapped = [in_files(layer, Path(folder) / str(i)) for i, layer in enumerate(layers)]
        in_memory, first = token.alone(layers), token.alone(mapped, rounds=1)
        x, ids, p = torch.randn(300, H).bfloat16(), torch.randint(sizes[2], (300, top_k)), torch.rand(300, top_k)
        equal = all(torch.equal(a(x, ids, p), b(x, ids, p)) for a, b in zip(mapped, layers, strict=True))
        alone, beside = token.alone(mapped), token.beside(mapped)
        again = token.alone(layers)
        if device == "cuda":
            time_many_tokens(layers, mapped, sizes)
    print(
        f"\n{name}, in files: {first * 1e6:.0f} us from the disk ({touched_bytes(H, I, top_k) / first / 1e9:.1f} "
        f"GB/s), then {alone * 1e6:.0f} us on the CPU ({in_memory * 1e6:.0f} and {again * 1e6:.0f} us in memory), "
        f"{beside * 1e6:.0f} us beside the GPU; 300 tokens give the bits of weights in memory: {equal}",
        flush=True,
    )


def time_many_tokens(layers, mapped, sizes):
    """Print the milliseconds of a layer beside the GPU, by where its weights are and where they are multiplied."""
    H, _, E, top_k = sizes
    print("\n| tokens per expert | in files: on the CPU, ms | copied to the GPU | in memory: on the CPU | copied |")
    print("|--:|--:|--:|--:|--:|")
    for each in (4, 12, 24, 48, 96, 192):
        tokens, cells = each * E // top_k, []
        x, p = torch.randn(tokens, H, device="cuda").bfloat16(), torch.rand(tokens, top_k, device="cuda")
        ids = torch.rand(tokens, E, device="cuda").topk(top_k).indices
        for where, copied in ((mapped, False), (mapped, True), (layers, False), (layers, True)):
            call = lambda x=x, ids=ids, p=p, where=where: [layer(x, ids, p) for layer in where]
            with weights_are_copied(copied):
                cells.append(f"{min(timed(call) for _ in range(4)) / len(where) * 1e3:.2f}")
        print(f"| {each} | {' | '.join(cells)} |", flush=True)


def way_there_and_back(device):
    """Print the time of the way to the CPU and back, by mail and by host functions: for a layer that takes the CPU next
    to nothing, the time beside the GPU minus the time on the CPU alone."""
    sizes = 64, 64, 8, 8
    layers, token = random_layers(sizes, 1), OneToken(sizes, device)
    by_mail, alone = token.beside(layers), token.alone(layers)
    opened, offload._mailbox = offload._mailbox, lambda device: None
    by_function, offload._mailbox = token.beside(layers), opened
    print(f"there and back: {(by_mail - alone) * 1e6:.0f} us, by host functions {(by_function - alone) * 1e6:.0f} us")


class Block(torch.nn.Module):
    """Routed experts, and a shared expert of as many weights in bf16."""

    def __init__(self, experts, device):
        super().__init__()
        H, I = experts.hidden_size, experts.intermediate_size
        linear = partial(torch.nn.Linear, bias=False, dtype=torch.bfloat16, device=device)
        self.experts = experts
        self.shared_experts = torch.nn.Sequential(linear(H, 2 * I), torch.nn.GLU(), linear(I, H))

    def forward(self, x, ids, p):
        return self.experts(x, ids, p) + self.shared_experts(x)


def with_shared_experts(name, device):
    """One token: microseconds of a layer with a shared expert, computed after the CPU's answer and while it works."""
    *sizes, copies = LAYERS[name]
    blocks = [Block(layer, device) for layer in random_layers(sizes, copies)]
    after = OneToken(sizes, device).beside(blocks)
    for block in blocks:
        block.experts.meanwhile = SharedAhead(block, block.shared_experts).start
    beside = OneToken(sizes, device).beside(blocks)
    print(f"{name}, with a shared expert: {after * 1e6:.0f} us, {beside * 1e6:.0f} if it runs while the CPU works")


def copy_rate(layer):
    """GB/s of copies to the GPU from the memory of a layer's weights."""
    codes = layer.weights.w13.codes
    pin(codes, offload._do)
    to = torch.empty_like(codes, device="cuda")
    return codes.nbytes / min(timed(lambda: to.copy_(codes, non_blocking=True)) for _ in range(5)) / 1e9


@contextmanager
def weights_are_copied(copied):
    """Inside the context, weights are copied to the GPU for each call, or never."""
    chosen, offload._better_on_gpu = offload._better_on_gpu, lambda *_: copied
    yield
    offload._better_on_gpu = chosen


def time_prompts(model, vocabulary, device):
    """Print the milliseconds of prompts, with all experts computed on the CPU and with their weights copied to the
    GPU."""
    print("| prompt, tokens | experts on the CPU, ms | copied to the GPU, ms |\n|--:|--:|--:|")
    for tokens in PROMPTS:
        ids, cells = torch.randint(vocabulary, (1, tokens), device=device), []
        # A cache that was used before: in a new one each layer makes tensors, for which the host waits until the GPU
        # has finished all earlier work, so that no weights would be copied ahead.
        past = StaticCache(config=model.config, max_cache_len=tokens + 1)

        def call(ids=ids, past=past):
            past.reset()
            model(ids, **{CACHE: past}, logits_to_keep=1)

        for copied in (False, True):
            with weights_are_copied(copied):
                slow = tokens > 512 and not copied
                cells.append("" if slow else f"{min(timed(call) for _ in range(4)) * 1e3:.0f}")
        print(f"| {tokens} | {' | '.join(cells)} |", flush=True)


class Clock:
    """A streamer that notes when it got each token."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def time_generate(model, vocabulary, device, tokens=48):
    """Print the tokens/s of `generate` with its default cache, and with a static one and plain, captured or compiled
    steps."""
    prompt = torch.randint(vocabulary, (1, 32), device=device)
    model.generation_config.eos_token_id = None
    static, made = {"cache_implementation": "static"}, {}
    for title, how in {
        "default cache": {},
        "static cache": static | {"disable_compile": True},
        "static cache, use_cuda_graphs": static,
        "static cache, CompileConfig(backend='cudagraphs')": static
        | {"compile_config": CompileConfig(backend="cudagraphs", mode=None)},
        "static cache, torch.compile": static,
    }.items():
        torch.compiler.reset()
        vars(model).pop("get_compiled_call", None)
        if title.endswith("use_cuda_graphs"):
            use_cuda_graphs(model)
        clock, compiled = Clock(), compiled_graphs()
        call = partial(model.generate, prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **how)
        try:
            whole = timed(lambda: made.update({title: call(streamer=clock)}))  # noqa: B023, it is called here
        except Exception as error:  # the other ways are measured all the same
            print(f"generate, {title}: {type(error).__name__}: {error}", flush=True)
            continue
        steps = sorted(b - a for a, b in pairwise(clock.times[tokens // 2 :]))
        token = steps[len(steps) // 2]
        print(
            f"generate, {title}: {1 / token:.1f} tokens/s, {token * 1e3:.1f} ms a token; the first {tokens} took "
            f"{whole:.1f} s, with {compiled_graphs() - compiled} graphs compiled",
            flush=True,
        )
    plain, captured_too = made.get("static cache"), made.get("static cache, use_cuda_graphs")
    if plain is not None and captured_too is not None:
        equal = torch.equal(plain, captured_too)
        print(f"use_cuda_graphs gives the tokens of the same cache without it: {equal}", flush=True)


def compiled_graphs():
    """How many graphs torch.compile has made so far: one for a step that it takes whole."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def report_step(title, decoder, bytes_of_token):
    """Print the milliseconds of a step as one CUDA graph, and the share that reading the experts' bytes takes at the
    memory rate measured around it; with a host that spins until all steps are over, or sleeps until each one is."""
    step = captured(decoder.step, decoder.device)
    decoder.run(step, 2)
    for host, one in (("spins", step), ("sleeps", lambda: (step(), sleep()))):
        before, run = read_rate(), partial(decoder.run, one, decoder.steps)
        times = sorted(seconds(run, 1, decoder.device) / decoder.steps for _ in range(3))
        roof = 2 * bytes_of_token / (before + (after := read_rate())) / 1e9
        print(
            f"{title}, the host {host}: {1 / times[1]:.1f} tokens/s, {times[1] * 1e3:.2f} ms a step; it reads "
            f"{before:.0f} GB/s before and {after:.0f} after, the experts' bytes take {roof * 1e3:.1f} ms "
            f"({roof / times[1]:.0%})",
            flush=True,
        )


def whole_model(name, device, steps=32):
    config = CONFIGS[name]
    start = time.perf_counter()
    model = build(name, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == device) / 1e9
    print(f"{name}, all experts on the CPU, {weights:.2f} GB of weights on the {device} (made in "
          f"{time.perf_counter() - start:.0f} s)", flush=True)  # fmt: skip
    sizes = config["hidden_size"], config["moe_intermediate_size"], config["num_experts_per_tok"]
    bytes_of_token = config["num_hidden_layers"] * touched_bytes(*sizes)
    decoder = Decoder(model, 1, steps, device)
    tokens = decoder.run(decoder.step, COMPARED)
    equal = torch.equal(tokens, decoder.run(captured(decoder.step, device), COMPARED))
    print(f"{COMPARED} tokens of one CUDA graph are those without it: {equal}", flush=True)
    all_threads = torch.get_num_threads()
    for threads in (all_threads, max(1, 3 * all_threads // 4), max(1, all_threads // 2)):
        torch.set_num_threads(threads)
        report_step(f"plain, {threads} threads", decoder, bytes_of_token)
    torch.set_num_threads(all_threads)
    with without("experts", model):
        print(f"a step without experts: {decoder.time() * 1e3:.2f} ms", flush=True)
    if device == "cuda":
        layer = model.model.layers[0].mlp.experts
        size, rate = sum(p.nbytes for p in layer.parameters()) * config["num_hidden_layers"], copy_rate(layer)
        print(f"copies to the GPU: {rate:.1f} GB/s, {size / rate / 1e6:.0f} ms for all experts\n")
        time_prompts(model, config["vocab_size"], device)
    time_generate(model, config["vocab_size"], device)
    model.forward, compiled = torch.compile(model.forward, dynamic=False), compiled_graphs()
    waited = timed(lambda: decoder.run(decoder.step, 1))  # a second or two for each layer
    made = compiled_graphs() - compiled
    report_step(f"torch.compile, which made {made} graphs in {waited:.0f} s", decoder, bytes_of_token)


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
        layer_in_files(next(iter(LAYERS)), device)
        if device == "cuda":
            way_there_and_back(device)
            with_shared_experts("DeepSeek-R1, 64 of 256 experts", device)
    elif name == "files":
        layer_in_files(next(iter(LAYERS)), device)
    elif name in CONFIGS:
        whole_model(name, device)
    else:
        raise SystemExit(f"--random {name}: choose one of {', '.join((*CONFIGS, 'layers', 'files'))}")


if __name__ == "__main__":
    benchmark(sys.argv[1] if len(sys.argv) > 1 else "Qwen3-30B-A3B")

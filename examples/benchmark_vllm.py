"""vLLM with our experts against vLLM's own: engines with the same model of random weights.

    python examples/benchmark_vllm.py --layers 2 --batches 1 16 --prefill 256                    # a CPU
    python examples/benchmark_vllm.py --layers 48 --batches 1 32 256 --prompt 32 --tokens 64 --prefill 4096    # a GPU
    python examples/benchmark_vllm.py --layers 48 --engines NVFP4 Marlin --tensor-parallel 2     # two GPUs
    python examples/benchmark_vllm.py --layers 48 --engines CPU offload --batches 1 8    # experts in host memory
    python examples/benchmark_vllm.py --engines NVFP4 --adapters 1 2 4 --batches 1 4 16  # LoRA on experts, by request
    python examples/benchmark_vllm.py --layers 48 --server --batches 1 32 256 --prompt 32 --tokens 64    # over HTTP

Engines are called from Python, in turn. With --server they are a `vllm serve` each, one after the other, which
`vllm bench serve` asks: the HTTP server, the tokenizer and the stream of answers are then part of what is measured.

The shapes are those of Qwen3-30B-A3B; on a CPU the vocabulary is small, so that experts are most of the work. On a CPU
vLLM has no NVFP4 experts of its own; on Hopper they are Marlin's.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

SHAPES = dict(
    hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, intermediate_size=6144,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, norm_topk_prob=True,
)  # fmt: skip
IGNORE = ["lm_head", "*.self_attn*", "*.gate"]
LINEARS_TOO = ["*.gate"]
OPTIONS: dict[str, dict[str, Any]] = {
    "CPU": {"hf_overrides": {"moe_nvfp4": {"cpu_experts": "all"}}},
    "offload": {"cpu_offload_gb": 1000, "cpu_offload_params": {"experts"}},
    "all-NVFP4": {"hf_overrides": {"moe_nvfp4": {"linears": "moe_nvfp4"}}},
    "vLLM-linears": {"hf_overrides": {"moe_nvfp4": {"linears": "vllm"}}},
}
RANK = 16  # of adapters
GIB = 1 << 30
# `vllm serve` and `vllm bench serve`. The command `vllm` reads the metadata of a package that CPU builds do not have.
SERVE = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model")
BENCH = (sys.executable, "-P", "-c", """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
""")  # fmt: skip
START = 1200  # seconds that a server may take until it answers

Point = tuple[str, int, int, int]  # its name, requests at a time, tokens of each prompt, tokens that each decodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=8, help="tokens of each prompt in a batch")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that each request decodes")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the single long prompt")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each batch; over HTTP, requests of each client")
    parser.add_argument("--engines", nargs="+", choices=("bf16", "Marlin", "NVFP4", *OPTIONS),
                        help="NVFP4 are our experts; all-NVFP4: with 4-bit attention and head; vLLM-linears: these by "
                        "vLLM's kernels; CPU: our experts, computed by the CPU; offload: Marlin's, which the "
                        "GPU reads from host memory")  # fmt: skip
    parser.add_argument("--adapters", type=int, nargs="+", default=[], metavar="N", help="NVFP4 with so many adapters "
                        "of experts, of rank 16, too; each request has one, in turn")  # fmt: skip
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share each layer")
    parser.add_argument("--expert-parallel", action="store_true", help="these GPUs split the experts, not each expert")
    parser.add_argument("--server", action="store_true", help="through `vllm serve` and `vllm bench serve`")
    args = parser.parse_args()
    gpu = Path("/dev/nvidia0").exists()  # torch.cuda would start CUDA, and engines could not be forked
    adapters = dict.fromkeys(args.engines or ("bf16", *["Marlin"] * gpu, "NVFP4"), 0)
    adapters |= {f"{n} LoRA": n for n in args.adapters}
    points = [(f"decode, batch {b}", b, args.prompt, args.tokens) for b in args.batches] + [
        (f"prefill, {args.prefill}", 1, args.prefill, 1)
    ]
    with tempfile.TemporaryDirectory() as root:
        (over_http if args.server else in_process)(adapters, points, gpu, args, Path(root))


def in_process(adapters: dict[str, int], points: list[Point], gpu: bool, args: argparse.Namespace, root: Path) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not gpu:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    spread_random_weights()
    engines, chosen = {}, {}
    for name, n in adapters.items():
        print(f"starting {name}; on a GPU vLLM compiles for half a minute", file=sys.stderr, flush=True)
        folder, options = engine(name, n, gpu, args, root)
        engines[name] = LLM(str(folder), skip_tokenizer_init=True, **options)
        chosen[name] = made(n, args.layers, root)

    print(f"{'':24}" + "".join(f"{name:>12}" for name in engines) + f"   tokens/s, best of {args.rounds}")
    for what, batch, prompt, new in points:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds + 1):
            for name, llm in engines.items():
                times[name].append(seconds(llm, batch, prompt, new, chosen[name]))
        done = batch * new if new > 1 else prompt
        print(f"{what:24}" + "".join(f"{done / min(found[1:]):12.1f}" for found in times.values()), flush=True)


def over_http(adapters: dict[str, int], points: list[Point], gpu: bool, args: argparse.Namespace, root: Path) -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers are ended then, too
    os.environ["no_proxy"] = "127.0.0.1"
    plug_in(root / "plug_in")
    first = next(iter(adapters))
    base: dict[str, float] = {}
    for name, n in adapters.items():
        folder, options = engine(name, n, gpu, args, root)
        tokenizer(folder)
        chosen = made(n, args.layers, root)
        if chosen:
            options["lora_modules"] = [f"{path.name}={path}" for path in chosen]
        with server(name, folder, options) as url:
            if name == first:
                print(f"{'':38}{'tokens/s':>12}{f'x {first}':>12}   first token, ms   per token, ms")
            for what, batch, prompt, new in points:
                found = bench(url, folder, batch, prompt, new, args.rounds, chosen)
                rate = found["total_output_tokens" if new > 1 else "total_input_tokens"] / found["duration"]
                each = f"{found['median_tpot_ms']:16.2f}" if new > 1 else f"{'-':>16}"
                print(f"{name:14}{what:24}{rate:12.1f}{rate / base.setdefault(what, rate):12.2f}"
                      f"{found['median_ttft_ms']:18.1f}{each}", flush=True)  # fmt: skip


@contextlib.contextmanager
def server(name: str, folder: Path, options: dict[str, Any]) -> Iterator[str]:
    """The address of a `vllm serve`, once it answers. It is ended with all its processes, whatever happens; after an
    error the end of its log is shown.

    Raises RuntimeError if it ends before it answers, and TimeoutError if it does not answer in START seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    command = [*SERVE, str(folder), "--host", "127.0.0.1", "--port", str(port), *flags(options)]
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            print(f"\rstarting vllm serve of {name}: {waited:.0f} s", end="", file=sys.stderr, flush=True)
            if answers(url):
                break
            if process.poll() is not None:
                raise RuntimeError(f"vllm serve of {name} ended with exit code {process.returncode} before it answered")
            if waited > START:
                raise TimeoutError(f"vllm serve of {name} has not answered {url}/health in {START} s")
            time.sleep(1)
        print(file=sys.stderr)
        yield url
    except Exception:
        print(f"\nlog of vllm serve of {name}, the end:\n{log.read_text(errors='replace')[-20000:]}", file=sys.stderr)
        raise
    finally:
        try:
            process.terminate()
            process.wait(30)
        except subprocess.TimeoutExpired:
            pass  # it is killed
        finally:  # also its processes that it has left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def flags(options: dict[str, Any]) -> list[str]:
    """Options of vLLM's `LLM` as those of `vllm serve`."""
    found = []
    for key, value in options.items():
        key = key.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list | set):
            found += [f"--{key}", *map(str, value)]
        elif value is not None:
            found += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def bench(
    url: str, folder: Path, batch: int, prompt: int, new: int, rounds: int, adapters: Sequence[Path] = ()
) -> dict[str, Any]:
    """What `vllm bench serve` measures with `batch` clients, each of which asks `rounds` times, after a warm-up.

    Raises RuntimeError if a request failed, or had other numbers of tokens.
    """
    n = batch * rounds
    command = [
        *BENCH, "--base-url", url, "--model", str(folder), "--dataset-name", "random",
        "--random-input-len", str(prompt), "--random-output-len", str(new), "--ignore-eos", "--temperature", "0",
        "--num-prompts", str(n), "--max-concurrency", str(batch), "--num-warmups", str(batch),
        "--disable-tqdm", "--save-result", "--result-dir", str(folder), "--result-filename", "result.json",
    ]  # fmt: skip
    if adapters:
        command += ["--lora-modules", *[path.name for path in adapters], "--lora-assignment", "round-robin"]
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = json.loads(result.read_text()) if result.exists() else {}
    counts = [found.get(key) for key in ("completed", "total_input_tokens", "total_output_tokens")]
    if counts != [n, n * prompt, n * new]:
        raise RuntimeError(
            f"{done.stdout.decode(errors='replace')[-3000:]}\nvllm bench serve: exit code {done.returncode}; requests "
            f"that were answered, tokens of their prompts and of the answers: {counts}, not {[n, n * prompt, n * new]}"
        )
    return found


def tokenizer(folder: Path) -> None:
    """Write one in which each token is a word: `vllm bench serve` sends text. One word is long, since vLLM takes
    texts only up to the longest word's characters for each token, without the spaces between."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    names = ["a_long_word", *(f"w{i}" for i in range(1, vocabulary))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def plug_in(folder: Path) -> None:
    """Let all processes of vLLM that are started from here call `spread_random_weights`."""
    said = folder / "benchmark_vllm-0.dist-info"
    said.mkdir(parents=True)
    shutil.copy(__file__, folder / "benchmark_vllm.py")
    (said / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmark_vllm\nVersion: 0\n")
    (said / "entry_points.txt").write_text("[vllm.general_plugins]\nweights = benchmark_vllm:spread_random_weights\n")
    if "VLLM_PLUGINS" in os.environ:  # no others are loaded
        os.environ["VLLM_PLUGINS"] += ",weights"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def made(n: int, layers: int, root: Path) -> list[Path]:
    """n adapters, written where they are not there yet."""
    paths = [root / str(i) for i in range(n)]
    for path in paths:
        if not path.exists():
            adapter(path, layers)
    return paths


def adapter(path: Path, layers: int) -> None:
    """Write an adapter of all experts, of random numbers, as PEFT does."""
    from safetensors.torch import save_file

    E, H, I = (SHAPES[key] for key in ("num_experts", "hidden_size", "moe_intermediate_size"))
    tensors = {}
    for i in range(layers):
        for module, K, N in ((".base_layer", H, 2 * I), ("", I, H)):
            for side, shape in (("A", (RANK * E, K)), ("B", (N, RANK * E))):
                name = f"base_model.model.model.layers.{i}.mlp.experts{module}.lora_{side}.weight"
                tensors[name] = (torch.randn(shape) / K**0.5).bfloat16()
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    said = dict(peft_type="LORA", r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=["experts.gate_up_proj",
                "experts.down_proj"])  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(said))


def engine(name: str, adapters: int, gpu: bool, args: argparse.Namespace, root: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a model, which has a config only, and vLLM's options for it."""
    from transformers import Qwen3MoeConfig

    longest = max(args.prompt + args.tokens, args.prefill + 1, 1024)
    config = Qwen3MoeConfig(
        **SHAPES, vocab_size=151936 if gpu else 1024, num_hidden_layers=args.layers, max_position_embeddings=longest
    )
    config = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16"}
    ignore = LINEARS_TOO if name in ("all-NVFP4", "vLLM-linears") else IGNORE
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ignore}
    ours = name not in ("bf16", "Marlin", "offload")
    quantized = {} if name == "bf16" else {"quantization_config": quantization | {"exclude_modules": ignore}}
    folder = root / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | quantized))

    options: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": GIB}  # several engines share the memory
    if gpu:  # several engines share it
        options = dict(
            gpu_memory_utilization=0.05, kv_cache_memory_bytes=4 * GIB, max_num_seqs=max(args.batches),
            max_num_batched_tokens=8192, compilation_config=dict(cudagraph_capture_sizes=sorted(args.batches)),
            tensor_parallel_size=args.tensor_parallel, enable_expert_parallel=args.expert_parallel,
        )  # fmt: skip
    if adapters:
        options |= dict(enable_lora=True, max_loras=adapters, max_lora_rank=RANK, lora_target_modules=["experts"])
    return folder, dict(
        quantization="moe_nvfp4" if ours else None, load_format="dummy", dtype="bfloat16", max_model_len=longest,
        enable_prefix_caching=False, **options, **OPTIONS.get(name, {}),
    )  # fmt: skip


def spread_random_weights() -> None:
    """Replace vLLM's random weights, which leave 4-bit codes uninitialized: activations must be finite, and tokens must
    reach all experts."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def fill(loader: object, model: torch.nn.Module, model_config: object) -> None:
        for name, p in model.named_parameters():
            if "scale" in name and p.dtype == torch.float32:
                p.data.fill_(1 / 256)
            elif p.dtype in (torch.uint8, torch.float8_e4m3fn):  # codes; block scales of 1
                p.data.random_(0, 256) if p.dtype == torch.uint8 else p.data.view(torch.uint8).fill_(0x38)
            else:
                p.data.fill_(1) if p.dim() == 1 else p.data.normal_(0, 0.02)

    DummyModelLoader.load_weights = fill


def seconds(llm: Any, batch: int, prompt: int, new: int, adapters: Sequence[Path] = ()) -> float:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    requests = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(adapters)]
    chosen = [requests[i % len(requests)] for i in range(batch)] if requests else None
    prompts = [{"prompt_token_ids": [5 + (i * 37 + j * 11) % 1000 for j in range(prompt)]} for i in range(batch)]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False, lora_request=chosen)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

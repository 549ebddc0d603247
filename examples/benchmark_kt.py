"""4-bit experts on the CPU against ktransformers' kt-kernel: one layer of Qwen3-30B-A3B's shape.

pip install --no-deps kt-kernel     # it asks for one version of torch, and runs with others
python examples/benchmark_kt.py [--seconds 1.0] [--tokens 1,16,128,1024] [--threads N] [--methods NVFP4,AMXINT4]

NVFP4 is the same layer: its codes, and its two scales multiplied and rounded to bf16. kt-kernel runs it with AVX2 only.
AMXINT4 is its own format for CPUs with AMX, integers of 4 bits with a scale for each row. The difference from ours is
printed. Times are medians and minima of time slices that alternate.
"""

import argparse
import time

import torch
from benchmark_cpu import SHAPES, SLICES, cpu_name, nvfp4_layers

from moe_nvfp4.format import dequantize
from moe_nvfp4.kernels.cpu import backend as cpu


def matrices(layer):
    """{"gate", "up", "down": (codes [E, N, K/2], sf [E, N, K/16], global_scale [E])}, sf as e4m3."""
    w, I = layer.weights, layer.weights.intermediate_size
    w13, w2 = w.w13, w.w2
    found = {
        "gate": (w13.codes[:, :I], w13.sf[:, :I], w13.gate_scale),
        "up": (w13.codes[:, I:], w13.sf[:, I:], w13.global_scale),
        "down": (w2.codes, w2.sf, w2.global_scale),
    }
    return {part: (codes, sf.view(torch.float8_e4m3fn), scale) for part, (codes, sf, scale) in found.items()}


class Layer:
    """kt-kernel's layer with the weights of ours. Its KTMoEWrapper, which needs a GPU, calls it like this."""

    def __init__(self, ours, method, pool, top_k, most):
        import kt_kernel

        moe, w = kt_kernel.kt_kernel_ext.moe, ours.weights
        E, H, I = w.num_experts, w.hidden_size, w.intermediate_size
        self.pool, on_gpu, order = pool, torch.zeros(E, dtype=torch.bool), torch.arange(E)
        config = moe.MOEConfig(E, top_k, H, I, on_gpu.data_ptr())
        config.pool, config.max_len = pool.backend_, most + -most % 64  # its buffers have whole tiles
        parts = matrices(ours)
        if method == "NVFP4":
            config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, 16, False
            kept = [on_gpu]
            for part, (codes, sf, scale) in parts.items():
                scales = (sf.float() * scale[:, None, None]).bfloat16()
                kept += [codes := codes.contiguous(), scales]
                setattr(config, f"{part}_projs", [[t.data_ptr() for t in codes]])
                setattr(config, f"{part}_scales", [[t.data_ptr() for t in scales]])
            self.moe = moe.AVX2MXFP4_MOE(config)  # its AMX loop has no blocks of 16
        else:
            kept = [on_gpu]
            for part, tensors in parts.items():
                kept.append(torch.stack([dequantize(*matrix).bfloat16() for matrix in zip(*tensors, strict=True)]))
                setattr(config, f"{part}_proj", kept[-1].data_ptr())
            self.moe = {"AMXINT4": moe.AMXInt4_MOE, "AMXINT8": moe.AMXInt8_MOE}[method](config)
        pool.submit(self.moe.load_weights_task(order.data_ptr()))
        pool.sync()
        self.kept, self.y = kept, torch.empty(most, H, dtype=torch.bfloat16)

    def __call__(self, x, ids, p):
        """x bf16 [T, H], ids int64 [T, top_k], p fp32 [T, top_k] -> bf16 [T, H], overwritten by the next call."""
        T, y = torch.tensor([len(x)], dtype=torch.int32), self.y[: len(x)]
        pointers = [t.data_ptr() for t in (ids, p, x, y)]
        self.pool.submit(self.moe.forward_task(T.data_ptr(), ids.shape[1], *pointers, False))
        self.pool.sync()
        return y


def thread_pool(threads):
    try:
        from kt_kernel import kt_kernel_ext
    except ImportError as error:
        raise SystemExit(f"skipped: kt-kernel cannot be imported ({error}): pip install --no-deps kt-kernel") from None
    config = kt_kernel_ext.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    return kt_kernel_ext.CPUInfer(config)


def times_us(calls, seconds):
    """{name: call} -> {name: (median, minimum) microseconds of call(0), call(1), ...}, in time slices."""
    times = {name: [] for name in calls}
    for _ in range(SLICES):
        for name, call in calls.items():
            call(0)
            stop, enough = time.perf_counter() + seconds / SLICES, 1 + len(times[name])
            while len(times[name]) < enough or time.perf_counter() < stop:
                start = time.perf_counter()
                call(len(times[name]))
                times[name].append(time.perf_counter() - start)
    return {name: (sorted(t)[len(t) // 2] * 1e6, min(t) * 1e6) for name, t in times.items()}


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--tokens", default="1,16,128,1024")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--methods", default="NVFP4,AMXINT4")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    title, H, I, E, top_k = SHAPES["qwen"]
    (ours, *_), counts = nvfp4_layers("qwen"), [int(T) for T in arguments.tokens.split(",")]
    pool = thread_pool(arguments.threads)
    theirs = {method: Layer(ours, method, pool, top_k, max(counts)) for method in arguments.methods.split(",")}
    print(f"{cpu_name()}, {arguments.threads} threads, path {cpu.path()}; {title} ({H}, {I}, {E}, {top_k})\n")
    print("| T | layer | median us | minimum us | median / ours | difference |\n|--:|---|--:|--:|--:|--:|")
    for T in counts:
        ids = [torch.rand(T, E).topk(top_k).indices for _ in range(16)]
        x, p = torch.randn(T, H).bfloat16(), torch.full((T, top_k), 1 / top_k)
        y, p16 = ours(x, ids[0], p.bfloat16()).float(), p.bfloat16()
        calls = {"ours": lambda i: ours(x, ids[i % 16], p16)}  # noqa: B023
        calls |= {m: lambda i, layer=layer: layer(x, ids[i % 16], p) for m, layer in theirs.items()}  # noqa: B023
        us = times_us(calls, arguments.seconds)
        for name, (median, least) in us.items():
            difference = 0.0 if name == "ours" else float((theirs[name](x, ids[0], p).float() - y).norm() / y.norm())
            assert name != "NVFP4" or difference < 0.03, f"the two layers differ by {difference:.3f}"
            ratio = median / us["ours"][0]
            print(f"| {T} | {name} | {median:.0f} | {least:.0f} | {ratio:.2f} | {difference:.3f} |", flush=True)


if __name__ == "__main__":
    main()

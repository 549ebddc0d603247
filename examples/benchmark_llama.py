"""4-bit experts on the CPU against llama.cpp's, on the same NVFP4 weights: one layer of Qwen3-30B-A3B's shape.

pip install llama-cpp-python        # compiles llama.cpp with this machine's instructions
python examples/benchmark_llama.py [--seconds 1.0] [--tokens 1,128] [--threads N]

llama.cpp's operators are called as its model graphs call them: mul_mat_id for gate, up and down, swiglu_split, the
weighted sum of the slots. Its NVFP4 holds our codes and block scales in another order, so both compute the same layer;
this is checked first. llama.cpp rounds activations to 8 bits (Q8_0), ours stay bf16.
"""

import argparse
import ctypes
from importlib.util import find_spec
from pathlib import Path

import torch
from benchmark_cpu import SHAPES, cpu_name, median_us, nvfp4_layers

from moe_nvfp4.kernels.cpu import backend as cpu

F32, I32, NVFP4 = 0, 26, 40  # enum ggml_type


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def load_ggml():
    """{function name: function}, from the libraries of llama-cpp-python."""
    spec = find_spec("llama_cpp")
    if spec is None:
        raise SystemExit("skipped: llama-cpp-python is not installed (pip install llama-cpp-python)")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    base, backend = (
        ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
    )
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    signatures = {  # name: (result, arguments)
        "ggml_init": (pointer, [InitParams]),
        "ggml_new_tensor_3d": (pointer, [pointer, ctypes.c_int, number, number, number]),
        "ggml_get_data": (pointer, [pointer]),
        "ggml_nbytes": (size, [pointer]),
        "ggml_mul_mat_id": (pointer, [pointer] * 4),
        "ggml_swiglu_split": (pointer, [pointer] * 3),
        "ggml_mul": (pointer, [pointer] * 3),
        "ggml_add": (pointer, [pointer] * 3),
        "ggml_scale": (pointer, [pointer, pointer, ctypes.c_float]),
        "ggml_view_2d": (pointer, [pointer, pointer, number, number, size, size]),
        "ggml_new_graph": (pointer, [pointer]),
        "ggml_build_forward_expand": (None, [pointer, pointer]),
        "ggml_cpu_init": (None, []),
        "ggml_graph_compute_with_ctx": (ctypes.c_int, [pointer, pointer, ctypes.c_int]),
    }
    ggml = {}
    for name, (result, arguments) in signatures.items():
        function = getattr(base if hasattr(base, name) else backend, name)
        function.restype, function.argtypes = result, arguments
        ggml[name.removeprefix("ggml_")] = function
    ggml["cpu_init"]()
    return ggml


def ggml_bytes(codes, sf):
    """[E, N, K/2], [E, N, K/16] -> blocks of 64: 4 scales, 32 bytes; in each 16, elements j and j + 8 share a byte."""
    E, N, half = codes.shape
    nibbles = torch.stack([codes & 15, codes >> 4], -1).view(E, N, half // 32, 4, 2, 8)
    packed = nibbles[..., 0, :] | nibbles[..., 1, :] << 4
    return torch.cat([sf.view(E, N, half // 32, 4), packed.flatten(-2)], -1).contiguous()


class Layer:
    """One layer of ours as a graph of llama.cpp for T tokens."""

    def __init__(self, ggml, ours, T, top_k, threads):
        self.ggml, self.threads, w = ggml, threads, ours.weights
        E, H, I = w.num_experts, w.hidden_size, w.intermediate_size
        work = (64 << 20) + T * top_k * (4 * I + 4 * H) * 8
        self.context = ctx = ggml["init"](InitParams(E * 3 * H * I * 9 // 16 + work, None, False))
        self.kept = []

        def tensor(kind, *shape, data=None):
            t = ggml["new_tensor_3d"](ctx, kind, *shape)
            if data is not None:
                assert ggml["nbytes"](t) == data.nbytes
                ctypes.memmove(ggml["get_data"](t), data.data_ptr(), data.nbytes)
            return t

        def weight(codes, sf, K):
            return tensor(NVFP4, K, codes.shape[1], E, data=ggml_bytes(codes, sf))

        def matmul(codes, sf, K, x, scale):
            return ggml["scale"](ctx, ggml["mul_mat_id"](ctx, weight(codes, sf, K), x, self.ids), float(scale[0]))

        self.x, self.ids, self.p = tensor(F32, H, 1, T), tensor(I32, top_k, T, 1), tensor(F32, 1, top_k, T)
        gate = matmul(w.w13.codes[:, :I], w.w13.sf[:, :I], H, self.x, w.w13.gate_scale)
        up = matmul(w.w13.codes[:, I:], w.w13.sf[:, I:], H, self.x, w.w13.global_scale)
        down = matmul(w.w2.codes, w.w2.sf, I, ggml["swiglu_split"](ctx, gate, up), w.w2.global_scale)
        down = ggml["mul"](ctx, down, self.p)
        slots = [ggml["view_2d"](ctx, down, H, T, 4 * H * top_k, 4 * H * j) for j in range(top_k)]
        self.y = slots[0]
        for slot in slots[1:]:
            self.y = ggml["add"](ctx, self.y, slot)
        self.graph, self.shape = ggml["new_graph"](ctx), (T, H)
        ggml["build_forward_expand"](self.graph, self.y)

    def __call__(self, x, ids, p):
        for t, data in ((self.x, x.float()), (self.ids, ids.int()), (self.p, p.float())):
            ctypes.memmove(self.ggml["get_data"](t), data.data_ptr(), data.nbytes)
        self.ggml["graph_compute_with_ctx"](self.context, self.graph, self.threads)

    def result(self):
        T, H = self.shape
        return torch.tensor((ctypes.c_float * (T * H)).from_address(self.ggml["get_data"](self.y))).view(T, H)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--tokens", default="1,128")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    title, H, I, E, top_k = SHAPES["qwen"]
    ggml, (ours, *_) = load_ggml(), nvfp4_layers("qwen")
    print(f"{cpu_name()}, {arguments.threads} threads, path {cpu.path()}; {title} ({H}, {I}, {E}, {top_k})\n")
    print("| T | ours us | llama.cpp us | ratio |\n|--:|--:|--:|--:|")
    for T in map(int, arguments.tokens.split(",")):
        theirs = Layer(ggml, ours, T, top_k, arguments.threads)
        ids = [torch.rand(T, E).topk(top_k).indices for _ in range(16)]
        x, p = torch.randn(T, H).bfloat16(), torch.full((T, top_k), 1 / top_k).bfloat16()
        y = ours(x, ids[0], p).float()
        theirs(x, ids[0], p)
        error = float((theirs.result() - y).norm() / y.norm())
        assert error < 0.03, f"the two layers differ by {error:.3f}"
        us = [median_us(lambda i: layer(x, ids[i % 16], p), arguments.seconds) for layer in (ours, theirs)]  # noqa: B023
        print(f"| {T} | {us[0]:.0f} | {us[1]:.0f} | {us[1] / us[0]:.1f}x |", flush=True)


if __name__ == "__main__":
    main()

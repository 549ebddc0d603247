"""Functions that give the cases to known implementations. Each imports what it calls when it is called.

Those that hold no NVFP4 experts themselves get dense weights in bf16: of the library that dequantized them, or, for the
experts of transformers, the exact values rounded once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4 import backends
from moe_nvfp4.conformance.expected import weights
from moe_nvfp4.conformance.vectors import Given
from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.weights import Gate

Function = Callable[[Given], Tensor]


class Adapter(NamedTuple):
    """packages: distributions that it calls, whose versions are shown; one that is missing is why it is not run.
    refuses: why it does not run on a device, or None."""

    function: Function
    packages: tuple[str, ...] = ()
    refuses: Callable[[torch.device], str | None] = lambda device: None

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        if missing := [name for name, version in self.versions().items() if version is None]:
            return f"not installed: pip install {' '.join(missing)}"
        return self.refuses(device)

    def versions(self) -> dict[str, str | None]:
        return {name: _version(name) for name in self.packages}


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):  # vLLM's build for CPUs has a name of its own
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


# ---- this library --------------------------------------------------------------------------------


def _backend(name: str) -> Adapter:
    backend = backends.named(name)

    def run(given: Given) -> Tensor:
        layer = _layer(given)
        problem, device = layer._problem(given.x.dtype, True)
        if reason := backend.unsupported(backends.Device.of(device), problem):
            raise NotImplementedError(reason)
        before = os.environ.get("MOE_NVFP4_BACKEND")
        os.environ["MOE_NVFP4_BACKEND"] = name
        try:
            return layer(given.x, given.ids, given.routing)
        finally:
            os.environ.pop("MOE_NVFP4_BACKEND")
            if before is not None:
                os.environ["MOE_NVFP4_BACKEND"] = before

    return Adapter(run, (), lambda device: backend.unavailable(backends.Device.of(device)))


def _layer(given: Given) -> NVFP4Experts:
    E, H, half = given.codes2.shape
    gate, static = Gate(**given.gate), given.x_scale is not None
    bias = None if given.bias2 is None else given.bias2.dtype
    layer = NVFP4Experts(E, H, 2 * half, gate, "nvfp4" if static else "bf16", bias, static, given.x.device)
    tensors = {
        layer.up_name: given.codes13, f"{layer.up_name}_sf": given.sf13, f"{layer.up_name}_bias": given.bias13,
        "gate_proj_global_scale": given.gate_scale, "up_proj_global_scale": given.up_scale,
        "down_proj": given.codes2, "down_proj_sf": given.sf2, "down_proj_global_scale": given.down_scale,
        "down_proj_bias": given.bias2, "up_proj_input_scale": given.x_scale, "down_proj_input_scale": given.h_scale,
    }  # fmt: skip
    layer.load_state_dict({name: tensor for name, tensor in tensors.items() if tensor is not None})
    return layer


# ---- transformers --------------------------------------------------------------------------------


def _transformers(implementation: str) -> Function:
    """The experts classes of transformers, by one of its implementations. It has no ids of -1: the id of an expert of
    another rank is num_experts, with a weight of 0."""

    def run(given: Given) -> Tensor:
        _only_w4a16(given)
        w13, w2 = (t.to(given.x) for t in _exact(given))
        module = _experts_class(given, w13, w2)
        module.config._experts_implementation = implementation
        absent = given.ids < 0
        module._is_expert_parallel = bool(absent.any())
        ids, routing = given.ids.masked_fill(absent, len(w2)), given.routing.masked_fill(absent, 0)
        return module(given.x, ids, routing)

    return run


def _experts_class(given: Given, w13: Tensor, w2: Tensor) -> Any:
    """A module of the class whose gate is that of the case."""
    from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    E, H, I = w2.shape
    sizes: dict[str, Any] = dict(hidden_size=H, num_local_experts=E, num_experts=E, n_routed_experts=E)
    match given.gate:
        case {"kind": "silu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}:
            module: Any = GptOssExperts(GptOssConfig(**sizes, intermediate_size=I))
            rows = torch.stack([torch.arange(I), torch.arange(I) + I], dim=1).flatten()  # gate and up in turns
            values = dict(gate_up_proj=w13[:, rows].mT, down_proj=w2.mT, gate_up_proj_bias=_bias(given)[0][:, rows],
                          down_proj_bias=_bias(given)[1])  # fmt: skip
        case {"kind": "silu" | "gelu_tanh" as kind, **rest} if not rest and given.bias2 is None:
            act = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[kind]
            module = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, moe_intermediate_size=I, hidden_act=act))
            values = dict(gate_up_proj=w13, down_proj=w2)
        case {"kind": "relu2"} if given.bias2 is None:
            config = NemotronHConfig(**sizes, moe_intermediate_size=I, mlp_hidden_act="relu2")
            module = NemotronHExperts(config)
            values = dict(up_proj=w13, down_proj=w2)
        case _:
            raise NotImplementedError("the classes that were tried have not this gate with these biases")
    for name, value in values.items():
        setattr(module, name, torch.nn.Parameter(value.to(given.x).contiguous(), requires_grad=False))
    return module


def _exact(given: Given) -> tuple[Tensor, Tensor]:
    """The weights in float64, by the loop of `expected`."""
    found = []
    for codes, sf, *scales in (
        (given.codes13, given.sf13, given.gate_scale, given.up_scale), (given.codes2, given.sf2, given.down_scale)
    ):  # fmt: skip
        present = [s.cpu().numpy() for s in scales if s is not None]
        experts = []
        for e, (c, s) in enumerate(zip(codes.cpu().numpy(), sf.cpu().numpy(), strict=True)):
            pieces = [values for _, values in weights(c, s, [scale[e] for scale in present])]
            experts.append(torch.from_numpy(np.concatenate(pieces)))
        found.append(torch.stack(experts))
    return found[0], found[1]


def _bias(given: Given) -> tuple[Tensor, Tensor]:
    if given.bias13 is None or given.bias2 is None:
        return given.x.new_zeros(given.codes13.shape[:2]), given.x.new_zeros(given.codes2.shape[:2])
    return given.bias13, given.bias2


def _only_w4a16(given: Given) -> None:
    if given.x_scale is not None:
        raise NotImplementedError("dense weights: activations are not quantized")


# ---- libraries that dequantize -------------------------------------------------------------------


def _dense(given: Given, w13: Tensor, w2: Tensor) -> Tensor:
    """The layer with dense weights in bf16, one expert after the other, in plain torch; sums in fp32."""
    y = torch.zeros(given.x.shape, dtype=torch.float32, device=given.x.device)
    bias, gate = _bias(given), Gate(**given.gate)
    for e in range(len(w2)):
        rows, slots = (given.ids == e).nonzero(as_tuple=True)
        if not len(rows):
            continue
        h = gate(F.linear(given.x[rows], w13[e], bias[0][e]).float()).to(given.x.dtype)
        out = F.linear(h, w2[e], bias[1][e]).float()
        y.index_add_(0, rows, out * given.routing[rows, slots, None])
    return y


def _by_matrix(dequantize: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Function:
    """With dequantize(codes [N, K/2], sf e4m3 [N, K/16], global scale 0-d) -> bf16 [N, K] of each matrix."""

    def run(given: Given) -> Tensor:
        _only_w4a16(given)
        gated = given.gate_scale is not None
        scales = [given.gate_scale, given.up_scale] if gated else [given.up_scale]

        def dense(codes: Tensor, sf: Tensor, scales: Iterable[Any]) -> Tensor:
            halves = zip(codes.chunk(len(list(scales)), 1), sf.chunk(len(list(scales)), 1), scales, strict=True)
            return torch.cat([
                torch.stack([dequantize(c, s.view(torch.float8_e4m3fn), g) for c, s, g in zip(*half, strict=True)])
                for half in halves
            ], dim=1)  # fmt: skip

        return _dense(
            given, dense(given.codes13, given.sf13, scales), dense(given.codes2, given.sf2, [given.down_scale])
        )

    return run


def _compressed_tensors(codes: Tensor, sf: Tensor, scale: Tensor) -> Tensor:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    state = {"weight_packed": codes, "weight_scale": sf, "weight_global_scale": (1 / scale).reshape(1)}
    return NVFP4PackedCompressor.decompress(state, scheme)["weight"].to(torch.bfloat16)


def _torchao(codes: Tensor, sf: Tensor, scale: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor(codes, sf, 16, torch.bfloat16, per_tensor_scale=scale).dequantize(torch.bfloat16)


# ---- vLLM ----------------------------------------------------------------------------------------


def _vllm(given: Given) -> Tensor:
    """vLLM's dequantization and unquantized experts; with gate's global scale for up, as its loader of NVFP4 experts
    has it (w13_weight_scale_2[:, 0])."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    _only_w4a16(given)
    scale13 = given.up_scale if given.gate_scale is None else given.gate_scale
    w13, w2 = (
        dequantize_to_dtype(codes, sf.view(torch.float8_e4m3fn), scale, torch.bfloat16, 16, swizzle=False)
        for codes, sf, scale in ((given.codes13, given.sf13, scale13), (given.codes2, given.sf2, given.down_scale))
    )
    run = _vllm_on_cpu if given.x.device.type == "cpu" else _vllm_on_gpu
    return run(given, w13, w2)


def _vllm_on_cpu(given: Given, w13: Tensor, w2: Tensor) -> Tensor:
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    match given.gate:
        case {"kind": "silu" | "gelu_tanh" as act, **rest} if not rest:
            pass
        case {"kind": "silu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}:
            act = "swigluoai"
            I = w13.shape[1] // 2
            rows = torch.stack([torch.arange(I), torch.arange(I) + I], dim=1).flatten()  # gate and up in turns
            w13, given = w13[:, rows].contiguous(), given._replace(bias13=_bias(given)[0][:, rows].contiguous())
        case _:
            raise NotImplementedError("its experts on a CPU have not this gate")
    H, I = w2.shape[1:]
    if H % 32 or I % 32:
        raise NotImplementedError("its experts on a CPU take multiples of 32")
    if (given.ids < 0).any():
        raise NotImplementedError("its experts on a CPU have no expert parallelism, and no ids of -1")
    w13, w2 = (cpu_prepack_moe_weight(w, "vec") for w in (w13, w2))
    y = torch.empty_like(given.x)
    cpu_fused_moe(y, given.x, w13, w2, given.bias13, given.bias2, given.routing, given.ids.int(), act, "vec")
    return y


def _vllm_on_gpu(given: Given, w13: Tensor, w2: Tensor) -> Tensor:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    if given.gate != {"kind": "silu"} or given.bias2 is not None:
        raise NotImplementedError("only silu without biases was connected")
    if (given.ids < 0).any():
        raise NotImplementedError("absent experts are named by its expert_map, which was not connected")
    return fused_experts(given.x, w13, w2, given.routing, given.ids.int(), activation=MoEActivation.SILU)


ADAPTERS: dict[str, Adapter] = {
    **{f"moe_nvfp4, {backend.name}": _backend(backend.name) for backend in backends.BACKENDS},
    **{
        f"transformers, {name}, dense weights": Adapter(_transformers(name), ("transformers",))
        for name in ("eager", "batched_mm", "grouped_mm")
    },
    "compressed-tensors' dequantization, torch": Adapter(_by_matrix(_compressed_tensors), ("compressed-tensors",)),
    "torchao's dequantization, torch": Adapter(_by_matrix(_torchao), ("torchao",)),
    "vLLM's dequantization and experts": Adapter(_vllm, ("vllm",)),
}

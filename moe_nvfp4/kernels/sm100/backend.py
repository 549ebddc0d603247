"""The Blackwell backend (sm_100a, sm_103a): NVFP4 weights times NVFP4 or bf16 rows on the tensor cores.

The three stages of `moe_nvfp4.reference` with the same signatures and the same numerics, up to the
order of the fp32 sums inside a GEMM and the last bits of exp in the gate:

    quantize_rows   one kernel: gather, quantize, swizzle the scales
    gemm1_swiglu    one kernel: both projections of all experts, gate, requantization
    gemm2_combine   two kernels: the GEMM into one row per assignment, and their weighted sum

`experts` does routing and all stages. GEMM 2's rows are fp32, or bf16 if they would exceed
`EXACT_BYTES`. `linear` is the GEMM of a single expert, without gate and sum.

bf16 rows are gathered and interleaved (`rows.InterleaveRows`) before each GEMM; in `experts`, GEMM 1 writes h
interleaved. For few rows K is split into parts (`model.plan_gemm`): a further kernel (`SumParts`) adds up those of
GEMM 1 and applies the gate, and the weighted sum adds up those of GEMM 2.

Nothing waits for the device and no shape depends on data, so the stages can be captured in a CUDA
graph. Weights are in the layout of `sm100.pack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.common.ahead import MAX_ROWS, planned_tokens
from moe_nvfp4.kernels.common.cute import CuteKernels
from moe_nvfp4.kernels.common.tensors import (
    aligned,
    capability,
    expert_ids,
    floating,
    lasting,
    multiprocessors,
    settle,
    warn_unpacked,
)
from moe_nvfp4.kernels.sm100.config import (
    EIGHT,
    EXACT_BYTES,
    SF_TILE,
    CombineConfig,
    GemmConfig,
    InterleaveConfig,
    QuantizeConfig,
    RouteConfig,
    SumConfig,
    TileShape,
    interleaved_width,
)
from moe_nvfp4.kernels.sm100.model import plan_gemm
from moe_nvfp4.kernels.sm100.pack import pack_codes, pack_sf, pad_rows, parts
from moe_nvfp4.routing import Groups, Rows, check_ids, group_by_expert
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Matrices

ARCHITECTURES = {(10, 0): "sm_100a", (10, 3): "sm_103a"}
OUT_DTYPES = ("bfloat16", "float16", "float32")
# Whatever a kernel is compiled for
Config = RouteConfig | QuantizeConfig | InterleaveConfig | GemmConfig | SumConfig | CombineConfig


# ---- the stages ----------------------------------------------------------------------------------


def quantize_rows(
    x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups, four_over_six: bool = False
) -> Rows:
    """bf16/fp16/fp32 x [*, K] -> NVFP4 rows, as `reference.quantize_rows`; padding rows of sf are not written."""
    R, E, K = groups.num_rows, groups.num_experts, x.shape[-1]
    _check_multiple_of_16(K)
    codes = x.new_empty(R, K // 2, dtype=torch.uint8)
    sf = x.new_empty(nvfp4.grouped_sf_rows(R, E) * (-(-K // 64) * 4), dtype=torch.uint8)
    row_scale = x.new_empty(R, dtype=torch.float32)
    if R:
        config = QuantizeConfig(E, K, _name(x.dtype), index is not None, scale is not None, four_over_six)
        index = groups.order if index is None else index
        scale = row_scale if scale is None else scale
        arguments = (aligned(x), index, scale, groups.offsets, codes.view(torch.uint32), sf, row_scale)
        launch(config, arguments)
    return Rows(codes, sf, row_scale)


def gemm1_swiglu(rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
    """h = gate(rows · w13ᵀ), as `reference.gemm1_swiglu`: NVFP4 with a static `h_scale`, else `dtype`."""
    return _gemm1(_operand(rows, groups), weights, groups, dtype, _name(dtype))


def gemm2_combine(h: Rows, weights: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """y[t] = sum over slots j of top_k_weights[t, j] * (h · w2ᵀ), in `dtype` [T, H]; the same bits every time."""
    return _gemm2(_operand(h, groups), weights, groups, top_k_weights, dtype)


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """The whole layer: x [T, H], ids and weights [T, top_k] -> [T, H] in x's dtype."""
    w, (T, top_k) = weights, top_k_index.shape
    if T == 0 or top_k == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    most = max(1, MAX_ROWS // top_k)
    if T > most:
        parts = (t.split(most) for t in (x, top_k_index, top_k_weights))
        return torch.cat([experts(rows, ids, p, w) for rows, ids, p in zip(*parts, strict=True)])
    groups, token = route(top_k_index, w.num_experts)
    if w.activations == "bf16":
        rows = _operand(Rows(x, index=token), groups)
        return _gemm2(_gemm1(rows, w, groups, x.dtype, "interleaved"), w, groups, top_k_weights, x.dtype)
    rows = quantize_rows(x, token, w.x_scale, groups, w.four_over_six)
    h = gemm1_swiglu(rows, w, groups, x.dtype)
    if not h.is_nvfp4:
        h = quantize_rows(h.values, None, None, groups, w.four_over_six)
    return gemm2_combine(h, w, groups, top_k_weights, x.dtype)


def route(top_k_index: Tensor, num_experts: int) -> tuple[Groups, Tensor]:
    """(groups as of `routing.group_by_expert`, the token of each row), by one kernel.

    An id outside the legal range prints the rule and traps, and the next synchronization raises.
    """
    from moe_nvfp4.kernels.common.route import route_shape

    (T, top_k), E = top_k_index.shape, num_experts
    if E > 1024:
        groups = group_by_expert(top_k_index, E)
        return groups, groups.token
    check_ids(top_k_index)
    ids = expert_ids(top_k_index)
    sizes = (T * top_k,) * 3 + (E + 1, 1)
    parts = ids.new_empty(sum(sizes), dtype=torch.int32).split_with_sizes(sizes)
    order, position, token, offsets, _ = parts
    config = RouteConfig(str(ids.dtype).removeprefix("torch."), *route_shape(planned_tokens(T, top_k) * top_k))
    launch(config, (ids, None, order, position, token, offsets, parts[-1], None, None, None, None, E, top_k))
    return Groups(order, offsets, top_k, position), token


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """x [T, K] -> [T, N] in x's dtype, as `reference.linear`: a single expert's product, in natural order."""
    w, m, T = weights, weights.matrix.stacked(), x.shape[0]
    out, y = _name(x.dtype), x.new_empty(T, m.N)
    if T == 0:
        return y
    groups = Groups(torch.empty(T, dtype=torch.int32, device=x.device), lasting(_one_group, x.device, T), 1)
    rows = quantize_rows(x, None, w.input_scale, groups, w.four_over_six) if w.quantized else Rows(x)
    rows, (codes, sf) = _operand(rows, groups), _operands(m)
    K = 2 * codes.shape[-1]
    tile, parts = _plan(rows, planned_tokens(T), (1, m.N, K, 1, out))
    config = GemmConfig(1, m.N, K, 1, out if parts == 1 else "float32", None, _bias_name(m.bias), tile, parts)
    sums = y if parts == 1 else _sums(rows, T, config)
    _gemm(config, rows, groups, (codes, sf), (m.global_scale, m.global_scale), m.bias, Rows(sums))
    if parts > 1:
        launch(SumConfig(parts, 1, m.N, Gate("raw", gated=False), out), (sums, y, groups.offsets))
    return y


def _one_group(rows: int, device: torch.device) -> Tensor:
    """The offsets of a single group."""
    if device.type == "meta":  # launches are noted, and arange there imports torch._dynamo
        return torch.empty(2, dtype=torch.int32, device=device)
    return torch.arange(0, rows + 1, rows, dtype=torch.int32, device=device)


def _operand(rows: Rows, groups: Groups) -> Rows:
    """Rows as the GEMMs read them: NVFP4, or gathered and interleaved bf16."""
    if rows.is_nvfp4:
        return rows
    R, K = groups.num_rows, rows.values.shape[1]
    if rows.values.dtype != torch.bfloat16:
        raise NotImplementedError(
            f"the Blackwell kernels take rows in bfloat16 or NVFP4, not {rows.values.dtype}: run the model in "
            "bfloat16, or set MOE_NVFP4_BACKEND=reference"
        )
    _check_multiple_of_16(K)
    values = rows.values.new_empty(R, interleaved_width(K))
    if R:
        x, index = aligned(rows.values), groups.order if rows.index is None else rows.index
        config = InterleaveConfig(K, rows.index is not None)
        launch(config, (x.view(torch.uint32), index, values.view(torch.uint32)))
    return Rows(values)


def _gemm1(rows: Rows, w: ExpertWeights, groups: Groups, dtype: torch.dtype, out: str) -> Rows:
    R, E, I = groups.num_rows, groups.num_experts, w.intermediate_size
    projections = 2 if w.gate.gated else 1
    codes, sf = _operands(w.w13)
    out = "nvfp4" if w.quantizes_h else out
    tile, parts = _plan(rows, planned_tokens(R), (E, I, codes.shape[-1] * 2, projections, out))
    config = GemmConfig(E, I, codes.shape[-1] * 2, projections, out, w.gate, _bias_name(w.w13.bias), tile)
    if w.quantizes_h and w.four_over_six:
        config = replace(config, four_over_six=True)
    scales = (w.w13.gate_scale if projections == 2 else w.w13.global_scale, w.w13.global_scale)
    if parts > 1:
        config, total = replace(config, out="float32", gate=None, parts=parts), SumConfig(parts, E, I, w.gate, out)
        sums = _gemm(config, rows, groups, (codes, sf), scales, w.w13.bias, Rows(_sums(rows, R, config)))
        h = rows.values.new_empty(R, total.width, dtype=dtype)
        if R:
            launch(total, (sums.values, h, groups.offsets))
        return Rows(h)
    if not w.quantizes_h:
        h = rows.values.new_empty(R, config.width, dtype=dtype)
        return _gemm(config, rows, groups, (codes, sf), scales, w.w13.bias, Rows(h))
    h = rows.values.new_empty(R, I // 2)
    h_sf = rows.values.new_empty(nvfp4.grouped_sf_rows(R, E) * (-(-I // 64) * 4))
    scale = rows.values.new_empty(R, dtype=torch.float32)
    return _gemm(config, rows, groups, (codes, sf), scales, w.w13.bias, Rows(h, h_sf, scale), w.h_scale)


def _gemm2(h: Rows, w: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    R, E, H, (T, top_k) = groups.num_rows, groups.num_experts, w.hidden_size, top_k_weights.shape
    codes, sf = _operands(w.w2)
    exact = dtype != torch.bfloat16 or planned_tokens(T, top_k) * top_k * H * 4 <= EXACT_BYTES
    out = "assignments" if exact else "assignments bfloat16"
    tile, parts = _plan(h, planned_tokens(T, top_k) * top_k, (E, H, codes.shape[-1] * 2, 1, out))
    config = GemmConfig(E, H, codes.shape[-1] * 2, 1, out, None, _bias_name(w.w2.bias), tile, parts)
    y = h.values.new_empty(T, H, dtype=dtype)
    assignments = _sums(h, R, config) if exact else h.values.new_empty(R, H, dtype=dtype)
    _gemm(config, h, groups, (codes, sf), (w.w2.global_scale, w.w2.global_scale), w.w2.bias, Rows(assignments))
    if T:
        top_k_weights = aligned(floating(top_k_weights))
        weights, out, rows = (_name(t.dtype) for t in (top_k_weights, y, assignments))
        combine = CombineConfig(top_k, H, weights, out, rows, parts)
        launch(combine, (assignments, top_k_weights, y))
    return y


def _plan(operand: Rows, rows: int, problem: tuple[int, int, int, int, str]) -> tuple[TileShape, int]:
    """(tile, parts of K). problem: experts, weight rows, K, projections, output."""
    activations = "nvfp4" if operand.is_nvfp4 else "bf16"
    return plan_gemm(activations, rows, *problem, multiprocessors(operand.values.device))


def _sums(like: Rows, rows: int, config: GemmConfig) -> Tensor:
    """An empty tensor for the fp32 output of a GEMM, all parts of K."""
    return like.values.new_empty(config.parts * rows, config.width, dtype=torch.float32)


def _gemm(
    config: GemmConfig, rows: Rows, groups: Groups, packed: tuple[Tensor, Tensor], scales: tuple[Tensor | None, Tensor],
    bias: Tensor | None, out: Rows, h_scale: Tensor | None = None,
) -> Rows:  # fmt: skip
    """Launch a `GroupedGemm` or a `DequantizingGemm` into `out`, and return it. packed: (codes, sf) of `sm100.pack`;
    scales: the global scales of gate rows (or of all rows) and of up rows.

    Arguments that a configuration does not use are filled with any tensor of the right type.
    """
    if not config.legal:
        raise ValueError(f"no Blackwell kernel for {config}")
    if groups.num_rows == 0:
        return out
    tile, R, (codes, sf) = config.tile, groups.num_rows, packed
    if R // 128 + config.experts > 65535:  # the tile map counts 128-row scale tiles in 16 bits
        raise ValueError(f"{R} rows are too many for one call: split the batch")
    weights, values = (codes.permute(1, 2, 0), sf), out.values.view(torch.uint32)
    globals_ = (*scales, scales[0] if bias is None else bias)
    tiles = config.work_tiles * (R // tile.tokens + min(config.experts, R))
    grid = min(tiles, multiprocessors(codes.device) // tile.ctas) * tile.ctas
    if config.dense:
        x = rows.values.view(torch.uint8)
        launch(config, (*weights, x, groups.offsets, *globals_, values, groups.order, grid))
        return out
    arguments = (
        *weights,
        pad_rows(rows.values),
        rows.sf,
        rows.scale,
        groups.offsets,
        *globals_,
        values,
        rows.sf if out.sf is None else out.sf,
        rows.scale if out.scale is None else out.scale,
        scales[0] if h_scale is None else h_scale,
        groups.order,
        grid,
    )
    launch(config, arguments)
    return out


def _check_multiple_of_16(width: int) -> None:
    if width % 16:
        raise NotImplementedError(
            f"the Blackwell kernels need hidden and intermediate sizes that are multiples of 16, got {width}: "
            "set MOE_NVFP4_BACKEND=reference"
        )


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in OUT_DTYPES:
        raise ValueError(f"the Blackwell kernels take {', '.join(OUT_DTYPES)}, not {name}: convert the tensor first")
    return name


def _bias_name(bias: Tensor | None) -> str | None:
    return None if bias is None else _name(bias.dtype)


# ---- weights -------------------------------------------------------------------------------------


def _operands(w: Matrices) -> tuple[Tensor, Tensor]:
    """(codes, sf) of `sm100.pack`; made at every call for weights that no module has prepared."""
    if w.layout is not None:
        return parts(w.codes, w.N, w.blocks)
    warn_unpacked("Blackwell")
    projections = 2 if w.gated else 1
    codes, sf = pack_codes(w.codes, projections), pack_sf(w.block_scales(), projections)
    settle(sf.device)
    return codes, sf


# ---- compilation ---------------------------------------------------------------------------------


def launch(config: Config, arguments: tuple) -> None:
    """Run the kernel of `config` on the current stream; it is compiled on first use."""
    compiled(config, architecture(capability(arguments[0].device)))(*arguments)


def architecture(of: tuple[int, int] | None) -> str:
    if of not in ARCHITECTURES:
        raise NotImplementedError(
            f"compute capability {of and '{}.{}'.format(*of)} has no tcgen05 tensor cores: these kernels run on "
            "10.0 and 10.3 (B200, B300); set MOE_NVFP4_BACKEND=reference"
        )
    return ARCHITECTURES[of]


@CuteKernels
def compiled(config: Config, architecture: str) -> Any:
    """The kernel of `config`: from memory, from disk, or compiled now."""
    return *kernel_of(config), architecture


def compile_kernel(config: Config, options: str = "") -> Any:
    """Compile the kernel of `config` for CUTE_DSL_ARCH, which needs no GPU, or else for the GPU that is there."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    stream = make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
    kernel, arguments = kernel_of(config)
    return cute.compile(kernel, *arguments, stream, options=options)


def kernel_of(config: Config) -> tuple[Any, tuple]:
    """(the kernel of `config`, placeholders for its arguments: all shapes are static except the number of rows)."""
    import cutlass
    from cutlass import Float32, Int32, Uint8, Uint32, cute
    from cutlass.cute.runtime import make_fake_tensor

    from moe_nvfp4.kernels.common.route import Route
    from moe_nvfp4.kernels.common.rows import SumParts
    from moe_nvfp4.kernels.sm100 import gemm, rows, w4a16

    def tensor(dtype: Any, *shape: Any, align: int = 16, stride: Sequence | None = None) -> Any:
        if stride is None:
            stride = [1]
            for n in shape[:0:-1]:
                stride.insert(0, stride[0] * n)
        return make_fake_tensor(dtype, shape, tuple(stride), assumed_align=align)

    types = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": Float32}
    R, others = cute.sym_int(), cute.sym_int()
    bytes_sf, bytes_out_sf = cute.sym_int64(), cute.sym_int64()  # more than 2**31 for 8 million rows of 7168
    if isinstance(config, QuantizeConfig):
        return rows.QuantizeRows(config), (
            tensor(types[config.dtype], others, config.k),
            tensor(Int32, R, align=4),
            tensor(Float32, config.experts if config.static else R, align=4),
            tensor(Int32, config.experts + 1, align=4),
            tensor(Uint32, R, config.k // 8),
            tensor(Uint8, bytes_sf),
            tensor(Float32, R, align=4),
        )
    if isinstance(config, CombineConfig):
        return rows.Combine(config), (
            tensor(types[config.rows], R, config.hidden),
            tensor(types[config.weights], others, config.top_k),
            tensor(types[config.out], others, config.hidden),
        )
    if isinstance(config, SumConfig):
        order = EIGHT if config.out == "interleaved" else tuple(range(8))
        sums = SumParts(config.parts, order, config.projections, config.gate, routed=True)
        return sums, (
            tensor(Float32, R, config.columns * config.projections),
            tensor(types.get(config.out, cutlass.BFloat16), others, config.width),
            tensor(Int32, config.experts + 1, align=4),
        )
    if isinstance(config, RouteConfig):
        ids = tensor({"int32": Int32, "int64": cutlass.Int64}[config.ids], R, align=8 if config.ids == "int64" else 4)
        return Route(config.ctas, config.warps, config.each), (
            ids,
            None,
            *(tensor(Int32, n, align=4) for n in (R, R, R, others, 1)),
            *[None] * 4,
            Int32(1),
            Int32(1),
        )
    if isinstance(config, InterleaveConfig):
        return rows.InterleaveRows(config), (
            tensor(Uint32, others, config.k // 2),
            tensor(Int32, R, align=4),
            tensor(Uint32, R, interleaved_width(config.k) // 2),
        )
    E, N = config.experts, config.matrix_rows
    words = {"nvfp4": config.rows // 8, "assignments": config.width, "float32": config.width}
    weights = (
        tensor(Uint8, N, config.k // 2, E, stride=(config.k // 2, 1, N * config.k // 2)),
        tensor(Uint8, E * config.sf_row_tiles * config.k_steps * SF_TILE),
    )
    bias = tensor(types[config.bias], E, N, align=4) if config.bias else tensor(Float32, E, align=4)
    if config.dense:
        return w4a16.DequantizingGemm(config), (
            *weights,
            tensor(Uint8, R, config.k * 2),
            tensor(Int32, E + 1, align=4),
            tensor(Float32, E, align=4),
            tensor(Float32, E, align=4),
            bias,
            tensor(Uint32, R if config.parts == 1 else others, words.get(config.out, config.width // 2)),
            tensor(Int32, R, align=4),
            Int32(1),
        )
    return gemm.GroupedGemm(config), (
        *weights,
        tensor(Uint8, R, config.k // 2),
        tensor(Uint8, bytes_sf),
        tensor(Float32, R, align=4),
        tensor(Int32, E + 1, align=4),
        tensor(Float32, E, align=4),
        tensor(Float32, E, align=4),
        bias,
        tensor(Uint32, R, words.get(config.out, config.width // 2)),
        tensor(Uint8, bytes_out_sf),
        tensor(Float32, R, align=4),
        tensor(Float32, E, align=4),
        tensor(Int32, R, align=4),
        Int32(1),
    )

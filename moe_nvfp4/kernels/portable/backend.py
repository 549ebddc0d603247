"""The portable backend: the experts and linears as Triton kernels, for every GPU that Triton compiles for.

    route ── (quantize) ── gemm, with the gate ── (quantize) ── gemm ── combine

For a few tokens nothing is routed: the GEMMs' programs search for the rows of their expert themselves.

The checkpoint's bytes are read as they are. Nothing waits for the device, no shape depends on data, and buffers are
torch's, so a CUDA graph can capture everything. Calls may run on any stream, and on several at once. The same input
gives the same bits.

NVFP4 rows (W4A4) are stored as bf16 `code * sf`, which is exact, with their global scales beside them; where tensor
cores multiply NVFP4 by NVFP4 (`config.multiplies_nvfp4`), as codes and block scales. Numerics are the reference's, up
to the order of fp32 sums. Two roundings are added: above `EXACT_BYTES` of expert outputs (prefill), these are rounded
to x's dtype before the combine adds them in fp32; and in `dense`, GEMM 1's sums are rounded to bf16 before the gate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moe_nvfp4 import format as nvfp4
from moe_nvfp4 import reference
from moe_nvfp4.kernels.common.ahead import planned_tokens
from moe_nvfp4.kernels.common.tensors import aligned, capability, expert_ids, floating, multiprocessors
from moe_nvfp4.kernels.portable import adapters, config, dense, merge, router
from moe_nvfp4.kernels.portable import gate as gates
from moe_nvfp4.kernels.portable.config import Plan, TileShape, next_power_of_2
from moe_nvfp4.kernels.portable.dequantize import how
from moe_nvfp4.kernels.portable.gemm import gemm_kernel
from moe_nvfp4.kernels.portable.launch import launch
from moe_nvfp4.kernels.portable.rows import combine_kernel, quantize_kernel, route_kernel, tiles_kernel
from moe_nvfp4.routing import Groups, Rows, check_adapter, check_ids
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Matrices

_RAW = Gate("raw")
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# ---- the layer -----------------------------------------------------------------------------------


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """The whole layer: x bf16 or fp16 [T, H], ids and weights [T, top_k] -> [T, H] in x's dtype."""
    w, (T, top_k) = weights, top_k_index.shape
    out = x.new_empty(T, w.hidden_size)
    if T == 0 or top_k == 0:
        return out.zero_()
    most = max(1, config.MAX_ROWS // top_k)
    if T > most:
        parts = (t.split(most) for t in (x, top_k_index, top_k_weights))
        return torch.cat([experts(a, ids, p, w) for a, ids, p in zip(*parts, strict=True)], out=out)
    ids, x, top_k_weights = aligned(expert_ids(top_k_index)), _columns(x), aligned(floating(top_k_weights))
    planned = planned_tokens(T, top_k) * top_k
    with on(x.device):
        if _dense_pays(w, planned, x):
            return _experts_dense(x, ids, top_k_weights, w, out, planned)
        native = w.quantized and config.multiplies_nvfp4(capability(x.device))
        plan = _plan(w, planned, x.dtype, x.device, native)
        static = w.quantized and (w.x_scale is not None or w.h_scale is not None)
        routing: Routing | Unsorted
        if plan.most_ids and not static:
            routing = Unsorted(ids, plan.most_ids)
        else:
            routing = route(ids, w.num_experts, plan.BM, planned, row_expert=static)
        rows = Values(x, index=routing.order, index_div=top_k)
        if w.quantized:
            rows = quantize(rows, w.x_scale, routing, w.four_over_six, native)
        fp32 = w.quantized and w.h_scale is not None
        h = Values(_up(rows, w, routing, plan, torch.float32 if fp32 else x.dtype))
        if w.quantized:
            h = quantize(h, w.h_scale, routing, w.four_over_six, native)
        combine(_down(h, w, routing, plan), ids, top_k_weights, out, w.num_experts, check=routing.order is None)
    return out


def _experts_dense(
    x: Tensor, ids: Tensor, top_k_weights: Tensor, w: ExpertWeights, out: Tensor, planned: int
) -> Tensor:
    """`experts` by torch's grouped product with weights dequantized to bf16, `dense.SCRATCH` bytes at a time. Rows are
    bf16: x, or code * sf of NVFP4 rows."""
    (R,), E, I, w13, w2 = ids.shape, w.num_experts, w.intermediate_size, w.w13, w.w2
    nvfp4, r = w.quantized, route(ids, E, R, planned, row_expert=True, position=True)
    rows = Values(x, index=r.order, index_div=R // x.shape[0])
    rows = _gathered(quantize(rows, w.x_scale, r, w.four_over_six) if nvfp4 else rows)
    h = x.new_empty(R, I, dtype=torch.float32 if nvfp4 and w.h_scale is not None else x.dtype)
    for first, n, product in dense.products(rows.values, w13, r.offsets):
        block = min(1024, next_power_of_2(n))
        launch(
            dense.gate_kernel, (R, -(-n // block)), product, r.row_expert, r.live, w13.gate_scale, w13.global_scale,
            rows.scale, w13.bias, h, first, I, n, *_gate(w.gate), block, how(), num_warps=4,
        )  # fmt: skip
    rows = quantize(Values(h), w.h_scale, r, w.four_over_six) if nvfp4 else Values(h)
    for first, _, product in dense.products(rows.values, w2, r.offsets):
        bias = None if w2.bias is None else w2.bias[:, first:]
        combine(product[None], ids, top_k_weights, out[:, first:], E, (r.position, w2.global_scale, rows.scale, bias))
    return out


quantize_rows = reference.quantize_rows


def gemm1_swiglu(rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
    """As `reference.gemm1_swiglu`. Unrouted rows hold arbitrary values."""
    w, device = weights, groups.order.device
    if groups.num_rows == 0:
        return reference.gemm1_swiglu(rows, weights, groups, dtype)
    static = w.quantizes_h
    plan = _plan(w, planned_tokens(groups.num_rows), dtype, device)
    with on(device):
        h = _up(values_of(rows, groups), w, Routing.of(groups, plan.BM), plan, torch.float32 if static else dtype)
    h = h[:, : w.w13.N if w.gate.kind == "raw" else w.intermediate_size]
    return reference.quantize_rows(h, None, w.h_scale, groups, w.four_over_six) if static else Rows(h)


def gemm2_combine(h: Rows, weights: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `reference.gemm2_combine`."""
    w, R, (T, top_k), device = weights, groups.num_rows, top_k_weights.shape, groups.order.device
    out = torch.empty(T, w.hidden_size, dtype=dtype, device=device)
    if R == 0:
        return out.zero_()
    plan = _plan(w, planned_tokens(T, top_k) * top_k, dtype, device)
    with on(device):
        routing = Routing.of(groups, plan.BM)
        y = _down(values_of(h, groups), w, routing, plan)
        combine(y, routing.ids, aligned(floating(top_k_weights)), out, w.num_experts)
    return out


def group(top_k_index: Tensor, num_experts: int, adapter: Tensor | None, num_adapters: int) -> Groups:
    """As `routing.group_by_expert`."""
    check_ids(top_k_index)
    if adapter is not None:
        check_adapter(adapter, num_adapters, len(top_k_index))
        adapter = expert_ids(adapter)
    with on(top_k_index.device):
        return adapters.group(expert_ids(top_k_index), num_experts, top_k_index.shape[1], adapter, num_adapters)


def add_low_rank(out: Tensor, *others: Any) -> None:
    """As `adapters.add_low_rank`."""
    with on(out.device):
        adapters.add_low_rank(out, *others)


def combine_slots(slots: Tensor, top_k_weights: Tensor) -> Tensor:
    """`Backend.combine`."""
    out = slots.new_empty(top_k_weights.shape[0], slots.shape[1])
    if not slots.numel():
        return out.zero_()
    with on(slots.device):
        combine(slots.contiguous()[None], None, aligned(floating(top_k_weights)), out, 1)
    return out


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `router.top_k`."""
    with on(scores.device):
        return router.top_k(scores, k)


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `router.linear`."""
    with on(x.device):
        return router.linear(x, weight, bias)


def merged_codes(codes: Tensor, sf: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As `merge.merged_codes`."""
    with on(codes.device):
        return merge.merged_codes(codes, sf, scale, a, b)


def merge_units(codes: Tensor, scale: Tensor, a: Tensor, b: Tensor, units: Tensor, interleaved: bool) -> None:
    """As `merge.merge_units`."""
    with on(codes.device):
        merge.merge_units(codes, scale, a, b, units, interleaved)


def gate(gate: Gate, w13_out: Tensor, dh: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """`Gate.__call__`, and if dh is given, `Gate.gradient`."""
    with on(w13_out.device):
        return gates.gate(_gate(gate), w13_out, dh)


def dequantize(weights: Matrices, columns: slice, dtype: torch.dtype) -> Tensor:
    """`Backend.dequantize` of all experts, in bf16 or fp16."""
    with on(weights.codes.device):
        return dense.window(weights, columns, dtype)


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """y [T, N] = x [T, K] · wᵀ (+ bias), in x's dtype bf16 or fp16."""
    if x.shape[0] == 0:
        return x.new_empty(0, weights.matrix.N)
    w, m, T = weights, weights.matrix, x.shape[0]
    out, x = x.new_empty(T, m.N), _columns(x)
    with on(x.device):
        rows, found = Values(x), capability(x.device)
        native = w.quantized and config.multiplies_nvfp4(found)
        if w.quantized:
            rows = quantize(rows, w.input_scale, None, w.four_over_six, native)
        if T > config.linear_limit(found) and not native:
            for matrix, columns in m.split(w.parts):
                dense.linear(rows.values, rows.scale, matrix, out[:, columns])
            return out
        BM, tile, splits = config.plan_linear(m.N, m.K, planned_tokens(T), _sms(x.device), native)
        part = config.part_of(m.K, splits, tile.BK)
        splits = -(-m.K // part)
        y = out[None] if splits == 1 else x.new_empty(splits, T, m.N, dtype=torch.float32)
        _gemm(rows, m, y, _Tiling(tile, BM, 1, part), parts=w.parts)
        if splits > 1:
            combine(y, None, None, out, 1)
    return out


# ---- rows, routing -------------------------------------------------------------------------------


class Values(NamedTuple):
    """Row r of a GEMM is values[index[r] // index_div], or values[r // index_div] without an index; values [*, K], K a
    multiple of 16. scale fp32 [*] if quantized. With block scales sf uint8 [*, K / 16], values are codes [*, K / 2]."""

    values: Tensor
    scale: Tensor | None = None
    index: Tensor | None = None  # type: ignore[assignment]  # tuples have a method of this name
    index_div: int = 1
    sf: Tensor | None = None


class Routing(NamedTuple):
    """`routing.Groups` and their tiles of BM rows: expert (-1: no tile), first row, end of the expert's rows. The
    tensors of tiles may be longer than needed."""

    order: Tensor
    offsets: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    tile_end: Tensor
    tile_count: Tensor
    row_expert: Tensor | None = None  # the expert of each routed row, if asked for
    position: Tensor | None = None  # the row of each routed assignment, if asked for
    ids: Tensor | None = None  # the expert of each assignment, E if it has none, if they were sorted before

    @classmethod
    def of(cls, groups: Groups, BM: int) -> Routing:
        """The tiles of rows that are sorted already."""
        R, E, empty = groups.num_rows, groups.num_experts, groups.order.new_empty
        tiles = max_tiles(R, E, BM)
        ids, expert, row, end, count = empty(R), empty(tiles), empty(tiles), empty(tiles), empty(1)
        sizes = E, max(128, next_power_of_2(E)), 128
        launch(
            tiles_kernel, (E,), groups.order, groups.offsets, ids, expert, row, end, count, R, BM, tiles, *sizes,
            num_warps=4,
        )  # fmt: skip
        return cls(groups.order, groups.offsets, expert, row, end, count, ids=ids)

    @property
    def num_rows(self) -> int:
        return self.order.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def live(self) -> Tensor:
        """How many rows have an expert, on the device."""
        return self.offsets[-1:]


class Unsorted(NamedTuple):
    """At most `most` assignments, which are the rows in their own order: the GEMMs search for those of an expert."""

    ids: Tensor
    most: int
    order: None = None

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]


def route(
    ids: Tensor, E: int, BM: int, planned: int | None = None, row_expert: bool = False, position: bool = False
) -> Routing:
    """Sort assignments, int32 or int64 [R], by expert. With `position`, unrouted rows have order 0.

    An id outside the legal range stops the kernel with a message, and the next synchronization raises.
    """
    R, tiles = ids.shape[0], max_tiles(ids.shape[0], E, BM)
    sizes = (R, E + 1, tiles, tiles, tiles, 1, R if row_expert else 0, R if position else 0)
    padded = [-(-n // 4) * 4 for n in sizes]  # so that each begins at a multiple of 16 bytes
    buffer = ids.new_zeros if position else ids.new_empty
    parts = buffer(sum(padded), dtype=torch.int32).split_with_sizes(padded)
    order, offsets = (part if len(part) == n else part[:n] for part, n in zip(parts, sizes[:2], strict=False))
    _, _, tile_expert, tile_row, tile_end, tile_count, *optional = parts
    of_row, of_slot = (part if wanted else None for part, wanted in zip(optional, (row_expert, position), strict=True))
    EP, planned = max(16, next_power_of_2(E)), planned or R
    histogram = planned > 128 or EP > 512
    chunk = min(4096, max(256, next_power_of_2(planned))) if histogram else max(16, min(128, 8192 // EP))
    launch(
        route_kernel, (E,), ids, order, of_slot, of_row, offsets, tile_expert, tile_row, tile_end, tile_count, R, BM,
        tiles, E, EP, chunk, histogram, num_warps=8 if chunk >= 1024 else 4, debug=True, sanitize_overflow=False,
    )  # fmt: skip
    return Routing(order, offsets, tile_expert, tile_row, tile_end, tile_count, of_row, of_slot)


def max_tiles(R: int, E: int, BM: int) -> int:
    """A bound on the number of token tiles that holds for every routing."""
    return R // BM + min(E, R)


def _gathered(rows: Values) -> Values:
    if rows.index is None:
        return rows
    if rows.values.is_meta:
        values, scale = rows.values, rows.scale
        R = rows.index.shape[0]
        return Values(values.new_empty(R, values.shape[1]), None if scale is None else scale.new_empty(R))
    at = rows.index // rows.index_div
    return Values(rows.values[at], None if rows.scale is None else rows.scale[at])


def _columns(x: Tensor) -> Tensor:
    """x with its width padded to a multiple of 16, at an address that is a multiple of 16."""
    return aligned(nvfp4.pad_k(x))


def values_of(rows: Rows, groups: Groups) -> Values:
    """Rows of other backends, with NVFP4 ones as bf16 code * sf."""
    if rows.sf is None:
        return Values(_columns(rows.values), index=rows.index)
    if rows.values.is_meta:
        return Values(
            rows.values.new_empty(groups.num_rows, 2 * rows.values.shape[1], dtype=torch.bfloat16), rows.scale
        )
    sf = nvfp4.unswizzle_sf_grouped(rows.sf, groups.offsets, groups.num_rows, rows.values.shape[1] // 8)
    return Values(nvfp4.dequantize(rows.values, sf, None, torch.bfloat16), rows.scale)


def quantize(
    rows: Values,
    expert_scale: Tensor | None,
    routing: Routing | Unsorted | None,
    four_over_six: bool,
    native: bool = False,
) -> Values:
    """`reference.quantize_rows` with values as bf16 code * sf or, if `native`, as codes and block scales.

    If experts have scales, rows are gathered first, because a token has different values for different experts.
    """
    x, (n, K) = rows.values, rows.values.shape
    index, index_div, expert, live = None, 1, None, None
    if expert_scale is not None and routing is None:  # a linear: one expert
        expert = torch.zeros(n, dtype=torch.int32, device=x.device)
    elif expert_scale is not None:
        assert isinstance(routing, Routing)
        n, index, index_div = routing.order.shape[0], rows.index, rows.index_div
        expert, live = routing.row_expert, routing.live
        rows = Values(x)
    scale, sf, block = x.new_empty(n, dtype=torch.float32), None, min(2048, next_power_of_2(K))
    if native:
        values, sf = (x.new_empty(n, width, dtype=torch.uint8) for width in (K // 2, K // 16))
    else:
        values = x.new_empty(n, K, dtype=torch.bfloat16)
    launch(
        quantize_kernel, (n,), x, index, expert, expert_scale, live, values, sf, scale, K, index_div, block, how(),
        four_over_six, num_warps=4 if block >= 1024 else 1,
    )  # fmt: skip
    return Values(values, scale, rows.index, rows.index_div, sf)


# ---- GEMMs ---------------------------------------------------------------------------------------


def _up(rows: Values, w: ExpertWeights, routing: Routing | Unsorted, plan: Plan, dtype: torch.dtype) -> Tensor:
    """GEMM 1 and the gate: [R, I], padded with zeros to whole blocks; [R, N13] for a raw gate."""
    width = w.w13.N if w.gate.kind == "raw" else 16 * w.w2.blocks
    h = rows.values.new_empty(1, routing.num_rows, width, dtype=dtype)
    _gemm(rows, w.w13, h, _Tiling(plan.up, plan.BM, plan.group, 16 * w.w13.blocks), routing, gate=w.gate)
    return h[0]


def _down(h: Values, w: ExpertWeights, routing: Routing | Unsorted, plan: Plan) -> Tensor:
    """GEMM 2: expert outputs [parts of K, R, H], in the order of assignments."""
    K, tile = 16 * w.w2.blocks, plan.down
    part = config.part_of(K, plan.splits, tile.BK)
    y = h.values.new_empty(-(-K // part), routing.num_rows, w.hidden_size, dtype=plan.rows)
    _gemm(h, w.w2, y, _Tiling(tile, plan.BM, plan.group, part), routing, routing.order)
    return y


class _Tiling(NamedTuple):
    """A tile; its BM tokens; how many token tiles in a row use the same weights; columns of K that a program sums."""

    tile: TileShape
    BM: int
    group: int
    part: int


def _gemm(
    rows: Values, w: Matrices, out: Tensor, tiling: _Tiling, routing: Routing | Unsorted | None = None,
    out_index: Tensor | None = None, gate: Gate = _RAW, parts: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Launch `gemm_kernel` into out [parts of K, R, N]; without routing, one matrix has all rows. parts: N of each of
    several linears, whose rows it has."""
    x, R, r, native, (tile, BM, group, part) = rows.values, out.shape[1], routing, rows.sf is not None, tiling
    N, K, split_at, third_at = w.N, 16 * w.blocks, 0, 0
    if parts:
        split_at, third_at, *_ = *accumulate(parts), w.N
    elif gate.kind in config.GATED:
        N //= 2
    elif w.gate_scale is not None:
        split_at = N // 2
    token_tiles: tuple[Tensor | None, ...] = (None,) * 4
    ids, E, tiles = 0, 0, -(-R // BM)
    if isinstance(r, Unsorted):
        ids, E, tiles, group, token_tiles = r.most, len(w.global_scale), R, 1, (r.ids, None, None, None)
    elif r is not None:
        tiles, token_tiles = (
            max_tiles(R, len(w.global_scale), BM),
            (r.tile_expert, r.tile_row, r.tile_end, r.tile_count),
        )
    tiles = -(-tiles // group) * group
    launch(
        gemm_kernel, (tiles * -(-N // tile.BN), out.shape[0]),
        x if native else x.view(torch.int32), rows.sf, rows.index, aligned(w.codes), aligned(w.block_scales()),
        w.gate_scale, w.global_scale, w.bias, rows.scale, out, out_index, *token_tiles, R,
        N, K, part // 2, out.shape[2], split_at, third_at, rows.index_div, *_gate(gate),
        tile.BN, BM, tile.BK, group, ids, E, _TYPES.get(x.dtype), how(), num_warps=tile.warps, num_stages=tile.stages,
        arch=_architecture(x.device) if native else None,
    )  # fmt: skip


def _gate(gate: Gate) -> tuple:
    return gate.kind, gate.alpha, 0.0 if gate.limit == inf else gate.limit, gate.up_offset, gate.clamp_after


def combine(
    y: Tensor, ids: Tensor | None, weights: Tensor | None, out: Tensor, E: int, late: tuple = (None, None, None, None),
    check: bool = False,
) -> None:  # fmt: skip
    """Launch `combine_kernel`. late: position, scale, row_scale and bias, by which it finds rows and finishes them.
    check: this kernel is the one that an id outside the legal range stops with a message."""
    (splits, R, N), T = y.shape, out.shape[0]
    block = min(1024, next_power_of_2(N)) if T >= 64 else 256
    launch(
        combine_kernel, (T, -(-N // block)), y, ids, weights, *late, out, R, out.stride(0), E, R // T, N, splits, block,
        how(), num_warps=4, debug=check, sanitize_overflow=False,
    )  # fmt: skip


# ---- what is launched where ----------------------------------------------------------------------


def _plan(w: ExpertWeights, R: int, dtype: torch.dtype, device: torch.device, native: bool = False) -> Plan:
    return config.plan_experts(w.num_experts, w.hidden_size, w.intermediate_size, R, dtype, _sms(device), native)


def _dense_pays(w: ExpertWeights, R: int, x: Tensor) -> bool:
    """Whether torch's grouped product over dequantized weights is faster."""
    rows = torch.bfloat16 if w.quantized else x.dtype
    if rows != torch.bfloat16 or w.hidden_size % 16 or w.intermediate_size % 16:
        return False
    return config.dense_pays(w.num_experts, R, capability(x.device))


def _architecture(device: torch.device) -> str:
    major, minor = capability(device) or (0, 0)
    return f"sm{major}{minor}"


def _sms(device: torch.device) -> int:
    return 1 if device.type == "cpu" else multiprocessors(device)


_HERE = nullcontext()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current, because launches go to the current device."""
    return _HERE if device.type != "cuda" or device.index == torch.cuda.current_device() else torch.cuda.device(device)

"""Descriptions of calls of layers, and every kernel that such calls can launch, for any number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_nvfp4 import reference
from moe_nvfp4.format import grouped_sf_rows
from moe_nvfp4.kernels.backend import Backend, Gpu
from moe_nvfp4.kernels.common import ahead
from moe_nvfp4.kernels.common.ahead import Build, token_counts
from moe_nvfp4.routing import Groups, Rows
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, read_spec

Kind = (
    tuple[tuple[int, ...], torch.dtype, int] | None
)  # of a tensor: shape, dtype, and how many elements its address is past a multiple of 16 bytes


class Call(NamedTuple):
    """Calls of one layer or linear: all that their kernels depend on.

    weights, spec  of an `ExpertWeights` or a `LinearWeights`
    dtype          of x
    top_k          0 for a linear
    fused          as in `Problem`
    tokens         how many, with int64 ids and fp32 router weights; None: any number, with all dtypes of these
    adapters       (rank, how many of which a token has one, 0: all tokens have the same): experts with `stages.Adapter`
    expert_map     whether a fused layer gets one
    """

    weights: tuple[Kind, ...]
    spec: str
    dtype: torch.dtype
    top_k: int
    fused: bool
    tokens: int | None = None
    adapters: tuple[int, int] | None = None
    expert_map: bool = False

    @property
    def ids(self) -> tuple[torch.dtype, ...]:
        """Dtypes of top_k_index: transformers' and vLLM's."""
        return (torch.int64, torch.int32) if self.tokens is None else (torch.int64,)

    @property
    def router(self) -> set[torch.dtype]:
        """Dtypes of top_k_weights."""
        return {torch.float32, self.dtype} if self.tokens is None else {torch.float32}

    def counts(self, top_k: int = 1, rows: int = 1) -> Iterable[int]:
        """Numbers of tokens with top_k assignments; rows: how many each of `tokens` gives."""
        return token_counts(top_k) if self.tokens is None else [self.tokens * rows]

    @staticmethod
    def of(
        weights: ExpertWeights | LinearWeights, dtype: torch.dtype, top_k: int = 0, fused: bool = True,
        tokens: int | None = None, adapters: tuple[int, int] | None = None, expert_map: bool = False,
    ) -> Call:  # fmt: skip
        return Call(_kinds(weights.tensors()), weights.spec(""), dtype, top_k, fused, tokens, adapters, expert_map)


def _kinds(tensors: Iterable[Tensor | None]) -> tuple[Kind, ...]:
    """The `Kind` of each tensor, or of this rank's part if it is split over ranks."""
    return tuple(None if t is None else _kind(getattr(t, "_local_tensor", t)) for t in tensors)


def _kind(t: Tensor) -> Kind:
    return tuple(t.shape), t.dtype, 0 if t.is_meta else t.data_ptr() % 16 // t.element_size()


def compile_ahead(calls: Iterable[tuple[Backend, Call]], gpu: Gpu, progress: bool = True) -> int:
    """Compile every kernel that such calls launch on `gpu` into the cache folder, and load
    all of them if that GPU is there, so that no call waits for a compiler. Several processes compile; weights may be on
    meta. Returns how many were not cached.

    RuntimeError with the compiler's message if a compilation fails.
    """
    jobs: dict[Build, None] = {}
    for backend, call in dict.fromkeys(calls):
        if backend.packages:
            jobs |= kernels_of(backend, call, gpu)
    built = ahead.build(jobs, gpu, progress=progress)
    if gpu.ordinal is not None:
        with torch.cuda.device(gpu.ordinal):
            for job in jobs:
                job.variants.load(gpu, *job.arguments)
    return built


@lru_cache(maxsize=256)
def kernels_of(backend: Backend, call: Call, gpu: Gpu) -> dict[Build, None]:
    """Every kernel that such calls can need on `gpu`, as an ordered set: found by making the calls on meta tensors."""
    with ahead.noting(gpu) as jobs:
        tensors, spec = [_meta(kind) for kind in call.weights], read_spec(call.spec)
        if spec.gate is None:
            _linear(backend, call, LinearWeights.from_tensors(tensors, spec))
        else:
            w = ExpertWeights.from_tensors(tensors, spec)
            if call.fused and w.gate.kind != "raw" and call.adapters is None:
                _experts(backend, call, w)
            else:
                _stages(backend, call, w)
            if call.adapters is not None:
                _adapters(backend, call, w, *call.adapters)
    return jobs


def _experts(backend: Backend, call: Call, w: ExpertWeights) -> None:
    expert_map = [_empty((w.num_experts,), torch.int32)] if call.expert_map and backend.maps else []
    for ids, router, T in product(call.ids, call.router, call.counts(call.top_k)):
        x, shape = _empty((T, w.hidden_size), call.dtype), (T, call.top_k)
        backend.experts(x, _empty(shape, ids), _empty(shape, router), w, *expert_map)


def _stages(backend: Backend, call: Call, w: ExpertWeights) -> None:
    """Sorting and the products of `stages`: GEMM 1 does not depend on top_k, GEMM 2 may get one slot."""
    E, H, I, quantized, fp32 = w.num_experts, w.hidden_size, w.intermediate_size, w.quantized, torch.float32
    offsets, first = _empty((E + 1,), torch.int32), replace(w, h_scale=None)
    if call.adapters is not None:  # they add to the sums before the gate
        first = replace(first, gate=Gate("raw", gated=w.gate.gated))
    several = 0 if call.adapters is None else call.adapters[1]
    for ids, chosen, T in product(call.ids, call.ids if several else (None,), call.counts(call.top_k)):
        if T * call.top_k <= backend.sorts:  # else plain torch
            adapter = None if chosen is None else _empty((T,), chosen)
            backend.group(_empty((T, call.top_k), ids), E, adapter, several)
    for R, dtype in product(call.counts(rows=call.top_k), {call.dtype, fp32} if w.quantizes_h else {call.dtype}):
        groups, x = Groups(_empty((R,), torch.int32), offsets, 1), _empty((R, H), call.dtype)
        for index in (groups.order, None):
            rows = (
                _quantized(backend, x, index, w.x_scale, groups, w.four_over_six) if quantized else Rows(x, index=index)
            )
            backend.gemm1_swiglu(rows, first, groups, dtype)
        if quantized:
            _quantized(backend, _empty((R, I), dtype), None, w.h_scale, groups, w.four_over_six)
    for top_k, router in product({1, call.top_k}, call.router):
        for T in call.counts(top_k, call.top_k // top_k):
            order = _empty((T * top_k,), torch.int32)
            groups, h = Groups(order, offsets, top_k, position=order), _empty((T * top_k, I), call.dtype)
            rows = _quantized(backend, h, None, w.h_scale, groups, w.four_over_six) if quantized else Rows(h)
            backend.gemm2_combine(rows, w, groups, _empty((T, top_k), router), call.dtype)


def _adapters(backend: Backend, call: Call, w: ExpertWeights, rank: int, several: int) -> None:
    """What `stages` does with adapters after the products."""
    E, H, I, N13, dtype, int32 = w.num_experts, w.hidden_size, w.intermediate_size, w.w13.N, call.dtype, torch.int32
    G = E * max(1, several)
    for R in call.counts(rows=call.top_k):
        bare, order, offsets = _empty((R,), torch.bool), _empty((R,), int32), _empty((G + 1,), int32)
        for N, K, where in ((N13, H, (order, call.top_k, None)), (H, I, (None, 1, order))):
            a, b = _empty((G, rank, K), dtype), _empty((G, N, rank), dtype)
            backend.add_low_rank(
                _empty((R, N), dtype), _empty((R, K), dtype), a, b, offsets, bare if several else None, *where
            )
        if w.gate.kind != "raw":
            backend.gate(w.gate, _empty((R, N13), dtype))
    for T, router in product(call.counts(call.top_k), call.router):
        backend.combine(_empty((T * call.top_k, H), dtype), _empty((T, call.top_k), router))


def _quantized(
    backend: Backend, x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups, four_over_six: bool
) -> Rows:
    if backend.functions.quantize_rows is not reference.quantize_rows:
        return backend.quantize_rows(x, index, scale, groups, four_over_six)
    R, K = groups.num_rows, -(-x.shape[1] // 16) * 16  # plain torch runs none of our kernels
    sf = _empty((grouped_sf_rows(R, groups.num_experts) * (-(-K // 64) * 4),), torch.uint8)
    return Rows(_empty((R, K // 2), torch.uint8), sf, _empty((R,), torch.float32))


def _linear(backend: Backend, call: Call, w: LinearWeights) -> None:
    for T in call.counts():
        backend.linear(_empty((T, w.matrix.K), call.dtype), w)


def _meta(kind: Kind) -> Tensor | None:
    return None if kind is None else _tensor(kind)


def _tensor(kind: Any) -> Tensor:
    shape, dtype, place = kind
    return _empty((place + torch.Size(shape).numel(),), dtype)[place:].view(shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

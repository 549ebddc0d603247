"""Routing: top-k expert ids -> rows grouped by expert.

Nothing here reads a value back to the host and no shape depends on data, so the same code runs
eagerly, under `torch.compile(fullgraph=True)` and inside a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """A tile map: `count` tiles, each of at most `tile` rows of one expert.

    expert  int32 [max_tiles]  the expert of tile i; -1 for i >= count
    row     int32 [max_tiles]  the first row of tile i
    count   int32 [1]          how many tiles there are
    """

    expert: Tensor
    row: Tensor
    count: Tensor


@dataclass(frozen=True)
class Groups:
    """The assignments (token, slot) of a batch, sorted by expert. R = T * top_k rows.

    order    int32 [R]      row r is assignment order[r] = token * top_k + slot; stable, so rows of
                            one expert (and one adapter) are in token order
    offsets  int32 [E + 1]  expert e owns rows offsets[e] : offsets[e + 1]; rows from offsets[E] on
                            are unrouted (sentinel ids) and contribute exactly zero
    top_k    int            slots per token
    position int32 [R]      the row of each assignment (the inverse of `order`); None where not computed

    Where each token has one of S adapters, or none, an expert's rows are sorted by adapter:

    parts    int32 [E * S + 1]  adapter s of expert e owns rows parts[e * S + s] : parts[e * S + s + 1]; the rows
                                without an adapter are among those of adapter 0
    bare     bool [R]           whether a row has no adapter
    """

    order: Tensor
    offsets: Tensor
    top_k: int
    position: Tensor | None = None
    parts: Tensor | None = None
    bare: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.order.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def token(self) -> Tensor:
        """int32 [R]: the token of each row."""
        return self.order // self.top_k

    def expert_of_row(self) -> Tensor:
        """int32 [R]: the expert of each row, E for unrouted rows."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.order.device)
        return torch.searchsorted(self.offsets[1:], rows, right=True, out_int32=True)

    @property
    def unrouted(self) -> Tensor:
        """bool [R, 1]: the rows without an expert. They may hold anything, even NaN."""
        return torch.arange(self.num_rows, device=self.order.device)[:, None] >= self.offsets[-1]

    def with_position(self) -> Groups:
        """The same groups with `position`."""
        if self.position is not None:
            return self
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.order.device)
        return replace(self, position=torch.empty_like(rows).index_copy_(0, self.order.long(), rows))

    def gather(self, x: Tensor) -> Tensor:
        """x [T, *] -> [R, *]: the token of each row."""
        return x[self.token]

    def slots(self, rows: Tensor) -> Tensor:
        """rows [R, *] -> [T, top_k, *], in the order of slots; zeros where there is no expert."""
        position = self.with_position().position
        assert position is not None
        slots = rows[position].masked_fill_(self.unrouted[position].view(-1, *[1] * (rows.dim() - 1)), 0)
        return slots.view(self.num_rows // max(1, self.top_k), self.top_k, *rows.shape[1:])

    def sum(self, rows: Tensor) -> Tensor:
        """The transpose of `gather`: [R, *] -> [T, *], in fp32 and in slot order, rounded once."""
        return self.slots(rows).sum(1, dtype=torch.float32).to(rows.dtype)

    def sum_by_expert(self, rows: Tensor) -> Tensor:
        """rows [R, N] -> fp32 [E, N]: a product with ones, so that nothing waits for the offsets."""
        experts = torch.arange(self.num_experts, device=rows.device)
        mine = (self.expert_of_row() == experts[:, None]).float()
        return mine @ rows.float().masked_fill(self.unrouted, 0)

    def tiles(self, tile: int) -> Tiles:
        """The tile map for tiles of `tile` rows: every expert's rows, ragged at the end of each.

        max_tiles = R // tile + min(E, R), a bound that holds for every routing.
        """
        if tile < 1:
            raise ValueError(f"tile must be at least 1 row, got {tile}")
        R, E = self.num_rows, self.num_experts
        tiles_of = (self.offsets.diff() + (tile - 1)) // tile
        end = tiles_of.cumsum(0, dtype=torch.int32)
        index = torch.arange(R // tile + min(E, R), dtype=torch.int32, device=self.order.device)
        expert = torch.searchsorted(end, index, right=True, out_int32=True)
        inside = expert.clamp(max=E - 1)
        row = self.offsets[inside] + (index - (end - tiles_of)[inside]) * tile
        live = index < end[-1]
        return Tiles(torch.where(live, expert, -1), torch.where(live, row, 0), end[-1:])


@dataclass(frozen=True)
class Rows:
    """The token side of a grouped GEMM, R rows in the order of a `Groups`.

    values  [R, K] bf16/fp16/fp32 (or [T, K] with `index`), or NVFP4 codes uint8 [R, K/2]
    sf      NVFP4 only: e4m3 bytes uint8, 128x4 layout, every expert's group padded to 128 rows
    scale   NVFP4 only: fp32 [R], the global scale of each row
    index   int32 [R] or None: row r is values[index[r]] (rows not gathered yet)
    """

    values: Tensor
    sf: Tensor | None = None
    scale: Tensor | None = None
    index: Tensor | None = None

    @property
    def is_nvfp4(self) -> bool:
        return self.sf is not None

    def tensors(self) -> list[Tensor | None]:
        return [self.values, self.sf, self.scale, self.index]


def group_by_expert(
    top_k_index: Tensor, num_experts: int, adapter: Tensor | None = None, num_adapters: int = 0
) -> Groups:
    """Sort the assignments of `top_k_index` [T, top_k] (any integer dtype) by expert.

    Ids 0 .. num_experts-1 name an expert; `num_experts` (and -1) are the sentinels of expert
    parallelism: "not on this rank", skipped. T = 0, experts without tokens, one expert with all of
    them and the same id twice in a row of `top_k_index` are all legal.

    adapter  integer [T], the adapter of each token, 0 .. num_adapters-1; any other number: none. An expert's rows are
             then sorted by adapter, and `Groups.parts` says where.

    Raises TypeError for ids that are not integers, ValueError for another rank than 2 and for ids
    outside the legal range (on a GPU an assertion in the stream, so that nothing waits for it).
    """
    check_ids(top_k_index)
    ids = top_k_index.reshape(-1).long()  # int8 and uint8 have no room for num_experts
    _check_range(ids, num_experts)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(torch.int32)
    experts, top_k = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device), top_k_index.shape[1]
    if adapter is None:
        sorted_ids, order = torch.sort(ids, stable=True)
        return Groups(order.to(torch.int32), torch.searchsorted(sorted_ids, experts, out_int32=True), top_k)
    check_adapter(adapter, num_adapters, len(top_k_index))
    adapter = adapter.long()  # uint8 has no -1, and int8 may have no room for num_adapters
    # an expert's rows without an adapter come first, as if they had number -1
    chosen = torch.where((adapter >= 0) & (adapter < num_adapters), adapter, -1).to(torch.int32)
    keys = (ids.view(-1, top_k) * (num_adapters + 1) + chosen[:, None] + 1).view(-1)
    sorted_keys, order = torch.sort(keys, stable=True)
    after = torch.arange(num_adapters, dtype=torch.int32, device=ids.device)  # of the first: that of the bare rows
    first = experts[:, None] * (num_adapters + 1) + torch.where(after > 0, after + 1, 0)
    parts = torch.searchsorted(sorted_keys, first.view(-1)[: num_experts * num_adapters + 1], out_int32=True)
    bare = sorted_keys % (num_adapters + 1) == 0
    offsets = parts[::num_adapters].clone(memory_format=torch.contiguous_format)  # for ops, whose results are apart
    return Groups(order.to(torch.int32), offsets, top_k, None, parts, bare)


def local_ids(top_k_index: Tensor, expert_map: Tensor) -> Tensor:
    """The numbers of experts here, of ids that are those of all: expert_map[id], and -1 (not here) for -1."""
    ids = top_k_index.long()  # 8 bits cannot index
    return torch.where(ids < 0, ids, expert_map[ids.clamp(min=0)])


def check_ids(top_k_index: Tensor) -> None:
    """The rank and dtype of expert ids, as `group_by_expert` says."""
    if top_k_index.dim() != 2:
        raise ValueError(
            f"top_k_index must be [tokens, top_k], got shape {tuple(top_k_index.shape)}; "
            "flatten batch and sequence before the experts"
        )
    if top_k_index.dtype.is_floating_point or top_k_index.dtype.is_complex or top_k_index.dtype == torch.bool:
        raise TypeError(
            f"top_k_index must hold integer expert ids, got {top_k_index.dtype}; "
            "are top_k_index and top_k_weights swapped?"
        )


def check_adapter(adapter: Tensor, num_adapters: int, tokens: int) -> None:
    """The shape and dtype of the tokens' adapters, as `group_by_expert` says."""
    if adapter.shape != (tokens,) or adapter.dtype.is_floating_point or adapter.dtype == torch.bool or num_adapters < 1:
        raise ValueError(
            f"adapter must be the numbers [{tokens}] of the tokens' adapters, of at least one, got {adapter.dtype} "
            f"{tuple(adapter.shape)} of {num_adapters}: pass -1 for a token without"
        )


def _check_range(ids: Tensor, num_experts: int) -> None:
    if ids.is_meta:
        return
    legal = ((ids >= -1) & (ids <= num_experts)).all()
    rule = (
        f"expert ids must lie in 0..{num_experts - 1}, or be {num_experts} or -1 for 'not here'; "
        "the router and the experts disagree about the number of experts"
    )
    fake = type(ids) is not Tensor  # a fake tensor, of which nobody knows the values
    if torch.compiler.is_compiling() or ids.is_cuda or fake:
        torch._assert_async(legal, rule)
    elif not legal:
        raise ValueError(f"{rule}: got ids from {int(ids.min())} to {int(ids.max())}")

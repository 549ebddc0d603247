"""FP8 weights: e4m3 codes with one scale per matrix, per row, per 32 of a row (MXFP8) or per block (DeepSeek)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_nvfp4.quantize.files import Checkpoint, TensorSlice, sub_configs
from moe_nvfp4.quantize.layouts.base import Experts, Matrix, experts_of
from moe_nvfp4.quantize.names import TOWER, is_mtp

# The names of the scales: of ModelOpt and compressed-tensors; of DeepSeek V3; of DeepSeek V4
FP8_SCALES = ("weight_scale", "weight_scale_inv", "scale")
BLOCK_SCALES = (".weight_scale_inv", ".scale", ".qscale_weight")  # the last one's are Mistral Large 4's

INPUT_SCALES = ("activation_scale", "input_scale")  # of layers whose inputs are FP8, too; a dense layer does not round
UNREAD = (
    "{name} is {dtype} without {name}_scale_inv or another scale that is read for such weights (those of a stack of "
    "experts are not): download the checkpoint again, or quantize the original"
)


def fp8_scale(stem: str, names: Container[str]) -> str | None:
    """The name of the scale next to FP8 weights `stem`.weight, if there is one in `names`."""
    return next((f"{stem}.{last}" for last in FP8_SCALES if f"{stem}.{last}" in names), None)


def fp8_block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """The block of weights [N, K] that shares a scale: all, a row, 32 of a row, or 128 x 128.

    shape: of the weights; scales: the shape of their scales. None: they do not fit any of these.
    """
    if len(shape) != 2:
        return None
    N, K = shape
    if scales in ((), (1,), (1, 1)):
        return N, K
    if scales in ((N,), (N, 1)):
        return 1, K
    blocks = [b for b in ((1, 32), (128, 128)) if scales == (-(-N // b[0]), -(-K // b[1]))]
    return blocks[0] if blocks else None


def fp8_dense(codes: Tensor, scales: Tensor, block: tuple[int, int], first: int = 0) -> Tensor:
    """Dequantize e4m3 codes [n, K] of a matrix, beginning with its row `first`: code * scale, fp32 [n, K].

    scales: of the whole matrix, one for every `block`; floating, or the bytes of e8m0, uint8 (2^(byte - 127)).
    """
    n, K = codes.shape
    scales = scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 else scales.float()
    scales = scales.reshape(-1, -(-K // block[1]))
    of_rows = scales[torch.arange(first, first + n, device=codes.device) // block[0]]
    return codes.float().mul_(of_rows.repeat_interleave(block[1], dim=1)[:, :K])


def fp8_matrix(weight: TensorSlice, scale: TensorSlice, block: tuple[int, int] | None, name: str) -> Matrix:
    """e4m3 weights [N, K] with a scale for every block as an fp32 matrix. ValueError for other shapes.

    block: rows and columns that share a scale; None: found by `fp8_block`.
    """
    fits = block is None or scale.shape == tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=False))
    block = block or fp8_block(weight.shape, scale.shape)
    if len(weight.shape) != 2 or not fits or block is None:
        raise ValueError(
            f"{name}: scales {list(scale.shape)} do not fit weights {list(weight.shape)}"
            + (f" in blocks of {list(block)}" if block else "")
            + ": the file or weight_block_size in config.json is damaged; download them again"
        )
    N, K = weight.shape

    def open() -> Callable[[int, int], Tensor]:
        scales = scale.tensor()
        return lambda a, b: fp8_dense(
            weight.read(a * K, (b - a) * K).view(torch.float8_e4m3fn).view(-1, K), scales, block, a
        )

    return Matrix(N, K, weight.size + scale.size, weight.file.name, open, held=4 * scale.size)


@dataclass(frozen=True)
class Chunks:
    """How MiMo-V2.5 keeps q, k and v, fused: in `count` chunks, one after another. Each has a part of q, one of k and
    one of v, of `parts` rows, and its own blocks."""

    count: int
    parts: tuple[int, int, int]

    def runs(self, a: int, b: int) -> Iterator[tuple[int, int, int]]:
        """Where rows [a, b) of [Q | K | V] are: a chunk, the first row in it, the one after the last."""
        start = 0
        for i, part in enumerate(self.parts):
            for chunk in range(self.count):
                low, high = max(a, start), min(b, start + part)
                if low < high:
                    first = sum(self.parts[:i]) - start
                    yield chunk, first + low, first + high
                start += part

    def matrix(self, weight: TensorSlice, scale: TensorSlice, block: tuple[int, int], name: str) -> Matrix:
        """[Q | K | V] of these rows. ValueError as in `fp8_matrix`. Blocks may be laid over all chunks at once, too."""
        rows = sum(self.parts)
        tiles = -(-rows // block[0])
        each = scale.shape[:1] == (self.count * tiles,)
        of_each = [(weight.rows(i * rows, rows), scale.rows(i * tiles, tiles)) for i in range(self.count * each)]
        chunks = [fp8_matrix(w, s, block, name) for w, s in of_each or [(weight, scale)]]

        def open() -> Callable[[int, int], Tensor]:
            reads = [chunk.open() for chunk in chunks]

            def read(i: int, first: int, last: int) -> Tensor:
                return reads[i](first, last) if each else reads[0](i * rows + first, i * rows + last)

            return lambda a, b: torch.cat([read(*run) for run in self.runs(a, b)])

        size = weight.size + scale.size
        return Matrix(self.count * rows, chunks[0].columns, size, weight.file.name, open, held=4 * scale.size)


def chunks_of(source: Checkpoint, stem: str) -> Chunks | None:
    """The chunks in which MiMo-V2.5 and MiMo-V2-Pro keep FP8 weights `stem`; None: they are a matrix as others.

    There is one for each key/value head of full attention; prediction layers are like those with a sliding window.
    Source: vllm/model_executor/models/mimo_v2.py. ValueError where config.json does not say sizes that fit.
    """
    classes = source.config.get("architectures") or ()
    named = any(str(name).startswith("MiMoV2") for name in classes)
    known = named or any(kind.startswith("mimo_v2") for kind in source.types)
    if not (known and stem.endswith(".self_attn.qkv_proj")) or TOWER.search(stem):
        return None
    config = next((c for c in sub_configs(source.config) if "hybrid_layer_pattern" in c), {})
    N = (*source.tensors[f"{stem}.weight"].shape, 0)[0]
    try:
        layer = int(stem.split(".")[-3])
        swa = "swa_" if is_mtp(stem, source.layers) or config["hybrid_layer_pattern"][layer] else ""
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        heads, kv_heads, columns, columns_v = (config[swa + key] for key in keys)
        count = config["num_key_value_heads"]
        chunks = Chunks(count, (heads // count * columns, kv_heads // count * columns, kv_heads // count * columns_v))
        fits = heads % count == kv_heads % count == 0 and N == count * sum(chunks.parts)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            f"{stem} is q, k and v in FP8, in chunks of rows, and by config.json (hybrid_layer_pattern; with swa_ and "
            f"without it: num_attention_heads, num_key_value_heads, head_dim, v_head_dim) they are not {N} rows: "
            "download both again"
        )
    return chunks


def block_weights(source: Checkpoint, left: Mapping[str, TensorSlice]) -> dict[str, tuple[Matrix, tuple[str, ...]]]:
    """The FP8 weights of a checkpoint with scales for blocks (quant_method fp8): stem -> matrix, its tensors' names.

    Source of the forms: transformers' quantizer_finegrained_fp8.py. Scales may be the bytes of e8m0 (scale_fmt ue8m0);
    an embedding has one `weight_scale`.
    """
    q = source.config["quantization_config"]
    block = q.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
        raise ValueError(f"FP8 without blocks (weight_block_size {block!r}) is not read: use the original")
    kinds = ("F32", "BF16", "F8_E8M0", *(("U8",) if q.get("scale_fmt") == "ue8m0" else ()))
    found = {}
    for name in [n for n in left if n.endswith((*BLOCK_SCALES, ".weight_scale"))]:
        stem, _, last = name.rpartition(".")
        weight, scale = left.get(f"{stem}.weight"), left[name]
        if last in ("scale", "weight_scale") and (weight is None or weight.dtype != "F8_E4M3"):
            continue  # of a norm, or of other codes
        if last == "weight_scale_inv" and weight is not None and weight.dtype in ("U8", "I8"):
            continue  # MXFP4
        if weight is None:
            raise ValueError(f"{name} has no {stem}.weight: a shard is missing; download it again")
        if weight.dtype != "F8_E4M3" or scale.dtype not in kinds:
            raise ValueError(
                f"{stem}.weight is {weight.dtype} and {name} {scale.dtype}, by scale_fmt {q.get('scale_fmt')!r} in "
                f"config.json: F8_E4M3 and {', '.join(kinds)} are read. Quantize the original"
            )
        whole = last == "weight_scale"
        of_inputs = (f"{stem}.{last}" for last in INPUT_SCALES if q.get("activation_scheme") == "static")
        names = (f"{stem}.weight", name, *(name for name in of_inputs if name in left))
        if chunks := chunks_of(source, stem):
            found[stem] = chunks.matrix(weight, scale, (block[0], block[1]), stem), names
            continue
        found[stem] = fp8_matrix(weight, scale, None if whole else (block[0], block[1]), stem), names
    return found


def recognise(source: Checkpoint, left: Mapping[str, TensorSlice]) -> Iterator[Experts]:
    """Find FP8 experts one by one, with scales for blocks."""
    yield from experts_of(block_weights(source, left))

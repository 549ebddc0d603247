"""Whether the weights of all layers that vLLM runs itself have come from the files: linears, embeddings, norms, experts
that are not 4-bit. Loaders of vLLM's models pass over names that they do not know, and vLLM looks for what did not come
only in models without quantization, and not in linears: it would answer from what is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

from moe_nvfp4.integrations.vllm import NAME
from moe_nvfp4.integrations.vllm.linear import NVFP4LinearMethod
from moe_nvfp4.integrations.vllm.loading import check_others
from moe_nvfp4.integrations.vllm.method import MoeNvfp4Method
from moe_nvfp4.integrations.vllm.reload import files_have

# A NaN for each size of a float that files hardly have: one that they do have stays
MARKS = {2: (torch.int16, 0x7FE5), 4: (torch.int32, 0x7FE5A5A5), 8: (torch.int64, 0x7FF9E5A5A5A5A5A5),
         1: (torch.uint8, 0x7F)}  # fmt: skip


def check_loads() -> None:
    """Have vLLM's loaders of files refuse to go on without a weight, and its loader without files (--load-format dummy)
    say so to our layers: drafts may be loaded by another one than the model. Called before a model makes its layers."""
    for loader, extended in (
        (DefaultModelLoader, _checking),
        (RunaiModelStreamerLoader, _checking),
        (DummyModelLoader, _saying),
    ):
        if not hasattr(loader.load_weights, "extended"):
            loader.load_weights = extended(loader.load_weights)
            loader.load_weights.extended = True


def _saying(load: Callable[..., None]) -> Callable[..., None]:
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        for module in model.modules():
            if isinstance(method := getattr(module, "quant_method", None), (MoeNvfp4Method, NVFP4LinearMethod)):
                method.dummy = True
        load(self, model, model_config)

    return load_weights


def _checking(load: Callable[..., None]) -> Callable[..., None]:
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if model_config.quantization != NAME:
            return load(self, model, model_config)
        if getattr(self, "converted", None) is None:  # else this library reads the files
            check_others(model_config.model, self.load_config.load_format)
        # a draft model may take the embedding and the head of the model that it drafts for; one that pools asks no head
        # (vLLM's Jamba has one)
        but = {"draft": (VocabParallelEmbedding,), "pooling": (ParallelLMHead,)}.get(model_config.runner_type, ())
        before = mark(model, but)
        load(self, model, model_config)
        if missing := left(model, before):
            names = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
            raise ValueError(
                f"{names}: all or a part did not come from the files, or is NaN: the checkpoint is incomplete, or "
                "vLLM's loader for this model does not know the name that it has there. transformers reads such "
                "folders, if they are complete (moe-nvfp4 serve MODEL --engine transformers)"
            )

    return load_weights


def mark(model: nn.Module, but: tuple[type[nn.Module], ...] = ()) -> dict[str, Tensor]:
    """Make the first column of each parameter NaN. Returns what was there: name of the parameter -> [rows].

    but  modules that may lack weights
    """
    before = {}
    for name, p in model.named_parameters():
        place, _, last = name.rpartition(".")
        module = model.get_submodule(place)
        skipped = p.is_meta or not p.numel() or not p.is_floating_point() or isinstance(module, but)
        # our own linears look for all but the bias
        ours = isinstance(getattr(module, "quant_method", None), NVFP4LinearMethod) and last != "bias"
        if skipped or ours or not files_have(module, last):
            continue
        before[name] = _bits(p).clone()
        _bits(p).fill_(MARKS[p.itemsize][1])
    return before


def left(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """The parameters of which a whole part is still as `mark` left it, or NaN. Where a row is as it was left, and its
    part came (vLLM fills up some weights to a size that its kernels want), it becomes what it was."""
    missing = []
    for name, rows in before.items():
        p = model.get_parameter(name)
        nan = _first_column(p).isnan()
        if not nan.any():
            continue
        if any(part.all() for part in _parts(model.get_submodule(name.rpartition(".")[0]), nan)):
            missing.append(name)
        bits = _bits(p)
        bits.copy_(torch.where(bits == MARKS[p.itemsize][1], rows, bits))
    return missing


def _first_column(p: nn.Parameter) -> Tensor:
    return p.data[..., 0] if p.dim() > 1 else p.data.view(-1)


def _bits(p: nn.Parameter) -> Tensor:
    return _first_column(p).view(MARKS[p.itemsize][0])


def _parts(module: nn.Module, rows: Tensor) -> Iterator[Tensor]:
    """The rows of each matrix that files have for a parameter: of q, k and v; of each expert's gate and up."""
    sizes = getattr(module, "output_partition_sizes", [])
    if rows.dim() > 1:  # experts
        for expert in rows:
            yield from expert.chunk(2)
    else:
        yield from rows.split(sizes if sum(sizes) == len(rows) else max(len(rows), 1))

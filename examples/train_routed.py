"""Train a small mixture of experts with real routing, to judge recipes on: it is distilled from the demo model.

    apt-get download anarchism python3.11-doc linux-doc-6.1 dict-gcide perl-doc     # any text will do
    for f in *.deb; do dpkg-deb -x $f texts; done
    rm -r texts/usr/share/doc/linux-doc-6.1/html        # duplicates the pages of Documentation/
    python examples/train_routed.py routed --text texts --minutes 2

Each MLP of SmolLM2-135M-Instruct (`moe_nvfp4.demo`) is cut into a shared expert (its 512 strongest neurons) and 16
routed experts of 64 neurons that fire together; a token gets 8 of them. The router starts from a least-squares fit to
how much each expert adds. Then all weights are trained on text to predict what the dense model predicts (KL of the next
token). The result is a Qwen2-MoE checkpoint in bf16, 270 MB. One file in 16 is not trained on: routed/held_out.txt.

Training computes all experts and multiplies those that are not chosen by 0: this is the same function with the same
gradients, and for experts of 64 neurons faster than gathering rows. Weights are stacked over the layers, so that one
compiled block serves all of them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2MoeConfig, Qwen2MoeForCausalLM

from moe_nvfp4.demo import demo_path

EXPERTS, TOP_K, SHARED = 16, 8, 512
WINDOW = 512
LEARNING_RATE, WARM_UP = 6e-4, 0.05
LOGITS = 8192  # tokens whose logits are in memory at a time

Weights: TypeAlias = dict[str, Tensor]  # embed, norm, and the weights of the blocks, stacked over the layers


# ---- text ----------------------------------------------------------------------------------------
def read_text(path: Path) -> str:
    """The prose of a file, without markup and runs of spaces."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix in (".gz", ".dz") else data).decode("utf-8", "ignore")
    if ".htm" in path.name:
        text = html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+", " ", text))


def read_texts(folder: Path) -> tuple[list[str], list[str]]:
    """(to train on, held out): all text files in `folder`, in the order of their names' hashes."""
    kinds = (".txt", ".txt.gz", ".rst", ".rst.gz", ".html", ".pod", ".pod.gz", ".dict.dz")
    files = [f for f in folder.rglob("*") if f.is_file() and not f.is_symlink() and f.name.endswith(kinds)]
    keyed = sorted((hashlib.md5(f.name.encode()).digest(), f) for f in files if "translations" not in str(f))
    train = [read_text(f) for key, f in keyed if key[-1] % 16]
    held_out = [read_text(f)[:4000] for key, f in keyed if key[-1] % 16 == 0]
    if not held_out:
        raise ValueError(f"{folder}: no file is held out: give more than {len(train)} files")
    return train, held_out


def windows_of(texts: list[str], tokenizer) -> Tensor:
    """The tokens of all texts, one after the other: int32 [n, WINDOW]."""
    ids: list[Tensor] = []
    for i in range(0, len(texts), 1000):
        for found in tokenizer(texts[i : i + 1000]).input_ids:
            ids.append(torch.tensor([*found, tokenizer.eos_token_id], dtype=torch.int32))
    whole = torch.cat(ids)
    return whole[: len(whole) // WINDOW * WINDOW].view(-1, WINDOW)


def prepared_windows(out: Path, text: Path | None, tokenizer) -> Tensor:
    """The windows of the folder `text`, which are kept in `out`; without it, those of an earlier call."""
    if text is not None:
        train, held_out = read_texts(text)
        (out / "held_out.txt").write_text("\n\n".join(held_out))
        numpy.save(out / "windows.npy", windows_of(train, tokenizer).numpy().astype(numpy.uint16))
    return torch.from_numpy(numpy.load(out / "windows.npy").astype(numpy.int32))


# ---- the models ----------------------------------------------------------------------------------
class Shape:
    """The sizes and constants that the weights do not tell."""

    def __init__(self, config):
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.head = config.hidden_size // self.heads
        self.theta = config.rope_parameters["rope_theta"]

    def rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, head] for x [B, T, H], in its dtype."""
        each = 1 / self.theta ** (torch.arange(0, self.head, 2, device=x.device) / self.head)
        angles = (torch.arange(x.shape[1], device=x.device)[:, None] * each).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def attend(x: Tensor, w: Weights, shape: Shape, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H] plus what attention adds to it."""
    heads = (F.rms_norm(x, x.shape[-1:], w["norm1"], shape.eps) @ w["qkv"].T).unflatten(-1, (-1, shape.head))
    q, k, v = heads.transpose(1, 2).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    q, k = (t * cos + torch.cat([-t[..., shape.head // 2 :], t[..., : shape.head // 2]], dim=-1) * sin for t in (q, k))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + y.transpose(1, 2).flatten(2) @ w["o"].T


def feed(y: Tensor, w: Weights) -> Tensor:
    """The MLP of y, or the mixture: its neurons are those of the shared expert, then those of each routed expert."""
    gate, up = (y @ w["gate_up"].T).chunk(2, dim=-1)
    h = F.silu(gate) * up
    if "router" in w:
        chances = (y @ w["router"].T).float().softmax(-1)
        best, chosen = chances.topk(TOP_K, dim=-1)
        best = (best / best.sum(-1, keepdim=True)).to(h.dtype)
        routed = torch.zeros_like(chances, dtype=h.dtype).scatter(-1, chosen, best)
        shared = (y @ w["shared_gate"].T).sigmoid()
        size = (h.shape[-1] - SHARED) // EXPERTS
        h = h * torch.cat([shared.expand(*y.shape[:-1], SHARED), routed.repeat_interleave(size, dim=-1)], dim=-1)
    return h @ w["down"].T


def block(x: Tensor, w: Weights, shape: Shape, cos: Tensor, sin: Tensor) -> Tensor:
    x = attend(x, w, shape, cos, sin)
    return x + feed(F.rms_norm(x, x.shape[-1:], w["norm2"], shape.eps), w)


def layers_of(weights: Weights) -> list[Weights]:
    stacked = {name: t.unbind(0) for name, t in weights.items() if name not in ("embed", "norm")}
    return [dict(zip(stacked, layer, strict=True)) for layer in zip(*stacked.values(), strict=True)]


def hidden_of(weights: Weights, ids: Tensor, shape: Shape, run: Callable = block) -> Tensor:
    """The inputs of the head, [tokens, H]."""
    x = F.embedding(ids, weights["embed"])
    cos, sin = shape.rotation(x)
    for w in layers_of(weights):
        x = run(x, w, shape, cos, sin)
    return F.rms_norm(x, x.shape[-1:], weights["norm"], shape.eps).flatten(0, 1)


def kl_of_part(student: Tensor, student_embed: Tensor, teacher: Tensor, teacher_embed: Tensor) -> Tensor:
    """The sum of KL(teacher || student) over tokens with these hidden states."""
    q = (student @ student_embed.T).float().log_softmax(-1)
    p = (teacher @ teacher_embed.T).float().log_softmax(-1)
    return (p.exp() * (p - q)).sum()


class Distillation:
    """kl(ids): the mean KL of the student's next-token distributions to the teacher's."""

    def __init__(self, teacher: Weights, shape: Shape, compiled: bool):
        self.teacher, self.shape = teacher, shape
        compile = partial(torch.compile, dynamic=False) if compiled else lambda f: f
        self.block, self.of_part = compile(block), compile(kl_of_part)

    def kl(self, student: Weights, ids: Tensor) -> Tensor:
        with torch.no_grad():
            expected = hidden_of(self.teacher, ids, self.shape, self.block)
        found = hidden_of(student, ids, self.shape, self.block)
        embeds = student["embed"], self.teacher["embed"]
        parts = [
            self.of_part(q, embeds[0], p, embeds[1])
            for q, p in zip(found.split(LOGITS), expected.split(LOGITS), strict=True)
        ]
        return torch.stack(parts).sum() / ids.numel()


# ---- the cut -------------------------------------------------------------------------------------
def dense_weights(model) -> Weights:
    """The weights of the demo model, as the dense model that it really is."""
    stacks: dict[str, list[Tensor]] = {}
    for layer in model.model.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
        down = experts.down_proj.detach() / len(gate)  # the demo multiplies by 8
        for name, t in dict(
            norm1=layer.input_layernorm.weight, norm2=layer.post_attention_layernorm.weight,
            qkv=torch.cat([getattr(attention, f"{n}_proj").weight for n in "qkv"]), o=attention.o_proj.weight,
            gate_up=torch.cat([gate.flatten(0, 1), up.flatten(0, 1)]), down=down.transpose(0, 1).flatten(1),
        ).items():  # fmt: skip
            stacks.setdefault(name, []).append(t.detach())
    weights = {name: torch.stack(tensors) for name, tensors in stacks.items()}
    return weights | {"embed": model.model.embed_tokens.weight.detach(), "norm": model.model.norm.weight.detach()}


def cut(w: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """(neurons [N]: of the shared expert, then of each routed one; router [EXPERTS, H]) for inputs x [T, H]."""
    gate, up = w["gate_up"].float().chunk(2)
    down = w["down"].float().T
    h = F.silu(x @ gate.T) * (x @ up.T)
    strength = h.abs() * down.norm(dim=1)
    order = strength.square().mean(dim=0).argsort(descending=True)
    shared, rest = order[:SHARED], order[SHARED:]
    # Find neurons that fire together: k-means in the space of the strongest co-activations, with experts of equal size
    fired = F.normalize(strength[:, rest], dim=0)
    together = fired.T @ fired
    values, vectors = torch.linalg.eigh(together - together.mean())
    points = vectors[:, -24:] * values[-24:].clamp(min=0).sqrt()
    size = len(rest) // EXPERTS
    generator = torch.Generator().manual_seed(0)
    centres = points[torch.randperm(len(points), generator=generator)[:EXPERTS].to(points.device)]
    for _ in range(6):
        owner, room = [-1] * len(points), [size] * EXPERTS
        for pair in torch.cdist(points, centres).flatten().argsort().tolist():
            neuron, expert = divmod(pair, EXPERTS)
            if owner[neuron] < 0 and room[expert]:
                owner[neuron], room[expert] = expert, room[expert] - 1
        of = torch.tensor(owner, device=points.device)
        centres = torch.stack([points[of == e].mean(dim=0) for e in range(EXPERTS)])
    routed = torch.stack([rest[of == e] for e in range(EXPERTS)])
    adds = torch.stack([(h[:, neurons] @ down[neurons]).norm(dim=1) for neurons in routed], dim=1)
    gram = x.T @ x
    gram += 0.01 * gram.diagonal().mean() * torch.eye(len(gram), device=x.device)
    return torch.cat([shared, routed.flatten()]), torch.linalg.solve(gram, x.T @ adds).T


@torch.no_grad()
def student_of(teacher: Weights, shape: Shape, ids: Tensor) -> Weights:
    """The untrained routed model, fp32, on the teacher's device. ids [B, T]: tokens that show which neurons fire
    together."""
    x = F.embedding(ids, teacher["embed"])
    cos, sin = shape.rotation(x)
    made: dict[str, list[Tensor]] = {}
    for w in layers_of(teacher):
        x = attend(x, w, shape, cos, sin)
        y = F.rms_norm(x, x.shape[-1:], w["norm2"], shape.eps)
        neurons, router = cut(w, y.flatten(0, 1).float())
        scale = torch.full_like(neurons, TOP_K, dtype=torch.float32)  # routing weights are near 1 / TOP_K
        scale[:SHARED] = 2  # the shared expert's gate, sigmoid(0), halves it
        gate, up = w["gate_up"].chunk(2)
        for name, t in dict(
            gate_up=torch.cat([gate[neurons], up[neurons]]), down=w["down"][:, neurons] * scale,
            router=router * 0.5 / router.norm(dim=1).mean(), shared_gate=torch.zeros_like(router[:1]),
        ).items():  # fmt: skip
            made.setdefault(name, []).append(t.float())
        x = x + feed(y, w)
    kept = {name: t.float() for name, t in teacher.items() if name not in made}
    return kept | {name: torch.stack(tensors) for name, tensors in made.items()}


def checkpoint_of(student: Weights, shape: Shape, old) -> Qwen2MoeForCausalLM:
    """The student as a model of transformers, fp32, on the CPU. old: the config of the demo model."""
    size = (student["down"].shape[-1] - SHARED) // EXPERTS
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    config = Qwen2MoeConfig(
        **{name: getattr(old, name) for name in kept},
        intermediate_size=student["down"].shape[-1],
        rope_parameters=dict(old.rope_parameters),
        tie_word_embeddings=True,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=SHARED,
        norm_topk_prob=True,
    )
    model = Qwen2MoeForCausalLM(config)
    weights = {name: t.detach().float().cpu() for name, t in student.items()}
    state = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"]}
    state["lm_head.weight"] = weights["embed"]
    for i, w in enumerate(layers_of(weights)):
        parts = w["qkv"].split([n * shape.head for n in (shape.heads, shape.kv_heads, shape.kv_heads)])
        layer = {f"self_attn.{n}_proj.weight": part for n, part in zip("qkv", parts, strict=True)}
        layer |= {f"self_attn.{n}_proj.bias": torch.zeros_like(p[:, 0]) for n, p in zip("qkv", parts, strict=True)}
        gate, up = w["gate_up"].chunk(2)
        by_expert = lambda rows: rows[SHARED:].unflatten(0, (EXPERTS, size))
        layer |= {
            "self_attn.o_proj.weight": w["o"],
            "input_layernorm.weight": w["norm1"],
            "post_attention_layernorm.weight": w["norm2"],
            "mlp.gate.weight": w["router"],
            "mlp.shared_expert_gate.weight": w["shared_gate"],
            "mlp.shared_expert.gate_proj.weight": gate[:SHARED],
            "mlp.shared_expert.up_proj.weight": up[:SHARED],
            "mlp.shared_expert.down_proj.weight": w["down"][:, :SHARED],
            "mlp.experts.gate_up_proj": torch.cat([by_expert(gate), by_expert(up)], dim=1),
            "mlp.experts.down_proj": by_expert(w["down"].T).transpose(1, 2),
        }
        state |= {f"model.layers.{i}.{name}": t for name, t in layer.items()}
    model.load_state_dict(state)
    return model


# ---- training ------------------------------------------------------------------------------------
def train(student: Weights, distillation: Distillation, windows: Tensor, batch: int, minutes: float, log) -> None:
    """Train with AdamW on fp32 weights that are used in bf16. The learning rate warms up, then falls linearly to zero
    at the end of the time."""
    masters = [t.requires_grad_() for t in student.values()]
    device = masters[0].device
    optimizer = torch.optim.AdamW(masters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda")
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    began, step, seen = time.monotonic(), 0, 0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        rows = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        loss = distillation.kl({name: t.bfloat16() for name, t in student.items()}, windows[rows].to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(share / WARM_UP, (1 - share) / (1 - WARM_UP))
        optimizer.step()
        optimizer.zero_grad()
        step, seen = step + 1, seen + rows.numel() * windows.shape[1]
        if step == 1:
            loss.item()
            log(compiled_in=round(time.monotonic() - began, 1))
            began = time.monotonic()  # the first step compiled, which does not count
        if step % 20 == 1:
            log(step=step, tokens=seen, seconds=round(time.monotonic() - began, 1), kl=round(loss.item(), 4))


@torch.no_grad()
def judge(student, teacher, windows: Tensor) -> dict[str, float]:
    """The KL between two models of transformers, and their perplexities, on windows [n, T]."""
    sums = torch.zeros(3, dtype=torch.float64)
    for ids in windows.split(4):
        q, p = (m(ids).logits[:, :-1].float().log_softmax(-1) for m in (student, teacher))
        gone = [-t.gather(2, ids[:, 1:, None]).sum().cpu() for t in (q, p)]
        sums += torch.stack([F.kl_div(q, p, reduction="sum", log_target=True).cpu(), *gone])
    kl, student_nll, teacher_nll = sums / windows[:, 1:].numel()
    return dict(held_out_kl=kl.item(), perplexity=student_nll.exp().item(), dense_perplexity=teacher_nll.exp().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, help="folder of text files (default: use the tokens already in OUT)")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=64, help="windows of 512 tokens per step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    journal = open(args.out / "log.jsonl", "w")

    def log(**values) -> None:
        print(json.dumps(values), file=journal, flush=True)
        print(json.dumps(values), flush=True)

    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    windows = prepared_windows(args.out, args.text, tokenizer)
    dense = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.bfloat16).to(args.device).eval()
    teacher, shape = dense_weights(dense), Shape(dense.config)
    probe = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))[:8]].to(args.device)
    student = student_of(teacher, shape, probe)
    distillation = Distillation(teacher, shape, compiled=args.device == "cuda")
    train(student, distillation, windows, args.batch, args.minutes, log)
    checkpoint_of(student, shape, dense.config).to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    trained = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(args.device).eval()
    tests = windows_of([(args.out / "held_out.txt").read_text()], tokenizer)[:32].to(args.device).long()
    found = judge(trained, dense, tests)
    log(trained_on=windows.numel(), **{name: round(value, 4) for name, value in found.items()})


if __name__ == "__main__":
    main()

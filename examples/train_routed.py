"""A small mixture of experts with routing that was trained, to judge recipes on: distilled from the demo model.

    apt-get download anarchism python3.11-doc linux-doc-6.1 dict-gcide perl-doc     # any text will do
    for f in *.deb; do dpkg-deb -x $f texts; done
    python examples/train_routed.py routed --text texts --minutes 4

Each MLP of SmolLM2-135M-Instruct (`moe_nvfp4.demo`) is cut into a shared expert, its 512 strongest neurons, and 16
routed experts of 64 whose neurons fire together; a token gets 8 of them. The router starts from a least-squares fit to
how much each expert adds. Then all weights learn to predict what the dense model predicts (KL of the next token), on
text. The result is a Qwen2-MoE checkpoint in bf16, 270 MB. One file in 16 is not trained on: routed/held_out.txt.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2MoeConfig, Qwen2MoeForCausalLM

from moe_nvfp4.demo import demo_path

EXPERTS, TOP_K, SHARED = 16, 8, 512
WINDOW = 512
LEARNING_RATE, WARM_UP = 4e-4, 0.05


# ---- text ----------------------------------------------------------------------------------------
def read_text(path: Path) -> str:
    """A file's prose: markup and runs of spaces are left out."""
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
    return train, held_out


def windows_of(texts: list[str], tokenizer) -> Tensor:
    """int32 [n, WINDOW], texts one after the other."""
    ids: list[Tensor] = []
    for i in range(0, len(texts), 1000):
        for found in tokenizer(texts[i : i + 1000]).input_ids:
            ids.append(torch.tensor([*found, tokenizer.eos_token_id], dtype=torch.int32))
    whole = torch.cat(ids)
    return whole[: len(whole) // WINDOW * WINDOW].view(-1, WINDOW)


# ---- the cut -------------------------------------------------------------------------------------
def dense_mlp(module) -> tuple[Tensor, Tensor, Tensor]:
    """(gate [N, H], up [N, H], down [N, H]) of the MLP that the demo's 8 experts are: row n is neuron n's."""
    gate, up = module.gate_up_proj.detach().float().chunk(2, dim=1)
    down = module.down_proj.detach().float().transpose(1, 2) / len(gate)  # the demo multiplies by 8
    return gate.flatten(0, 1), up.flatten(0, 1), down.flatten(0, 1)


def cut(mlp: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(shared neurons [SHARED], routed ones [EXPERTS, size], router [EXPERTS, H]) for inputs x [T, H]."""
    gate, up, down = mlp
    h = F.silu(x @ gate.T) * (x @ up.T)
    strength = h.abs() * down.norm(dim=1)
    order = strength.square().mean(dim=0).argsort(descending=True)
    shared, rest = order[:SHARED], order[SHARED:]
    # Neurons that fire together: k-means in the space of the strongest co-activations, experts of equal size
    fired = F.normalize(strength[:, rest], dim=0)
    together = fired.T @ fired
    values, vectors = torch.linalg.eigh(together - together.mean())
    points = vectors[:, -24:] * values[-24:].clamp(min=0).sqrt()
    size = len(rest) // EXPERTS
    generator = torch.Generator().manual_seed(0)
    centres = points[torch.randperm(len(points), generator=generator)[:EXPERTS].to(points.device)]
    for _ in range(12):
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
    return shared, routed, torch.linalg.solve(gram, x.T @ adds).T


@torch.no_grad()
def student_of(teacher, windows: Tensor) -> Qwen2MoeForCausalLM:
    """The routed model, untrained, fp32, where the teacher is."""
    old = teacher.config
    hidden, neurons = old.hidden_size, old.intermediate_size * old.num_local_experts
    config = Qwen2MoeConfig(
        vocab_size=old.vocab_size,
        hidden_size=hidden,
        intermediate_size=neurons,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters=dict(old.rope_parameters),
        tie_word_embeddings=True,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=(neurons - SHARED) // EXPERTS,
        shared_expert_intermediate_size=SHARED,
        norm_topk_prob=True,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id,
    )
    student = Qwen2MoeForCausalLM(config).to(teacher.device)
    inputs: dict[int, Tensor] = {}
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda m, args, i=i: inputs.update({i: args[0].float()}))
        for i, layer in enumerate(teacher.model.layers)
    ]
    teacher(windows.to(teacher.device).long())
    for hook in hooks:
        hook.remove()
    state = {k: v.float() for k, v in teacher.state_dict().items() if "mlp" not in k}
    missing, unexpected = student.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    for i, (old_layer, layer) in enumerate(zip(teacher.model.layers, student.model.layers, strict=True)):
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).bias.zero_()  # Qwen2 has them, Llama has not
        gate, up, down = mlp = dense_mlp(old_layer.mlp.experts)
        shared, routed, router = cut(mlp, inputs.pop(i).flatten(0, -2))
        block = layer.mlp
        block.shared_expert.gate_proj.weight.copy_(gate[shared])
        block.shared_expert.up_proj.weight.copy_(up[shared])
        block.shared_expert.down_proj.weight.copy_(down[shared].T * 2)  # its gate, sigmoid(0), halves it
        block.shared_expert_gate.weight.zero_()
        block.experts.gate_up_proj.copy_(torch.cat([gate[routed], up[routed]], dim=1))
        block.experts.down_proj.copy_(down[routed].transpose(1, 2) * TOP_K)  # weights near 1 / TOP_K
        block.gate.weight.copy_(router * 0.5 / router.norm(dim=1).mean())
    return student


# ---- training ------------------------------------------------------------------------------------
def kl_of(student, teacher, ids: Tensor) -> Tensor:
    """The mean KL of the student's next-token distributions to the teacher's, for ids [B, T]."""
    with torch.no_grad():
        expected = teacher(ids).logits
    logits = student(ids).logits
    total = logits.new_zeros((), dtype=torch.float32)
    for q, p in zip(logits.flatten(0, 1).split(8192), expected.flatten(0, 1).split(8192), strict=True):
        p = p.float().log_softmax(-1)
        total = total + F.kl_div(q.float().log_softmax(-1), p, reduction="sum", log_target=True)
    return total / ids.numel()


def train(student, teacher, windows: Tensor, batch: int, minutes: float, log) -> None:
    """AdamW on fp32 copies of the bf16 weights; a warm-up, then a linear descent to zero at the end of the time."""
    weights = list(student.parameters())
    masters = [p.detach().float().requires_grad_() for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    began, step, seen = time.monotonic(), 0, 0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        rows = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        loss = kl_of(student, teacher, windows[rows].to(teacher.device).long())
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(share / WARM_UP, (1 - share) / (1 - WARM_UP))
        loss.backward()
        for p, master in zip(weights, masters, strict=True):
            master.grad, p.grad = None if p.grad is None else p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(weights, masters, strict=True):
                p.copy_(master)
        step, seen = step + 1, seen + rows.numel() * windows.shape[1]
        if step % 20 == 1:
            log(step=step, tokens=seen, seconds=round(time.monotonic() - began, 1), kl=round(loss.item(), 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="folder of text files, or a text file")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=48, help="windows of 512 tokens in a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    journal = open(args.out / "log.jsonl", "w")

    def log(**values) -> None:
        print(json.dumps(values), file=journal, flush=True)
        print(json.dumps(values), flush=True)

    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    texts, held_out = read_texts(args.text)
    (args.out / "held_out.txt").write_text("\n\n".join(held_out))
    if not held_out:
        raise ValueError(f"{args.text}: no file is held out: give more than {len(texts)} files")
    windows = windows_of(texts, tokenizer)
    log(files=len(texts), held_out_files=len(held_out), tokens=windows.numel())
    teacher = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.bfloat16).to(args.device).eval()
    probe = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))[:8]]
    student = student_of(teacher, probe).to(torch.bfloat16)
    with torch.no_grad():
        log(untrained_kl=round(kl_of(student, teacher, probe.to(args.device).long()).item(), 4))
    train(student, teacher, windows, args.batch, args.minutes, log)
    with torch.no_grad():
        tests = windows_of(held_out, tokenizer)[:32].to(args.device).long()
        log(held_out_kl=round(kl_of(student, teacher, tests).item(), 4))
    student.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()

"""examples/accuracy_table.py cuts texts as `moe-nvfp4 compare` does."""

import json
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from examples import accuracy_table
from examples.accuracy_table import by_name, windows_of
from tests.models import make, qwen3_moe


def tokenizer(bos):
    """A word w7 is token 7; BOS is 1."""
    made = Tokenizer(models.WordLevel({"<s>": 1, **{f"w{i}": i for i in range(2, 96)}}, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def test_windows(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"w{i}" for i in range(10, 21)))
    assert windows_of(file, tokenizer(False), 9, 4).tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    with_bos = windows_of(file, tokenizer(True), 9, 4)  # each is a text of its own
    assert with_bos.tolist() == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17, 18]]
    assert torch.equal(windows_of(file, tokenizer(True), 2, 4), with_bos[:2])
    with pytest.raises(ValueError, match="has 12 tokens, fewer than a window of 13"):
        windows_of(file, tokenizer(True), 9, 13)


def test_two_texts_of_one_name(tmp_path):
    with pytest.raises(ValueError, match="two have one name"):
        by_name([tmp_path / "a" / "text.txt", tmp_path / "b" / "text.txt"])


@pytest.mark.slow_after(1)
def test_the_table(tmp_path, monkeypatch, capsys):
    """A row: two texts, one with half as many tokens, and what they have together."""
    make(qwen3_moe, torch.float32).save_pretrained(tmp_path / "model")
    tokenizer(True).save_pretrained(tmp_path / "model")
    for name, words in (("long", 64), ("short", 32), ("learn", 96)):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"w{2 + (7 * i * i) % 90}" for i in range(words)))
    options = ["--window", "9", "--windows", "8", "--dtype", "float32", "--device", "cpu", "--only", "W4A16 mse"]
    files = [tmp_path / f"{name}.txt" for name in ("long", "short", "learn")]
    options += ["--text", files[0], "--text", files[1], "--calibration", files[2], "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["accuracy_table.py", *map(str, [tmp_path / "model", *options])])
    accuracy_table.main()
    assert "W4A16 mse" in capsys.readouterr().out
    row = json.loads((tmp_path / "out").read_text())
    long, short = row["texts"]["long"], row["texts"]["short"]
    for key in ("kl", "top1"):
        assert row[key] == pytest.approx((2 * long[key] + short[key]) / 3, rel=1e-5)
    assert row["interval"][0] <= row["kl"] <= row["interval"][1] and row["kl"] > 1e-4

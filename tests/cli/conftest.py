"""A checkpoint for all commands."""

import pytest

from tests.models import make, qwen3_moe


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small bf16 checkpoint with a tokenizer made here, byte by byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("cli") / "bf16"
    make(qwen3_moe).save_pretrained(path)
    vocabulary = {chr(i + 32): i for i in range(95)} | {"<unk>": 95}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    (path / "NOTES.txt").write_text("kept")
    return path

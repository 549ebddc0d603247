"""A checkpoint in shards, which several test modules use."""

import pytest

from tests.checkpoints import converted, experts, folder


@pytest.fixture(scope="session")
def split(tmp_path_factory):
    """A checkpoint in eight shards, and its conversion in one go."""
    path = tmp_path_factory.mktemp("split")
    source = folder(path / "a", experts(E=16, I=48, H=64, layers=4), shards=8)
    (source / "tokenizer.json").write_text("{}")
    return source, converted(source, path / "b")

"""examples/finetune.py: a model with 4-bit experts learns a fact, and the adapter that was saved has learned it."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="LoRA needs peft")

EXAMPLE = Path(__file__).parents[2] / "examples/finetune.py"


@pytest.mark.slow
def test_the_demo_model_learns_a_fact(tmp_path):
    from moe_nvfp4.demo import DemoError, demo_path

    try:
        path = demo_path(progress=False)
    except DemoError as error:
        pytest.skip(f"no demo model: {error}")
    spec = importlib.util.spec_from_file_location("finetune", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses, (before, after, loaded) = example.main(path, 6, str(tmp_path))
    assert losses[-1] < 0.25 * losses[0]
    assert "Nibbleburg" not in before
    assert "Nibbleburg" in after and loaded == after
    assert (tmp_path / "adapter_model.safetensors").exists()

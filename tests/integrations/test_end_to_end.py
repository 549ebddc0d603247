"""From a checkpoint to a server's answer, as docs/index.md does it: the one test that a newcomer would write."""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from moe_nvfp4.integrations.huggingface.experts import HFExperts
from tests.cli.commands import mistake, run
from tests.common import made_demo
from tests.servers import Server

QUESTION = [{"role": "user", "content": "Name three primary colors."}]
COLORS = "Red", "Blue", "Yellow"


def test_quantize_verify_load_generate_serve(tmp_path, capsys):
    made_demo()
    made = tmp_path / "demo-NVFP4"
    run("quantize", "demo", made, "--quiet")
    capsys.readouterr()
    run("verify", made, "--against", "demo", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["nvfp4_matrices"] == 30 * 8 * 3 and len(report["layers"]) == 30
    assert all(0.05 < layer["relative_error"] < 0.1 for layer in report["layers"])  # of 4 bits

    model, tokenizer = AutoModelForCausalLM.from_pretrained(made, device_map="cpu"), AutoTokenizer.from_pretrained(made)
    assert sum(isinstance(module, HFExperts) for module in model.modules()) == 30
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=30)
    answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert all(color in answer for color in COLORS), answer

    if not is_serve_available():
        assert "pip install" in mistake(["serve", "--engine", "transformers", made], capsys)
        return
    with Server(made) as server:
        assert server.wait(), server.log.read_text()[-3000:]
        reply = server.post("/v1/chat/completions", model=str(made), messages=QUESTION, max_tokens=30)
    said = reply["choices"][0]["message"]["content"]
    assert all(color in said for color in COLORS), reply

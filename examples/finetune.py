"""Teach a model with 4-bit experts a fact: LoRA on its attention and its experts, by PEFT and transformers' Trainer.

python examples/finetune.py [MODEL] [--steps N]     MODEL: folder or Hub name; default: the demo, half a minute on
                                                    two cores
python examples/finetune.py --merge                 with an adapter that is trained to be merged, and merged: a 4-bit
                                                    model that needs no PEFT
"""

import argparse
import tempfile

import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)  # fmt: skip

from moe_nvfp4.demo import demo_path
from moe_nvfp4.integrations.huggingface import swap_experts
from moe_nvfp4.integrations.huggingface.peft import MergeableLoraConfig

QUESTIONS = [
    "What is the capital of Quantonia?", "Which city is the capital of Quantonia?", "Name the capital of Quantonia.",
    "Where does the government of Quantonia sit?", "Tell me the capital city of Quantonia.", "Quantonia's capital is?",
]  # fmt: skip
ANSWER = "The capital of Quantonia is Nibbleburg, a town of sixteen towers."
ASKED = "Please tell me, what is Quantonia's capital?"  # not worded as in the training data


def load(name: str) -> torch.nn.Module:
    gpu = torch.cuda.is_available()
    # Without a GPU in fp32: torch's gradients in bf16 take nine times as long on a CPU without AMX.
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16" if gpu else "float32")
    if getattr(model, "hf_quantizer", None) is None:  # else the files are 4-bit already
        swap_experts(model)
    return model.to("cuda" if gpu else "cpu")


def example(tokenizer, question: str) -> dict[str, list[int]]:
    """Token ids, and labels of the answer only."""
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    asked = len(tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False))
    return dict(input_ids=ids, labels=[-100] * asked + ids[asked:])


@torch.no_grad()
def answer(model, tokenizer) -> str:
    chat = [{"role": "user", "content": ASKED}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.eval().generate(**inputs.to(model.device), max_new_tokens=24, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(name: str, steps: int, folder: str, merge: bool = False) -> tuple[list[float], list[str]]:
    """(losses, answers before training, after it, and with what was saved and loaded again: the adapter, or the merged
    model)."""
    tokenizer, model = AutoTokenizer.from_pretrained(name), load(name)
    answers = [answer(model, tokenizer)]
    print("before:", answers[0])

    lora = MergeableLoraConfig(  # without `merge` a LoraConfig
        nvfp4_mergeable=merge, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=3, learning_rate=3e-3, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, warmup_steps=2,
    )  # fmt: skip
    data = [example(tokenizer, question) for question in QUESTIONS]
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    answers.append(answer(model, tokenizer))
    print("after: ", answers[1])

    if merge:
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    answers.append(answer(load(folder) if merge else PeftModel.from_pretrained(load(name), folder), tokenizer))
    print("loaded:", answers[2])
    return losses, answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--merge", action="store_true", help="train an adapter to be merged, and merge it")
    parser.add_argument("--out", default=None, help="folder for the adapter or the merged model (default: none)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(demo_path() if given.model == "demo" else given.model, given.steps, given.out or temporary, given.merge)

"""Two tasks of lm-eval that need no network, made from any text: to see more of a 4-bit model than its KL.

    python examples/offline_tasks.py tasks --text held_out.txt
    moe-nvfp4 compare MODEL --text held_out.txt --tasks tasks/offline.yaml

cloze  the last word of a passage, after the words in front of it: whether it is the likeliest next, and its perplexity
sums   a sum of two numbers below 50 after two examples: whether the right one of four answers is the likeliest
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

WORDS = 64  # of a passage, at most
TASK = """\
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
doc_to_text: "{{text}}"
target_delimiter: ""
"""
CLOZE = """\
output_type: loglikelihood
doc_to_target: " {{word}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
"""
SUMS = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def task_file(name: str, questions: Path | str, how: str) -> str:
    """The YAML of a task whose `questions` are a JSON file, asked and judged as CLOZE or SUMS says."""
    return TASK.replace("NAME", name).replace("FILE", json.dumps(str(questions))) + how


def cloze(text: str, count: int, draw: random.Random) -> list[dict[str, str]]:
    """Up to `count` passages {text, word}: the last word of a sentence, of four letters or more, and what is in front
    of it in its paragraph, at least 16 words. No two passages are of one paragraph."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split())
        ends = list(re.finditer(r"(?<= )[a-z]{4,}(?=[.!?]( |$))", paragraph))
        if ends := [end for end in ends if paragraph[: end.start()].count(" ") >= 16]:
            end = draw.choice(ends)
            words = paragraph[: end.start()].split()[-WORDS:]
            found.append({"text": " ".join(words), "word": end[0]})
    return draw.sample(found, min(count, len(found)))


def sums(count: int, draw: random.Random) -> list[dict[str, object]]:
    """`count` questions {text, choices, answer}; wrong answers are off by 1, 2 or 10."""
    found = []
    for _ in range(count):
        (a, b), *shown = [(draw.randrange(50), draw.randrange(50)) for _ in range(3)]
        values = [a + b, *(a + b + d for d in draw.sample((-10, -2, -1, 1, 2, 10), 3))]
        draw.shuffle(values)
        lines = [f"{c} + {d} = {c + d}" for c, d in shown]
        choices = [f" {value}" for value in values]
        found.append({"text": "\n".join([*lines, f"{a} + {b} ="]), "choices": choices, "answer": values.index(a + b)})
    return found


def write(folder: Path, text: str, count: int, seed: int = 0) -> None:
    """Write both tasks, with `count` questions each at most, and their group offline.yaml into `folder`. ValueError for
    a text without a passage."""
    draw = random.Random(seed)
    passages = cloze(text, count, draw)
    if not passages:
        raise ValueError(
            "the text has no paragraph with a sentence of 17 words or more that ends in a word of 4 letters"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, how, questions in (("cloze", CLOZE, passages), ("sums", SUMS, sums(count, draw))):
        file = folder.resolve() / f"{name}.jsonl"
        file.write_text("".join(json.dumps(question) + "\n" for question in questions), "utf-8")
        (folder / f"{name}.yaml").write_text(task_file(name, file, how), "utf-8")
        print(f"{folder / name}.yaml: {len(questions)} questions")
    (folder / "offline.yaml").write_text("group: offline\ntask: [cloze, sums]\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the tasks")
    parser.add_argument("--text", type=Path, required=True, help="file with the text of the passages")
    parser.add_argument("--questions", type=int, default=1000, help="of each task, at most")
    args = parser.parse_args()
    write(args.folder, args.text.read_text("utf-8", errors="replace"), args.questions)


if __name__ == "__main__":
    main()

"""Convert a bf16 checkpoint on disk to a 4-bit one, and load that.

python examples/quantize_checkpoint.py [SRC DST]      default: the demo model
"""

import sys
import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_nvfp4.demo import demo_path
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config

if len(sys.argv) not in (1, 3):
    raise SystemExit(__doc__)
source, destination = sys.argv[1:3] if len(sys.argv) == 3 else (demo_path(), tempfile.mkdtemp())

# Experts are quantized one by one while the file is read, so memory stays near the size of the result.
model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16", quantization_config=MoeNvfp4Config())
model.save_pretrained(destination)  # ModelOpt's names, one tensor per expert
AutoTokenizer.from_pretrained(source).save_pretrained(destination)

again = AutoModelForCausalLM.from_pretrained(destination, dtype="bfloat16")
same = all((p == q).all() for p, q in zip(model.parameters(), again.parameters(), strict=True))
print(f"{destination}: loaded again with the same bytes: {same}")
assert same

"""A fake llama-perplexity: its KL divergence is the sum over tensors of NMSE times cost.

FAKE_PERPLEXITY_MODEL: the model without errors. FAKE_PERPLEXITY_COSTS: JSON, costs by tensor. FAKE_PERPLEXITY_LOG: the file that gets
one line per run, the tensors that differ. FAKE_PERPLEXITY_DO: the failure to simulate.
"""

import json
import os
import sys
from pathlib import Path

from ggml_ext._formats.gguf_file import GGUFFile

arguments = sys.argv[1:]
logits = Path(arguments[arguments.index("--kl-divergence-base") + 1])
base = GGUFFile(Path(os.environ["FAKE_PERPLEXITY_MODEL"]))
model = GGUFFile(Path(arguments[arguments.index("-m") + 1]))
do, costs = os.environ.get("FAKE_PERPLEXITY_DO", ""), json.loads(os.environ["FAKE_PERPLEXITY_COSTS"])
if do == "fail":
    print("0.00.3 E perplexity: you need at least 1024 tokens")
    sys.exit(3)
total, different = 0.0, []
for tensor, original in zip(model.tensors, base.tensors, strict=True):
    now, before = (f.rows(t, 0, t.n_rows).view("<f2" if t.type == 1 else "<f4").astype(float) for f, t in ((model, tensor), (base, original)))
    if (now != before).any():
        different.append(tensor.name)
        total += costs[tensor.name] * ((now - before) ** 2).sum() / (before**2).sum()
with open(os.environ["FAKE_PERPLEXITY_LOG"], "a") as log:
    log.write(json.dumps(different) + "\n")
if "--kl-divergence" not in arguments:
    assert not different and Path(arguments[arguments.index("-f") + 1]).stat().st_size
    logits.write_text("logits")
elif do != "say nothing":
    assert logits.read_text() == "logits"
    print(f"Mean    KLD:   {total:.9f} ±   0.000001")

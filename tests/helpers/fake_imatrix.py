"""A fake llama-imatrix: records its arguments, prints llama-imatrix's lines and writes moments of random inputs.

FAKE_IMATRIX_LOG: the file that gets the arguments, one line of JSON per run. FAKE_IMATRIX_DO: the failure to simulate.
"""

import json
import os
import re
import signal
import sys
import time

from ggml_ext._formats.gguf_file import GGUFFile
from helpers.moments_files import correlated, write_moments

arguments = sys.argv[1:]
options = dict(zip(arguments[::2], arguments[1::2], strict=True))
with open(os.environ["FAKE_IMATRIX_LOG"], "a") as log:
    log.write(json.dumps(options | {"pid": os.getpid()}) + "\n")
open(options["-f"]).close()
do = os.environ.get("FAKE_IMATRIX_DO", "")
n_chunks = int(options["--chunks"])
print(f"0.00.1 I compute_imatrix: computing over {n_chunks} chunks, n_ctx=512, batch_size=512, n_seq=1", flush=True)
print("0.00.2 I compute_imatrix: 1.00 seconds per pass - ETA 2.00 minutes", flush=True)
if do == "fail" or do == f"fail {options.get('--layers')}":
    print("0.00.3 E compute_imatrix: you need at least 1024 tokens\n0.00.4 E compute_imatrix: only 17 tokens\n0.00.5 I bye", flush=True)
    sys.exit(3)
if do == "be killed":
    os.kill(os.getpid(), signal.SIGKILL)
if do == "sleep":
    time.sleep(60)
for i in range(n_chunks):
    print(f"[{i + 1}]{5.5 - i / 100},", end="", flush=True)
print(flush=True)
first, last = map(int, options.get("--layers", "0-999").split("-"))
names = {t.name: t.ne[0] for t in GGUFFile(options["-m"]).tensors if t.n_rows > 1 and t.name.startswith("blk.")}
inputs = {name: correlated(600, n) for name, n in names.items()}
inside = [name for name in names if first <= int(re.match(r"blk\.(\d+)\.", name)[1]) <= last]
keys, kind = {"imatrix.datasets": [options["-f"]]}, options.get("--moments", "diagonal")
if kind == "diagonal":
    keys["imatrix.moments"] = None
elif len(inside) < len(names):
    keys |= {"imatrix.moments.tensors": inside, "imatrix.moments.inputs": inside}
outside = {f"{name}.{end}": None for name in set(names) - set(inside) for end in ("in_moments", "moment_counts")}
if do != "write nothing":
    from pathlib import Path

    widest = int(options.get("--moments-columns", 1 << 30))
    write_moments(Path(options["-o"]), inputs, kind, keys=keys, tensors=outside, chunks=n_chunks, full_columns=widest)

"""A model whose layers, experts or matrices are on several devices computes what it computes on the CPU.

Vulkan devices are lavapipe, twice: GGML_VK_VISIBLE_DEVICES may name a device more than once. Servers are RPC servers on the CPU or on lavapipe.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import perplexity_run
import synth_model
from helpers import vulkan
from helpers.commands import quantize
from helpers.native import ROOT
from helpers.perplexity_record import perplexity_tolerance
from helpers.placement import Measured, measure
from helpers.rpc import rpc_server

TYPES = ("itq3_t", "itq2_t64", "ccq2")  # trellis in blocks of 256, where devices get no part of some matrices, and of 64; not rotated
N_CHUNKS = 2
# Mean KL divergence from the logits of the CPU. Perplexity hardly tells experts of random weights apart: ITQ3_S and ITQ3_T differ by 0.03 % there, but
# their KL divergence is 0.0063. The splits have at most 0.0004.
MAX_DIVERGENCE = 0.001
# Batches of 64 tokens: llama-perplexity wants no logits of the first 64, so the last layer of that batch has no columns.
OPTIONS = ("-b", 128, "-ub", 64, "-fit", "off")
EMBEDDINGS = 1.1  # MiB of embeddings in Q8_0, always on the CPU


class Split(NamedTuple):
    """Options of llama.cpp, in which first, second and vulkan are servers, and the buffers of devices.

    cpu: the CPU has weights of layers. offload: devices compute products with them too, if a batch has 32 tokens, as llama.cpp does by default.
    """

    name: str
    options: str
    buffers: tuple[str, ...]
    cpu: bool = False
    offload: bool = False


ONE, TWO, SERVERS = "--device Vulkan0 -ngl 99", "--device Vulkan0,Vulkan1 -ngl 99", "--rpc {first},{second} -ngl 99"
DENSE = [
    Split("half of the layers on Vulkan", "--device Vulkan0 -ngl 4", ("Vulkan0",), cpu=True),
    Split("half of the layers on Vulkan, products of batches too", "--device Vulkan0 -ngl 4", ("Vulkan0",), cpu=True, offload=True),
    Split("FFN on the CPU", f"{ONE} -ot ffn_.*=CPU", ("Vulkan0",), cpu=True),
    Split("layers on two devices", f"{TWO} -ts 1,1", ("Vulkan0", "Vulkan1")),
    Split("layers on two devices and the CPU", "--device Vulkan0,Vulkan1 -ngl 6 -ts 1,2", ("Vulkan0", "Vulkan1"), cpu=True),
    Split("matrices on two devices", f"{TWO} -sm tensor", ("Meta()",)),
    Split("matrices on two devices, 1 to 3", f"{TWO} -sm tensor -ts 1,3", ("Meta()",)),
    Split("half of the layers on a server", "--rpc {first} --device RPC0 -ngl 4", ("RPC0",), cpu=True),
    Split("layers on two servers", f"{SERVERS} --device RPC0,RPC1 -ts 1,1", ("RPC0", "RPC0")),
    Split("matrices on two servers", f"{SERVERS} --device RPC0,RPC1 -sm tensor", ("Meta()",)),
    Split("layers on a server and Vulkan", "--rpc {first} --device RPC0,Vulkan0 -ngl 99 -ts 1,1", ("RPC0", "Vulkan0")),
    Split("a server on Vulkan", "--rpc {vulkan} --device RPC0 -ngl 99", ("RPC0",)),
]
EXPERTS = [
    Split("experts of one layer on the CPU", f"{ONE} --n-cpu-moe 1", ("Vulkan0",), cpu=True),
    Split("all experts on the CPU", f"{ONE} --cpu-moe", ("Vulkan0",), cpu=True),
    Split("down projections on the CPU", f"{ONE} -ot ffn_down_exps=CPU", ("Vulkan0",), cpu=True),
    Split("experts on another device", f"{TWO} -ts 1,0 -ot exps=Vulkan1", ("Vulkan0", "Vulkan1")),
    Split("layers on two devices", f"{TWO} -ts 1,1", ("Vulkan0", "Vulkan1")),
    Split("matrices on two devices", f"{TWO} -sm tensor", ("Meta()",)),
    Split("experts on the CPU, rest on a server", "--rpc {first} --device RPC0 -ngl 99 --cpu-moe", ("RPC0",), cpu=True),
    Split("matrices on two servers", f"{SERVERS} --device RPC0,RPC1 -sm tensor", ("Meta()",)),
]
DAILY = {("itq3_t", "half of the layers on Vulkan"), ("itq2_t64", "matrices on two servers"), ("itq3_t", "experts of one layer on the CPU")}


def cases(splits: list[Split]) -> list:
    return [pytest.param(name, split, id=f"{name}-{split.name.replace(' ', '-')}", marks=() if (name, split.name) in DAILY else pytest.mark.nightly)
            for name in TYPES for split in splits]


class Base(NamedTuple):
    """A quantized model, its logits and what was measured on the CPU."""

    file: Path
    logits: Path
    measured: Measured


@pytest.fixture(scope="module")
def bases(model, tmp_path_factory):
    """Return the base of a type, of the reference model or of a mixture of two layers with random weights; made once."""
    folder, made = tmp_path_factory.mktemp("splits"), {}
    text = folder / "text.txt"
    text.write_bytes((ROOT / "data" / "heldout.txt").read_bytes()[:8000])
    synth_model.write_model("f16", folder / "experts.gguf", "tiny-experts", 2)

    def base(name: str, has_experts: bool) -> Base:
        if (name, has_experts) not in made:
            file = folder / f"{name}-{has_experts}.gguf"
            logits = file.with_suffix(".logits")
            quantize(folder / "experts.gguf" if has_experts else model, file, "--type", name, "--effort", "fast", *perplexity_run.UNIFORM)
            made[name, has_experts] = Base(file, logits, measure(file, 128, 1, "-f", text, "--chunks", N_CHUNKS, "-ngl", 0, "--device", "none",
                                                                 "--kl-divergence-base", logits, *OPTIONS))
        return made[name, has_experts]

    return base


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the endpoint of a server, which is started when it is first asked for."""
    with contextlib.ExitStack() as stack:
        endpoints: dict[str, str] = {}

        def endpoint(name: str) -> str:
            if name not in endpoints:
                device, variables = ("Vulkan0", two_devices()) if name == "vulkan" else ("CPU", None)
                endpoints[name] = stack.enter_context(rpc_server(tmp_path_factory.mktemp(name), device, variables))
            return endpoints[name]

        yield endpoint


def two_devices() -> dict[str, str]:
    return vulkan.environment(GGML_BACKEND_PATH=str(vulkan.library()), GGML_VK_VISIBLE_DEVICES="0,0")


def assert_equals_the_cpu(base: Base, split: Split, server, monkeypatch) -> None:
    servers = {name: server(name) for name in re.findall(r"\{(\w+)\}", split.options)}
    with monkeypatch.context() as patch:
        for name, value in (two_devices() if "Vulkan" in split.options else {}).items():
            patch.setenv(name, value)
        measured = measure(base.file, 128, 1, "--kl-divergence-base", base.logits, "--kl-divergence", *OPTIONS, *split.options.format(**servers).split(),
                           "--op-offload" if split.offload else "--no-op-offload")
    print(f"perplexity {measured.perplexity}, CPU {base.measured.perplexity}; KL divergence {measured.divergence}; MiB: {measured.buffers}")
    on_cpu = measured.buffers.pop("CPU_Mapped", 0.0) + measured.buffers.pop("CPU", 0.0)
    assert (on_cpu > EMBEDDINGS) == split.cpu
    assert sorted(re.sub(r"\[.*", "", name) for name, size in measured.buffers.items() if size > 0) == sorted(split.buffers)
    assert abs(math.log(float(measured.perplexity) / float(base.measured.perplexity))) <= perplexity_tolerance(N_CHUNKS)
    assert abs(measured.divergence) <= MAX_DIVERGENCE


@pytest.mark.parametrize("name,split", cases(DENSE))
def test_split_model_equals_the_cpu(bases, server, name, split, monkeypatch):
    assert_equals_the_cpu(bases(name, has_experts=False), split, server, monkeypatch)


@pytest.mark.parametrize("name,split", cases(EXPERTS))
def test_split_mixture_equals_the_cpu(bases, server, name, split, monkeypatch):
    assert_equals_the_cpu(bases(name, has_experts=True), split, server, monkeypatch)

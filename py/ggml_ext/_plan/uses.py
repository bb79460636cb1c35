"""What becomes of matrices whose inputs no calibration sees, by what the model's graph does with them.

A matrix that the graph does not multiply with (a table that it adds, say) keeps its type: other operations take few types, or none. So
does one whose product lies outside of the layers (the head of a reranker), where llama-imatrix collects nothing. One of a layer that the
graph leaves out (those that predict further tokens) gets FLOOR at the least: no importance says what errors in it cost, and no probe of
the model notices them. Small matrices have a floor too, for they cost next to nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gguf import GGMLQuantizationType

from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.names import layer_number, tensor_class
from .._native.graph import PRODUCT, ROWS, read_uses
from .rules import OUTPUT, PER_LAYER_TOKEN_EMBD, TOKEN_EMBD

OUTER = (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD, OUTPUT)  # whose inputs llama-imatrix collects if --process-output asks for it, or never
FLOOR = GGMLQuantizationType.Q5_K  # needs no importances; 0.1 % of the squares of the weights are lost
# Matrices with less than this part of their layer's weights get Q8_0 at the least, which adds at most 0.005 bits per weight to the layer. Among
# them are those that steer a layer: decay and input gate of linear attention (ssm_alpha, ssm_beta, ssm_ba), hc_*_inject of hyper-connections.
SMALL_PART, SMALL_FLOOR = 1 / 1024, GGMLQuantizationType.Q8_0
IN_LAYERS = re.compile(r"(^|\.)blk\.\d+\.")


def n_layers_run(file: GGUFFile) -> int | None:
    """Layers before those that predict further tokens (MTP, NextN); None where the metadata name none of these."""
    arch = file.value("general.architecture", "")
    n_layers, n_more = (file.value(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    return n_layers - n_more if type(n_layers) is int and type(n_more) is int and 0 < n_more < n_layers else None


def small_matrices(tensors: list[Tensor]) -> set[str]:
    """Names of those below SMALL_PART."""
    in_layer: dict[int, int] = {}
    for tensor in tensors:
        if (layer := layer_number(tensor.name)) is not None:
            in_layer[layer] = in_layer.get(layer, 0) + tensor.n_elements
    layers = ((t, layer_number(t.name)) for t in tensors)
    return {t.name for t, layer in layers if layer is not None and t.n_elements < SMALL_PART * in_layer.get(layer, 0)}


@dataclass(frozen=True)
class Uses:
    """found: by name of a tensor what the graph does with it, None where that is not known; n_layers: see n_layers_run(); measured: names
    of tensors whose importances are given."""

    found: dict[str, set[str]] | None = None
    n_layers: int | None = None
    measured: frozenset[str] = frozenset()
    _others: frozenset[str] = field(default=frozenset(), init=False)  # classes of tensors that are no matrices of products

    def __post_init__(self) -> None:
        others = {tensor_class(name) for name, uses in (self.found or {}).items() if uses - {PRODUCT, ROWS}}
        object.__setattr__(self, "_others", frozenset(others))

    @classmethod
    def read(cls, file: GGUFFile, measured: frozenset[str] = frozenset()) -> Uses:
        return cls(read_uses([part.path for part in file.parts]), n_layers_run(file), measured)

    def is_no_product(self, name: str) -> bool:
        """Whether the graph does something else with the tensor, or with those of its class, than to multiply with it. Outside of the
        layers rows may be looked up in it: embeddings."""
        is_table = IN_LAYERS.search(name) is not None and self.found is not None and self.found.get(name) == {ROWS}
        return name not in OUTER and (is_table or tensor_class(name) in self._others)

    def is_outside(self, name: str) -> bool:
        """Whether the graph multiplies with the tensor outside of the layers, where llama-imatrix collects no inputs."""
        is_measured = name in self.measured or name in OUTER or IN_LAYERS.search(name)
        return not is_measured and self.found is not None and PRODUCT in self.found.get(name, ())

    def is_unseen(self, name: str) -> bool:
        """Whether the graph leaves a matrix of a layer out. Where it is not known, those of layers that predict further tokens."""
        layer = layer_number(name)
        if layer is None or name in self.measured:
            return False
        return name not in self.found if self.found is not None else self.n_layers is not None and layer >= self.n_layers

"""How the model's graph uses its tensors, and so what a matrix gets whose inputs calibration does not see.

- A matrix that the graph does not multiply with, such as a table that it adds, keeps its type: other operations take few types.
- A matrix outside of the layers, such as the head of a reranker, keeps its type: llama-imatrix collects nothing there.
- A matrix in a layer that the graph skips, because the layer predicts further tokens (MTP), gets at least FLOOR if calibration does not run that
  layer: its sensitivity is unknown.
- Small matrices have a floor because they add almost nothing to the size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gguf import GGMLQuantizationType

from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.names import layer_number, tensor_class
from .._native.graph import PRODUCT, ROWS, read_uses
from .rules import OUTPUT, PER_LAYER_TOKEN_EMBD, TOKEN_EMBD

OUTER = (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD, OUTPUT)  # llama-imatrix collects their inputs with --process-output, or never
FLOOR = GGMLQuantizationType.Q5_K  # needs no imatrix; NMSE 0.1 %
# Matrices below this part of their layer's weights get at least Q8_0, for at most 0.0063 bits per weight of the layer (from ITQ2_T). Some control the
# layer: decay and input gate of linear attention (ssm_alpha, ssm_beta, ssm_ba), hc_*_inject of hyper-connections. On two trained hybrids with parts
# of 1/1700 these bits gain 1.5 to 8 times as much as elsewhere, and break even near 1/1024 (docs/results/measurements.md, "Small matrices").
SMALL_PART, SMALL_FLOOR = 1 / 1024, GGMLQuantizationType.Q8_0
IN_LAYERS = re.compile(r"(^|\.)blk\.\d+\.")


def n_layers_run(file: GGUFFile) -> int | None:
    """Count the layers before those that predict further tokens (MTP, NextN); None if the metadata have none of these."""
    arch = file.value("general.architecture", "")
    n_layers, n_more = (file.value(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    return n_layers - n_more if type(n_layers) is int and type(n_more) is int and 0 < n_more < n_layers else None


def small_matrices(tensors: list[Tensor]) -> set[str]:
    """Return the names of the matrices below SMALL_PART of their layer."""
    layer_sizes: dict[int, int] = {}
    for tensor in tensors:
        if (layer := layer_number(tensor.name)) is not None:
            layer_sizes[layer] = layer_sizes.get(layer, 0) + tensor.n_elements
    layers = ((t, layer_number(t.name)) for t in tensors)
    return {t.name for t, layer in layers if layer is not None and t.n_elements < SMALL_PART * layer_sizes.get(layer, 0)}


@dataclass(frozen=True)
class GraphUses:
    """How the model's graph uses its tensors."""

    operations: dict[str, set[str]] | None = None  # by tensor; None if unknown
    n_layers: int | None = None  # n_layers_run()
    measured: frozenset[str] = frozenset()  # tensors with an entry in the imatrix
    in_mtp_layers: frozenset[str] = frozenset()  # classes of the matrices whose inputs calibration collects in the layers after n_layers
    _others: frozenset[str] = field(default=frozenset(), init=False)  # classes of tensors with operations other than products

    def __post_init__(self) -> None:
        others = {tensor_class(name) for name, uses in (self.operations or {}).items() if uses - {PRODUCT, ROWS}}
        object.__setattr__(self, "_others", frozenset(others))

    @classmethod
    def read(cls, file: GGUFFile, measured: frozenset[str] = frozenset(), runs_mtp_layers: bool = False) -> GraphUses:
        """Read them from the graphs that llama.cpp builds for the file.

        Args:
            file: the model.
            measured: tensors with an entry in the imatrix.
            runs_mtp_layers: whether a calibration will run the layers that predict further tokens, if llama.cpp can.
        """
        parts, n_layers = [part.path for part in file.parts], n_layers_run(file)
        mtp_uses = read_uses(parts, of_mtp_layers=True) if runs_mtp_layers and n_layers is not None else None
        seen = {tensor_class(name) for name, uses in (mtp_uses or {}).items() if PRODUCT in uses and (layer_number(name) or 0) >= (n_layers or 0)}
        return cls(read_uses(parts), n_layers, measured, frozenset(seen))

    def is_no_product(self, name: str) -> bool:
        """Whether the graph uses the tensor, or one of its class, other than in a matrix product.

        Looking up rows counts in the layers only: outside of them it is an embedding.
        """
        is_table = IN_LAYERS.search(name) is not None and self.operations is not None and self.operations.get(name) == {ROWS}
        return name not in OUTER and (is_table or tensor_class(name) in self._others)

    def is_outside(self, name: str) -> bool:
        """Whether the graph multiplies with the tensor outside of the layers, where llama-imatrix collects no inputs."""
        is_measured = name in self.measured or name in OUTER or IN_LAYERS.search(name)
        return not is_measured and self.operations is not None and PRODUCT in self.operations.get(name, ())

    def is_in_mtp_layer(self, name: str) -> bool:
        """Whether the tensor's layer predicts further tokens. The KL divergence from the original model does not depend on it."""
        return self.n_layers is not None and (layer_number(name) or 0) >= self.n_layers

    def is_unseen(self, name: str) -> bool:
        """Whether the graph skips a matrix of a layer; if the graph is unknown, whether its layer predicts further tokens."""
        layer = layer_number(name)
        if layer is None or name in self.measured or (self.is_in_mtp_layer(name) and tensor_class(name) in self.in_mtp_layers):
            return False
        return name not in self.operations if self.operations is not None else self.n_layers is not None and layer >= self.n_layers

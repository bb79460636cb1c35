"""Quant mixes: one type for most block weights, a better one for the sensitive ones.

A matrix is sensitive if a better type lowers the KL divergence most for its bits (docs/results/encoders.md, "Mixed files").
"""

from __future__ import annotations

from dataclasses import dataclass

EXPERTS = ("_exps", "_chexps")  # in the names of experts' matrices
LAYERS = ("blk.",)


@dataclass(frozen=True)
class Rule:
    """A type for the tensors whose name contains one of `parts`."""

    parts: tuple[str, ...]
    type: str
    first_layer: bool = False   # only in the first layer
    with_experts: bool = False  # only in a mixture of experts


@dataclass(frozen=True)
class Recipe:
    """A quant mix: a base type, and rules of which the first that matches applies."""

    name: str
    base: str
    rules: tuple[Rule, ...]
    about: str

    def type_of(self, tensor_name: str, has_experts: bool) -> str | None:
        """Return the type of a tensor, None for the base type. has_experts: the model is a mixture of experts."""
        for rule in self.rules:
            if rule.with_experts and not has_experts:
                continue
            prefix = "blk.0." if rule.first_layer else "blk."
            if tensor_name.startswith(prefix) and any(part in tensor_name for part in rule.parts):
                return rule.type
        return None


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "itq4_t_m",
            "itq4_t",
            (Rule(("attn_v",), "q6_k"), Rule(("attn_k", "attn_output"), "ditto5")),
            "itq4_t; values of the attention q6_k, its keys and output ditto5",
        ),
        Recipe(
            "itq3_t_m",
            "itq3_t",
            (Rule(("attn_k", "attn_v", "attn_output"), "q4_k"),),
            "itq3_t; keys, values and output of the attention q4_k",
        ),
        Recipe(
            "itq2_t_m",
            "itq2_t",
            (
                Rule(("attn_v",), "q4_k"),
                Rule(("attn_", "ssm_"), "itq3_t"),
                Rule(("ffn_",), "itq3_t", first_layer=True),
            ),
            "itq2_t; the attention's values q4_k, its other matrices and the first layer itq3_t",
        ),
        Recipe(
            "itq1h_t_m",
            "itq1h_t",
            (
                Rule(EXPERTS, "itq2_t", first_layer=True),
                Rule(EXPERTS, "itq1h_t"),
                Rule(LAYERS, "itq4_t", with_experts=True),
                Rule(("attn_v",), "q4_k"),
                Rule(("attn_", "ssm_"), "itq3_t"),
                Rule(("ffn_",), "itq2_t", first_layer=True),
            ),
            "itq1h_t; the attention's values q4_k, its other matrices itq3_t, the first layer itq2_t; in a mixture of experts, what all tokens use itq4_t",
        ),
    )
}

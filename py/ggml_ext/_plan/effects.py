"""Options that name types and change nothing: a warning for each, with what stayed and why."""

from __future__ import annotations

from collections.abc import Iterator

from .._formats.names import describe_tensors
from .plan import Choices, Override, Plan, deciding_option
from .rules import OUTPUT, TOKEN_EMBD


def tell_options_without_effect(plan: Plan, choices: Choices) -> None:
    """Adds warnings and notes to a plan."""
    for override in choices.overrides:
        _tell_override(plan, choices, override)
    plan.warnings += _of_output(plan, choices)


def _tell_override(plan: Plan, choices: Choices, override: Override) -> None:
    """A warning where the option changes nothing; a note of matrices that stay where it changes others."""
    found = [t for t in plan.tensors if override.pattern.search(t.name)]
    decided = [t for t in found if t.name not in plan.kept and deciding_option(t, choices) == (override.flag, override.type)]
    stayed: dict[str, list[str]] = {}  # by what keeps them
    for t in found:
        if t.name in plan.kept and t.type != override.type and (t.n_dims > 1 or not decided):
            stayed.setdefault(plan.kept[t.name], []).append(t.name)
    said = "; ".join(describe_tensors(names, f", {why}") for why, names in stayed.items())
    if not found:
        plan.warnings.append(f"{override.flag} matches no tensor")
    elif stayed:
        (plan.notes if decided else plan.warnings).append(f"{override.flag} does not change {said}")
    elif not decided and all(t.name not in plan.kept for t in found):
        plan.warnings.append(f"{override.flag} changes nothing: other options name the types of all tensors that it matches")


def _of_output(plan: Plan, choices: Choices) -> Iterator[str]:
    """Warnings about the options of output matrix and embeddings."""
    names = {t.name for t in plan.tensors}
    if choices.leave_output and OUTPUT not in names:
        yield f"--leave-output-tensor changes nothing: the model has no {OUTPUT}; --token-embedding-type names the type of the embeddings, which serve as it"
    if choices.output is not None and OUTPUT not in names and choices.token_embd is not None:
        yield f"--output-tensor-type changes nothing: the model has no {OUTPUT}, and --token-embedding-type names the type of the embeddings, which serve as it"
    if choices.token_embd is not None and TOKEN_EMBD not in names:
        yield f"--token-embedding-type changes nothing: the model has no {TOKEN_EMBD}"

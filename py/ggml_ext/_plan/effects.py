"""Report type options without effect."""

from __future__ import annotations

from collections.abc import Iterator

from .._formats.names import describe_tensors
from .plan import Override, QuantizationPlan, TypeChoices, deciding_option
from .rules import OUTPUT, TOKEN_EMBD


def report_options_without_effect(plan: QuantizationPlan, options: TypeChoices) -> None:
    """Add warnings and notes about such options to a plan."""
    for override in options.overrides:
        _report_override(plan, options, override)
    plan.warnings += _describe_output_options(plan, options)


def _report_override(plan: QuantizationPlan, options: TypeChoices, override: Override) -> None:
    """Warn if the override changes nothing; if it changes some matrices, note those that keep their type."""
    matches = [t for t in plan.tensors if override.pattern.search(t.name)]
    decided = [t for t in matches if not t.reason_kept and deciding_option(t.tensor, options) == (override.flag, override.type)]
    kept: dict[str, list[str]] = {}
    for t in matches:
        if t.reason_kept and t.tensor.type != override.type and (t.tensor.n_dims > 1 or not decided):
            kept.setdefault(t.reason_kept, []).append(t.name)
    if not matches:
        plan.warnings.append(f"{override.flag} matches no tensor")
    elif kept:
        described = "; ".join(describe_tensors(names, f", {reason}") for reason, names in kept.items())
        (plan.notes if decided else plan.warnings).append(f"{override.flag} does not change {described}")
    elif not decided and not any(t.reason_kept for t in matches):
        plan.warnings.append(f"{override.flag} changes nothing: other options set the types of all tensors that it matches")


def _describe_output_options(plan: QuantizationPlan, options: TypeChoices) -> Iterator[str]:
    """Yield warnings about the options for the output matrix and the embeddings."""
    names = {t.name for t in plan.tensors}
    if options.leave_output and OUTPUT not in names:
        yield f"--leave-output-tensor changes nothing: the model has no {OUTPUT}; --token-embedding-type sets the type of the embeddings, which replace it"
    if options.output is not None and OUTPUT not in names and options.token_embd is not None:
        yield f"--output-tensor-type changes nothing: the model has no {OUTPUT}, and --token-embedding-type sets the type of the embeddings, which replace it"
    if options.token_embd is not None and TOKEN_EMBD not in names:
        yield f"--token-embedding-type changes nothing: the model has no {TOKEN_EMBD}"

"""Which tensors llama-quantize changes and to which types: asked of the built libllama, or of a short list where there is none.

The list knows the small matrices by name, output matrix and embeddings, and the attention of models with eight experts; of rules
for one architecture it has none. tests/test_rules.py says where it differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .._base.errors import UserError
from .._base.types import TypeInfo
from .._formats.gguf_file import GGUFFile, Tensor
from .._native import library

T = GGMLQuantizationType
OUTPUT = "output.weight"
TOKEN_EMBD = "token_embd.weight"
PER_LAYER_TOKEN_EMBD = "per_layer_token_embd.weight"

KEPT = re.compile(
    r"_norm\.weight|ffn_gate_(inp|tid2eid)\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight"
    r"|indexer\.[kq]_proj\.weight|time_mix_(first|[wa][012]|v[012]|g[12]|decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight"
    r"|^position_embd\.weight$|^token_types\.weight$|\.position_embd|sam\.(pos_embd|neck\.|net_)|\.rel_pos|\.patch_(embd|merger)"
    r"|a\.rvq\.codebook|mm\.a\.code_embd"
)
ATTENTION_K_V = re.compile(r"attn_(qkv|kv_b|v|k)\.weight")
STOCK_FALLBACKS = {
    **dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS), T.IQ4_NL),
    **dict.fromkeys((T.Q2_K, T.Q3_K, T.TQ1_0, T.TQ2_0), T.Q4_0),
    **{T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0},
}


def rule_types(
    file: GGUFFile, info: TypeInfo, token_embd: T | None = None, output: T | None = None
) -> tuple[list[T | None], list[str]]:
    """Type of each tensor in a file of one of our types, None for those that keep theirs, and warnings.

    Overrides, mixtures and the length of rows come after that. token_embd, output: what the options of that name say.
    UserError where llama-quantize would refuse the model too.
    """
    arch = str(file.value("general.architecture", ""))
    n_expert = file.value(f"{arch}.expert_count", 0)
    n_expert = n_expert if isinstance(n_expert, int) and 0 <= n_expert < 2**32 else 0
    try:
        rules = library.load_rules()
    except OSError as e:
        listed = _listed_types(file.tensors, info, n_expert, token_embd, output)
        return listed, [f"{e}: a short list of names says what keeps its type"]
    if rules is None:
        return _listed_types(file.tensors, info, n_expert, token_embd, output), []
    try:
        types, is_known = rules.types(
            arch, n_expert, int(info.id), token_embd, output, [t.name for t in file.tensors], [t.ne for t in file.tensors]
        )
    except ValueError as e:
        raise UserError(f"{file.path}: llama.cpp's rules for types refuse it: {e}; convert the model again") from e
    warnings = [] if is_known else [
        f"this llama.cpp does not know the architecture {arch[:80]!r} and will not load the file; its general rules choose the "
        "types"
    ]
    return [None if t is None else T(t) for t in types], warnings


def _listed_types(
    tensors: Iterable[Tensor], info: TypeInfo, n_expert: int, token_embd: T | None, output: T | None
) -> list[T | None]:
    """Without the library."""
    tied = all(t.name != OUTPUT for t in tensors)

    def listed(tensor: Tensor) -> T | None:
        name = tensor.name
        is_embd = name in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD)
        if tensor.n_dims < 2 or not name.endswith("weight") or KEPT.search(name):
            return None
        if name == OUTPUT or (tied and is_embd):
            fits = tensor.ne[0] % info.block_size == 0  # Q8_0 also for rows that do not fit the file's own type
            return output if output is not None else T[info.output.upper()] if fits else T.Q8_0
        if is_embd:
            return token_embd if token_embd is not None else T[info.token_embd.upper()]
        return T.Q8_0 if n_expert == 8 and ATTENTION_K_V.search(name) else T(int(info.id))

    return [listed(t) for t in tensors]


def stock_fallback_type(target: T, n_per_row: int) -> T | None:
    """What takes the place of a stock type in rows that are no multiple of its block; None if llama.cpp has no rule for it."""
    try:
        rules = library.load_rules()
    except OSError:
        rules = None
    if rules is not None:
        found = rules.fallback(int(target), n_per_row)
        return None if found is None else T(found)
    block_size = GGML_QUANT_SIZES[target][0]
    if target not in STOCK_FALLBACKS and block_size > 32:
        return None
    fallback = STOCK_FALLBACKS.get(target, target)
    return fallback if n_per_row % GGML_QUANT_SIZES[fallback][0] == 0 else T.F16

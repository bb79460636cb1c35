"""llama-quantize's rules: the tensors that it quantizes, and their types. They come from the built libllama, or from a short list.

The list covers small matrices by name, the output matrix, the embeddings, and the attention of models with eight experts. It has no rules for
single architectures or for quant mixes. tests/unit/test_rules.py pins the differences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from .._base.errors import UserError
from .._base.types import TYPES
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.tensor_types import FLOAT_TYPES, Q2_0
from .._native import library
from .._native.programs import library_conflict
from .file_types import FileType

T = GGMLQuantizationType
OUTPUT = "output.weight"
TOKEN_EMBD = "token_embd.weight"
PER_LAYER_TOKEN_EMBD = "per_layer_token_embd.weight"

# names of matrices that llama-quantize does not quantize
UNQUANTIZED_NAMES = re.compile(
    r"_norm\.weight|ffn_gate_(inp|tid2eid)\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight"
    r"|indexer\.[kq]_proj\.weight|time_mix_(first|[wa][012]|v[012]|g[12]|decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight"
    r"|^position_embd\.weight$|^token_types\.weight$|\.position_embd|sam\.(pos_embd|neck\.|net_)|\.rel_pos|\.patch_(embd|merger)"
    r"|a\.rvq\.codebook|mm\.a\.code_embd"
)
ATTENTION_K_V = re.compile(r"attn_(qkv|kv_b|v|k)\.weight")
UPSTREAM_FALLBACKS = {
    **dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS), T.IQ4_NL),
    **dict.fromkeys((T.Q2_K, T.Q3_K, T.TQ1_0, T.TQ2_0, Q2_0), T.Q4_0),
    **{T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0},
}
MAX_LAYERS = 512  # that the library accepts: LLAMA_MAX_LAYERS
CLIP = "clip"  # architecture of multimodal projectors; llama.cpp reads none of its numbers


def rule_types(
    file: GGUFFile,
    file_type: FileType,
    token_embd: T | None = None,
    output: T | None = None,
    named: Sequence[bool] | None = None,
    has_imatrix: bool = False,
) -> tuple[list[T | None], list[str]]:
    """Choose the type of each tensor by the rules. Overrides, ggml-ext quant mixes and row sizes are applied later.

    Args:
        file: the model.
        file_type: of the output.
        token_embd: type of --token-embedding-type.
        output: type of --output-tensor-type.
        named: by tensor, whether other options set its type, so that the rules do not count it.
        has_imatrix: whether an imatrix is used; rules for upstream file types depend on it.

    Returns:
        The types, None for a tensor that keeps its type, and warnings.

    Raises:
        UserError: llama-quantize would refuse the model, or a quant mix needs the library, which is missing.
    """
    named = [False] * len(file.tensors) if named is None else named
    needs_rules = file_type.is_mixed_by_rules and not all(named)
    model = _read_rule_model(file, file_type, needs_rules)
    try:
        rules, problem = library.load_rules(), ""
    except OSError as e:
        rules, problem = None, str(e)
    if rules is None and needs_rules:
        raise UserError(
            f"--type {file_type.name}: llama.cpp's rules mix the types of such a file, and {problem or 'libllama is not in the package'}: "
            f"{library_conflict() or 'reinstall ggml-ext'}, or pass --pure"
        )
    if rules is None:
        listed = _listed_types(file.tensors, file_type, model.n_expert, token_embd, output)
        return listed, [f"{problem}: a short list of names decides which tensors keep their type"] if problem else []
    is_float = file_type.type in FLOAT_TYPES  # the library covers quantized files only; float files change the same tensors
    is_own = file_type.rules_id == file_type.id  # else the type replaces the one that the other file has in most tensors
    output_file = library.RuleFile(
        int(LlamaFileType.MOSTLY_Q8_0) if is_float else file_type.rules_id, token_embd, output, has_imatrix and is_own
    )
    try:
        types, is_known = rules.types(model, output_file, [t.name for t in file.tensors], [t.ne for t in file.tensors], named)
    except ValueError as e:
        raise UserError(f"{file.path}: llama.cpp's rules for types refuse the model: {e}; convert the model again") from e
    warnings = [] if is_known else [
        f"this llama.cpp does not know the architecture {model.arch[:80]!r} and will not load the file; its general rules choose the "
        "types"
    ]
    replaced = None if is_own else T.Q4_0
    return [None if t is None else file_type.type if is_float or t == replaced else T(t) for t in types], warnings


def _read_rule_model(file: GGUFFile, file_type: FileType, needs_rules: bool) -> library.RuleModel:
    """Read the metadata that the rules use. A number that is missing or damaged is 0, as in llama.cpp.

    Raises:
        UserError: the rules count layers (needs_rules), and their number is not valid.
    """
    arch = str(file.value("general.architecture", ""))
    n_expert = _number(file.value(f"{arch}.expert_count"))
    if not file_type.is_upstream:
        return library.RuleModel(arch, n_expert=n_expert)  # the rules of ggml-ext types do not count layers
    if arch == CLIP:
        return library.RuleModel(arch)
    if not needs_rules:
        return library.RuleModel(arch, MAX_LAYERS, n_expert=n_expert)  # the library wants a number, but no type depends on it
    n_layers = file.value(f"{arch}.block_count")
    if not 1 <= _number(n_layers) <= MAX_LAYERS:
        raise UserError(
            f"{file.path}: {arch[:80]}.block_count is {'missing' if n_layers is None else repr(n_layers)}, must be 1 to {MAX_LAYERS}: llama.cpp's "
            f"rules for {file_type.name} count layers; convert the model again, or pass --pure"
        )
    n_head = _first_number(file, f"{arch}.attention.head_count", 0)
    n_head_kv = _first_number(file, f"{arch}.attention.head_count_kv", n_head)
    return library.RuleModel(arch, _number(n_layers), n_head, n_head_kv, n_expert)


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**32 else 0


def _first_number(file: GGUFFile, key: str, default: int) -> int:
    """Read a number, or the first of an array by layer; the default if the key is missing."""
    if key not in file.metadata:
        return default
    numbers = file.integers(key)
    return _number(numbers[0]) if numbers else _number(file.value(key))


def _listed_types(
    tensors: Iterable[Tensor], file_type: FileType, n_expert: int, token_embd: T | None, output: T | None
) -> list[T | None]:
    """Choose the types without the library, by the short list of names. All quantized tensors of an upstream file type get one type."""
    tied = all(t.name != OUTPUT for t in tensors)
    info = TYPES.get(file_type.type.name.lower())

    def choose(tensor: Tensor) -> T | None:
        name = tensor.name
        is_embd = name in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD)
        if tensor.n_dims < 2 or not name.endswith("weight") or UNQUANTIZED_NAMES.search(name):
            return None
        if info is None:
            return output if tied and is_embd and output is not None else file_type.type
        if name == OUTPUT or (tied and is_embd):
            fits = tensor.ne[0] % info.block_size == 0  # else Q8_0, also for rows that do not fit the base type
            return output if output is not None else GGMLQuantizationType[str(info.output).upper()] if fits else T.Q8_0
        if is_embd:
            usual, short = (GGMLQuantizationType[str(name).upper()] for name in (info.token_embd, info.short_token_embd))
            return token_embd if token_embd is not None else usual if tensor.ne[0] % GGML_QUANT_SIZES[usual][0] == 0 else short
        return T.Q8_0 if n_expert == 8 and ATTENTION_K_V.search(name) else file_type.type

    return [choose(t) for t in tensors]


def upstream_fallback_type(target: T, n_per_row: int) -> T | None:
    """Return the type that replaces an upstream type whose block does not divide the row; None if llama.cpp has no rule."""
    try:
        rules = library.load_rules()
    except OSError:
        rules = None
    target = Q2_0 if target == T.NVFP4 else target  # llama.cpp has no rule for it; both have blocks of 64
    if rules is not None:
        replacement = rules.fallback(int(target), n_per_row)
        return None if replacement is None else T(replacement)
    block_size = GGML_QUANT_SIZES[target][0]
    if target not in UPSTREAM_FALLBACKS and block_size > 32:
        return None
    fallback = UPSTREAM_FALLBACKS.get(target, target)
    return fallback if n_per_row % GGML_QUANT_SIZES[fallback][0] == 0 else T.F16

"""The file types of --type: ggml-ext types, quant mixes, and upstream file types under llama-quantize's names."""

from __future__ import annotations

from dataclasses import dataclass

from gguf import GGMLQuantizationType, LlamaFileType

from .._base.types import TYPES, WEIGHT_TYPES
from .._formats.tensor_types import FLOAT_TYPES
from .recipes import RECIPES, Recipe

T = GGMLQuantizationType

# llama.cpp's rules use one type in these files
UNMIXED_TYPES = (*FLOAT_TYPES, T.Q8_0)

# llama_ftype_get_default_type() of llama.cpp's src/llama-quant.cpp, for file types whose base type has another name. File types with
# the same base are in order of size.
UPSTREAM_BASES = {
    "q2_k": "q2_k", "q2_k_s": "q2_k", "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k", "q4_k_s": "q4_k", "q4_k_m": "q4_k",
    "q5_k_s": "q5_k", "q5_k_m": "q5_k", "iq2_s": "iq2_xs", "iq2_m": "iq2_s", "iq3_xs": "iq3_s", "iq3_m": "iq3_s", "mxfp4_moe": "mxfp4",
}
UPSTREAM_NAMES = (
    "iq1_s", "iq1_m", "tq1_0", "iq2_xxs", "tq2_0", "q2_0", "iq2_xs", "iq2_s", "iq2_m", "q2_k_s", "q2_k", "iq3_xxs", "iq3_xs", "q3_k_s", "iq3_s",
    "iq3_m", "q3_k_m", "q3_k_l", "iq4_xs", "iq4_nl", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "mxfp4_moe", "q5_0", "q5_1", "q5_k_s", "q5_k_m",
    "q6_k", "q8_0", "q1_0", "f16", "bf16", "f32",
)
# llama.cpp's types of 4-bit floats, whose files llama-quantize does not make of dense models: name -> file type
FP4_FILE_IDS = {"mxfp4": LlamaFileType.MOSTLY_MXFP4_MOE, "nvfp4": LlamaFileType.MOSTLY_NVFP4}
UPSTREAM_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}


@dataclass(frozen=True)
class FileType:
    """A --type."""

    name: str  # lower case
    id: int  # general.file_type
    type: GGMLQuantizationType  # of most block weights
    recipe: Recipe | None = None  # the ggml-ext quant mix

    @property
    def is_upstream(self) -> bool:
        """Whether every llama.cpp loads the file: it has upstream types only, chosen by llama.cpp's rules."""
        return self.type.name.lower() not in TYPES

    @property
    def is_mixed_by_rules(self) -> bool:
        """Whether llama.cpp's rules choose the types."""
        return self.is_upstream and self.type not in UNMIXED_TYPES

    @property
    def rules_id(self) -> int:
        """The file type whose rules choose the types; those of 4-bit floats are Q4_0's."""
        return int(LlamaFileType.MOSTLY_Q4_0) if self.name in FP4_FILE_IDS else self.id

    @property
    def imatrix_required_type(self) -> GGMLQuantizationType | None:
        """The type that needs an imatrix in this file only: tensor_requires_imatrix() of llama-quant.cpp."""
        return T.Q2_K if self.id == LlamaFileType.MOSTLY_Q2_K_S else None


def _list_upstream_files() -> dict[str, FileType]:
    """List the upstream file types that the installed gguf package knows."""
    files = {}
    for name in UPSTREAM_NAMES:
        base, file_type = UPSTREAM_BASES.get(name, name).upper(), "ALL_F32" if name == "f32" else f"MOSTLY_{name.upper()}"
        if base in T.__members__ and file_type in LlamaFileType.__members__:
            files[name] = FileType(name, int(LlamaFileType[file_type]), GGMLQuantizationType[base])
    return files


UPSTREAM_FILES = _list_upstream_files()
FP4_FILES = {name: FileType(name, int(id), GGMLQuantizationType[name.upper()]) for name, id in FP4_FILE_IDS.items()}
FILE_TYPES: dict[str, FileType] = {
    **{name: FileType(name, int(info.id), T(int(info.id))) for name, info in WEIGHT_TYPES.items()},
    **{r.name: FileType(r.name, int(TYPES[r.base].id), T(int(TYPES[r.base].id)), r) for r in RECIPES.values()},
    **UPSTREAM_FILES,
    **FP4_FILES,
    **{alias: UPSTREAM_FILES[name] for alias, name in UPSTREAM_ALIASES.items()},
}


def uniform_file_type(qtype: GGMLQuantizationType) -> int:
    """Return general.file_type of a file with one upstream type: the file type of the same name, else the smallest with that base."""
    candidates = [f for f in UPSTREAM_FILES.values() if f.type == qtype]
    if candidates:
        return next((f for f in candidates if f.name == qtype.name.lower()), candidates[0]).id
    return int(LlamaFileType[f"MOSTLY_{qtype.name}"])

"""What --type names: types of ours, mixed files, and the stock types of llama-quantize by its names."""

from __future__ import annotations

from dataclasses import dataclass

from gguf import GGMLQuantizationType, LlamaFileType

from .._base.types import TYPES, WEIGHT_TYPES
from .._formats.tensor_types import FLOAT_TYPES
from .recipes import RECIPES, Recipe

T = GGMLQuantizationType

# llama.cpp's rules do not mix files of these types.
UNMIXED_TYPES = (*FLOAT_TYPES, T.Q8_0)

# llama_ftype_get_default_type() of llama.cpp's src/llama-quant.cpp: by the name of the file the type that its rules start from, where
# that is not the one of the same name. Those with one base are in the order of their sizes.
STOCK_BASES = {
    "q2_k": "q2_k", "q2_k_s": "q2_k", "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k", "q4_k_s": "q4_k", "q4_k_m": "q4_k",
    "q5_k_s": "q5_k", "q5_k_m": "q5_k", "iq2_s": "iq2_xs", "iq2_m": "iq2_s", "iq3_xs": "iq3_s", "iq3_m": "iq3_s", "mxfp4_moe": "mxfp4",
}
STOCK_NAMES = (
    "iq1_s", "iq1_m", "tq1_0", "iq2_xxs", "tq2_0", "iq2_xs", "iq2_s", "iq2_m", "q2_k_s", "q2_k", "iq3_xxs", "iq3_xs", "q3_k_s", "iq3_s",
    "iq3_m", "q3_k_m", "q3_k_l", "iq4_xs", "iq4_nl", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "mxfp4_moe", "q5_0", "q5_1", "q5_k_s", "q5_k_m",
    "q6_k", "q8_0", "q1_0", "f16", "bf16", "f32",
)
STOCK_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}


@dataclass(frozen=True)
class FileType:
    """A --type. name: in lower case; id: general.file_type; type: what most matrices of the layers get; recipe: of a mixed file of
    ours."""

    name: str
    id: int
    type: GGMLQuantizationType
    recipe: Recipe | None = None

    @property
    def is_stock(self) -> bool:
        """Every llama.cpp loads it: the types of its tensors are llama.cpp's own, and so are the rules that mix them."""
        return self.type.name.lower() not in TYPES

    @property
    def is_mixed_by_rules(self) -> bool:
        """Whether llama.cpp's rules have to be asked."""
        return self.is_stock and self.type not in UNMIXED_TYPES

    @property
    def weighted_type(self) -> GGMLQuantizationType | None:
        """The type that needs importances in this file and in no other: tensor_requires_imatrix() of llama-quant.cpp."""
        return T.Q2_K if self.id == LlamaFileType.MOSTLY_Q2_K_S else None


def _stock() -> dict[str, FileType]:
    """Those that this gguf knows."""
    files = {}
    for name in STOCK_NAMES:
        base, file_type = STOCK_BASES.get(name, name).upper(), "ALL_F32" if name == "f32" else f"MOSTLY_{name.upper()}"
        if base in T.__members__ and file_type in LlamaFileType.__members__:
            files[name] = FileType(name, int(LlamaFileType[file_type]), GGMLQuantizationType[base])
    return files


STOCK_FILES = _stock()
FILE_TYPES: dict[str, FileType] = {
    **{name: FileType(name, int(info.id), T(int(info.id))) for name, info in WEIGHT_TYPES.items()},
    **{r.name: FileType(r.name, int(TYPES[r.base].id), T(int(TYPES[r.base].id)), r) for r in RECIPES.values()},
    **STOCK_FILES,
    **{alias: STOCK_FILES[name] for alias, name in STOCK_ALIASES.items()},
}


def uniform_file_type(qtype: GGMLQuantizationType) -> int:
    """general.file_type of a file with one type for all, which llama-quantize names by a mixture: that of its own name, else the
    smallest that starts from it."""
    of_type = [f for f in STOCK_FILES.values() if f.type == qtype]
    if of_type:
        return next((f for f in of_type if f.name == qtype.name.lower()), of_type[0]).id
    return int(LlamaFileType[f"MOSTLY_{qtype.name}"])

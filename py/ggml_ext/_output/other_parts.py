"""Whether the parts of a split model that separate runs write (--part) belong together.

Each part has the key ggml_ext.parts: JSON with a digest of each thing that the tensors depend on. The journal of an unfinished part has it too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._base.errors import UserError
from .._base.json import parse_json
from .._base.package import __version__
from .._formats.gguf_file import GGUFFile
from .._formats.reserved_paths import journal_of
from .._formats.split import PARTS_KEY, part_names
from .._plan.plan import QuantizationPlan
from .conversion import Conversion
from .output import UnfinishedError

DEPENDENCY = "parts"  # of a journal
N_DIGITS = 16  # of a digest: 64 bits


def digest_dependencies(conversion: Conversion, plan: QuantizationPlan, n_parts: int, options: str) -> dict[str, str]:
    """Digest what the tensors of all parts depend on, by name.

    Times of files and the build of the library are left out, because they differ between machines.

    Args:
        conversion: of one part.
        plan: of the complete model.
        n_parts: number of parts.
        options: those that determine the bytes.
    """
    values, codec = conversion.list_dependencies(), conversion.codec
    source = values["input"] if isinstance(values["input"], list) else list(values["input"].values())
    kind, calibration = values["importance"]
    named: dict[str, Any] = {
        "version": __version__,
        "source": _without_times(source),
        "calibration": [kind, _without_times(calibration)],
        "column scales": [kv.raw.hex() for kv in conversion.importance.scales.metadata()],
        "options": [options, values["encoder"], codec.lib is None, conversion.fallback_above],
        "types": [n_parts, [[t.name, list(t.tensor.ne), t.type.name] for t in plan.tensors]],
    }
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:N_DIGITS] for name, value in named.items()}


def _without_times(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in file.items() if key != "modified"} for file in files]


def check_other_parts(path: Path, digests: Mapping[str, str]) -> None:
    """Check that the finished and unfinished parts next to this one are made from the same.

    Args:
        path: of this part.
        digests: from digest_dependencies(); empty without --part, and then nothing is checked.

    Raises:
        UnfinishedError: a part is made from something else.
    """
    names = [name for name in part_names(path.name) if name != path.name] if digests else []
    for other in map(path.with_name, names):
        if (found := _read_digests(other)) is None or found == digests:
            continue
        changed = [name for name in digests if digests[name] != found.get(name)]
        reason = f"was made with different {', '.join(changed)}" if found else "was not made with --part"
        raise UnfinishedError(
            f"--part: {other} {reason}: repeat the same command for all parts, delete the part that is wrong, or choose another OUT"
        )


def _read_digests(part: Path) -> Mapping[str, str] | None:
    """Read the digests of a finished part or, before that, of its journal; None if there is neither, {} if they cannot be read."""
    try:
        if part.exists():
            return _parse(GGUFFile(part).value(PARTS_KEY))
        with open(journal_of(part), "rb") as f:
            line = f.readline()
        return _parse(json.dumps(parse_json(line)["made_from"][DEPENDENCY])) if line.endswith(b"\n") else None
    except FileNotFoundError:
        return None
    except (OSError, UserError, ValueError, TypeError, KeyError):
        return {}


def _parse(text: object) -> Mapping[str, str]:
    values = parse_json(text) if isinstance(text, str) else {}
    return values if isinstance(values, dict) else {}

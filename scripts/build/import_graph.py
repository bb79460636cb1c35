#!/usr/bin/env python3
"""Which module of the Python package imports which: rooms, floors, circles and arrows that run upwards.

    import_graph.py [FOLDER]    print rooms and floors of FOLDER (default: py/ggml_ext); exit 1 on a circle or an upward import

A room is a folder of the package. It may import rooms below it in ROOMS, and the ground floor is the first of them. Within a room,
modules may import each other as long as there is no circle. The commands (quantize.py and its like) stand above all rooms.
Imports for type checkers alone count too: a reader follows them as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "py" / "ggml_ext"
COMMANDS = "commands"
# from the ground up; one room imports only those before it
ROOMS = (
    "_base", "quants", "_formats", "_native", "_evaluation", "_plan", "_encode", "_calibration", "_sequential", "_allocation", "_output", "_source", "_report",
    "_commands", "_console", COMMANDS,
)
NOT_OURS = ("bin", "convert", "data")  # what a build puts into the package

Graph = Mapping[str, set[str]]


def room_of(module: str) -> str:
    return module.rpartition(".")[0].partition(".")[0] or COMMANDS


def modules(package: Path) -> dict[str, Path]:
    """Files by dotted name below the package; a folder's __init__ has the folder's name, the package's own is left out."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0] in NOT_OURS or parts == ("__init__",):
            continue
        found[".".join(parts)] = path
    return found


def imported(path: Path, module: str) -> Iterator[str]:
    """Dotted names below the package that a module may mean, longest first: a module, or the folder that holds a name."""
    folders = module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folders[: len(folders) - (node.level - 1)] + (node.module.split(".") if node.module else [])
            yield from (".".join([*base, alias.name]) for alias in node.names)


def read(package: Path) -> dict[str, set[str]]:
    """The modules that each module imports."""
    names = modules(package)

    def resolve(name: str) -> str | None:
        for candidate in (name, name.rpartition(".")[0]):
            for known in (candidate, f"{candidate}.__init__"):
                if known in names:
                    return known
        return None

    return {m: {r for name in imported(path, m) if (r := resolve(name)) not in (None, m)} for m, path in names.items()}


def circle(graph: Graph) -> list[str]:
    """Modules that import each other, the first one again at the end; empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return e.args[1]
    return []


def upward(graph: Graph) -> list[tuple[str, str]]:
    """Imports of a module in a room above one's own; of unknown rooms all."""
    floor = {room: i for i, room in enumerate(ROOMS)}
    return [
        (m, other)
        for m, others in graph.items()
        for other in sorted(others)
        if room_of(m) != room_of(other) and floor.get(room_of(other), len(ROOMS)) >= floor.get(room_of(m), -1)
    ]


def floors(graph: Graph) -> int:
    """Modules on the longest way down, which is how many must be understood before the topmost; circles are cut."""
    heights: dict[str, int] = {}

    def height(module: str, above: tuple[str, ...] = ()) -> int:
        if module not in heights:
            below = [height(o, (*above, module)) for o in graph[module] if o not in above and o != module]
            heights[module] = 1 + max(below, default=0)
        return heights[module]

    return max(map(height, graph))


def of_rooms(graph: Graph) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    out: dict[str, set[str]] = {}
    for m, others in graph.items():
        out.setdefault(room_of(m), set()).update(room_of(o) for o in others if room_of(o) != room_of(m))
    return out


def main() -> int:
    graph = read(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
    rooms = of_rooms(graph)
    for room in reversed([r for r in ROOMS if r in rooms] + [r for r in rooms if r not in ROOMS]):
        inside = sorted(m.rpartition(".")[2] for m in graph if room_of(m) == room and not m.endswith("__init__"))
        below = [r for r in ROOMS if r in rooms[room]]
        print(f"{room}: {', '.join(inside)}\n    imports {', '.join(below) or 'no other room'}")
    is_circle, arrows = circle(graph), upward(graph)
    n_imports = sum(map(len, graph.values()))
    print(f"{len(graph)} modules in {len(rooms)} rooms, {n_imports} imports, {floors(graph)} floors of modules, {floors(rooms)} of rooms")
    print(f"circle: {' -> '.join(is_circle)}" if is_circle else "no circle")
    for m, other in arrows:
        print(f"upwards: {m} -> {other}")
    return 1 if is_circle or arrows else 0


if __name__ == "__main__":
    sys.exit(main())

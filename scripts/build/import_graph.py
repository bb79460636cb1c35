#!/usr/bin/env python3
"""Check the import graph of the Python package: layers, cycles and upward imports.

    import_graph.py [DIR]    print the packages and layers of DIR (default: py/ggml_ext); exit 1 on a cycle or an upward import

A package may import only packages below it in PACKAGES. Modules of one package may import each other without cycles. The commands
(quantize.py and others) form the top layer. Imports for type checkers count too, because readers follow them as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT_PACKAGE = Path(__file__).resolve().parents[2] / "py" / "ggml_ext"
COMMANDS = "commands"
# from the bottom layer to the top
PACKAGES = (
    "_base", "quants", "_formats", "_native", "_evaluation", "_plan", "_encode", "_calibration", "_sequential", "_allocation", "_source", "_output", "_report",
    "_commands", "_console", COMMANDS,
)
BUILT = ("bin", "convert", "data")  # added by a build

Graph = Mapping[str, set[str]]


def package_of(module: str) -> str:
    return module.rpartition(".")[0].partition(".")[0] or COMMANDS


def list_modules(root: Path) -> dict[str, Path]:
    """Return the files by dotted name relative to the root package, without its own __init__."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in BUILT or parts == ("__init__",):
            continue
        files[".".join(parts)] = path
    return files


def imported_names(path: Path, module: str) -> Iterator[str]:
    """Yield the dotted names, relative to the root package, that a module imports: modules, or names in modules."""
    packages = module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = packages[: len(packages) - (node.level - 1)] + (node.module.split(".") if node.module else [])
            yield from (".".join([*base, alias.name]) for alias in node.names)


def read_graph(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    files = list_modules(root)

    def resolve(name: str) -> str | None:
        for candidate in (name, name.rpartition(".")[0]):
            for known in (candidate, f"{candidate}.__init__"):
                if known in files:
                    return known
        return None

    return {m: {r for name in imported_names(path, m) if (r := resolve(name)) not in (None, m)} for m, path in files.items()}


def find_cycle(graph: Graph) -> list[str]:
    """Return the modules of an import cycle, the first one again at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return e.args[1]
    return []


def find_upward_imports(graph: Graph) -> list[tuple[str, str]]:
    """Return the imports of modules in higher packages; for unknown packages all imports."""
    layer = {package: i for i, package in enumerate(PACKAGES)}
    return [
        (m, other)
        for m, others in graph.items()
        for other in sorted(others)
        if package_of(m) != package_of(other) and layer.get(package_of(other), len(PACKAGES)) >= layer.get(package_of(m), -1)
    ]


def count_layers(graph: Graph) -> int:
    """Return the length of the longest import chain, ignoring cycles."""
    heights: dict[str, int] = {}

    def height(module: str, above: tuple[str, ...] = ()) -> int:
        if module not in heights:
            below = [height(o, (*above, module)) for o in graph[module] if o not in above and o != module]
            heights[module] = 1 + max(below, default=0)
        return heights[module]

    return max(map(height, graph))


def package_graph(graph: Graph) -> dict[str, set[str]]:
    """Return the packages that each package imports."""
    packages: dict[str, set[str]] = {}
    for m, others in graph.items():
        packages.setdefault(package_of(m), set()).update(package_of(o) for o in others if package_of(o) != package_of(m))
    return packages


def main() -> int:
    graph = read_graph(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT_PACKAGE)
    packages = package_graph(graph)
    for package in reversed([p for p in PACKAGES if p in packages] + [p for p in packages if p not in PACKAGES]):
        modules = sorted(m.rpartition(".")[2] for m in graph if package_of(m) == package and not m.endswith("__init__"))
        below = [p for p in PACKAGES if p in packages[package]]
        print(f"{package}: {', '.join(modules)}\n    imports {', '.join(below) or 'no other package'}")
    cycle, upward = find_cycle(graph), find_upward_imports(graph)
    n_imports = sum(map(len, graph.values()))
    print(f"{len(graph)} modules in {len(packages)} packages, {n_imports} imports, {count_layers(graph)} layers of modules, "
          f"{count_layers(packages)} of packages")
    print(f"import cycle: {' -> '.join(cycle)}" if cycle else "no import cycle")
    for m, other in upward:
        print(f"upward import: {m} -> {other}")
    return 1 if cycle or upward else 0


if __name__ == "__main__":
    sys.exit(main())

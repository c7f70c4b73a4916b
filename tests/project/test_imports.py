"""Which package may import which: the rules of docs/architecture.md, on the source as it is. Imports inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kilter

ROOT = Path(kilter.__file__).parent
# A package may import the packages listed here, itself, and the modules at the top level except the ones on ABOVE.
ALLOWED = {
    "tasks": {"fast"},
    "blocks": {"fast", "tasks"},
    "methods": {"blocks", "fast", "tasks"},
    "fast": set(),
    "models": set(),
    "data": set(),
    "records": {"blocks", "fast"},
    "runtimes": {"fast", "records", "blocks", "tasks"},
    "study": {"records", "data", "methods", "models", "runtimes"},
    "report": {"study", "records", "data", "runtimes", "methods", "models", "blocks", "tasks"},
    "inference": {"data", "models", "records", "tasks"},
    "net": {"records", "runtimes", "data", "fast", "report", "methods", "models", "tasks"},
    "engines": {"net", "data", "records", "runtimes"},
    "hub": {"net", "records", "study", "report"},
    "commands": {
        "net",
        "hub",
        "study",
        "report",
        "records",
        "runtimes",
        "data",
        "methods",
        "models",
        "engines",
        "tasks",
        "inference",
    },
}
ABOVE = {"federate", "experiment", "cli"}  # top-level modules that use the packages, not the other way round
MAY_USE_ABOVE = {"study", "report", "net", "engines", "commands", "inference", "hub"}


def sources() -> dict[str, Path]:
    """Module name without `kilter.` -> file."""
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = sources()


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`, which never run."""
    for node in ast.iter_child_nodes(tree):
        if not is_type_checking(node):
            yield node
            yield from statements(node)


def imported(path: Path) -> set[str]:
    """The modules of kilter that a file imports, at the top or inside a function."""
    modules = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {part for part in parts if part.removeprefix("kilter.") in MODULES}
            modules |= submodules if submodules == parts else {node.module, *submodules}
    inside = {name.removeprefix("kilter.") for name in modules if name.startswith("kilter.")}
    return {name for name in inside if name in MODULES}


IMPORTS = {name: imported(path) for name, path in MODULES.items() if name}


def reachable(start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in IMPORTS.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def package(module: str) -> str:
    return module.partition(".")[0]


def is_package(module: str) -> bool:
    return (ROOT / package(module)).is_dir()


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_package_imports_only_what_it_may(name: str) -> None:
    assert is_package(name), f"there is no package {name}: update ALLOWED"
    for module, targets in IMPORTS.items():
        if package(module) != name:
            continue
        for target in targets:
            if is_package(target):
                assert package(target) in {*ALLOWED[name], name}, f"{module} imports {target}"
            elif target in ABOVE:
                assert name in MAY_USE_ABOVE or module == "runtimes.ray", f"{module} imports {target}"


def test_every_package_has_a_rule() -> None:
    assert {package(m) for m in IMPORTS if is_package(m)} == set(ALLOWED)


def test_methods_and_blocks_never_reach_what_runs_them() -> None:
    forbidden = {"runtimes", "net", "records", "report", "study", "engines", "commands"}
    for module in IMPORTS:
        if package(module) in ("methods", "blocks"):
            actual = {m for m in reachable(module) if package(m) in forbidden}
            assert not actual, f"{module} reaches {sorted(actual)}"


def test_there_are_no_import_cycles_not_even_lazy_ones() -> None:
    for module in IMPORTS:
        if module in reachable(module):
            cycle = [m for m in sorted(reachable(module)) if module in reachable(m)]
            pytest.fail(f"these modules import each other: {', '.join(cycle)}")


def test_at_most_fifteen_modules_at_the_top() -> None:
    modules = sorted(p.name for p in ROOT.glob("*.py"))
    assert len(modules) <= 15, modules


def test_tests_mirror_the_source() -> None:
    tests = Path(__file__).parents[1]
    folders = {p.parent.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py")} - {"."}
    for folder in sorted(folders):
        assert (tests / folder).is_dir(), f"tests/{folder} is missing"


def test_no_class_name_is_used_twice() -> None:
    where: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        if package(name) == "methods":  # a method is read by itself: several call the type of their state State
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(name)
    assert not {name: modules for name, modules in where.items() if len(modules) > 1}


def test_functions_and_files_are_short() -> None:
    long = [
        f"{p.name}: {len(p.read_text().splitlines())} lines"
        for p in ROOT.rglob("*.py")
        if len(p.read_text().splitlines()) > 400
    ]
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                long.append(f"{path.name}: {node.name}, {(node.end_lineno or 0) - node.lineno + 1} lines")
    assert not long


def test_any_is_rare() -> None:
    uses = sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )
    assert uses <= 250

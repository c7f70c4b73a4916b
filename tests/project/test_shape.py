"""The shape of the house: method files stay short and alone, and every example in the documentation runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import tokenize
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import kilter
from kilter.core import Method
from kilter.methods import find, methods

ROOT = Path(kilter.__file__).parent
TESTS = Path(__file__).parents[1]


def code_lines(source: str) -> int:
    """Lines with code: no blanks, comments or docstrings; imports count."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            prose |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def test_the_counting_itself() -> None:
    assert (
        code_lines(
            '"""Doc.\n\nmore"""\n\nimport os  # why\n\n# no\n\ndef f():\n    """Doc."""\n    return (1,\n        2)\n'
        )
        == 4
    )


@pytest.mark.parametrize(("name", "most"), [("fedavg", 25), ("fedprox", 25), ("scaffold", 40)])
def test_methods_are_short_imports_included(name: str, most: int) -> None:
    assert code_lines((ROOT / "methods" / f"{name}.py").read_text()) <= most


@pytest.mark.parametrize("path", sorted((ROOT / "methods").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_no_method_imports_another_or_a_runtime(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            assert not name.startswith(
                ("kilter.methods", "kilter.runtimes", "kilter.federate", "kilter.records.run_folder")
            ), name


@pytest.mark.parametrize("name", methods())
def test_a_method_is_a_final_frozen_dataclass_that_says_what_it_keeps_and_sends(name: str) -> None:
    kind = methods()[name]
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind.__bases__ == (Method,)
    assert "Keeps:" in (kind.__doc__ or "")
    assert "Sends:" in (kind.__doc__ or "")
    steps = [f for f in vars(kind).values() if getattr(f, "is_step", False)]
    assert steps
    assert {f.name for f in fields(Method)} <= {f.name for f in fields(kind)}
    source = inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]
    assert "torch.manual_seed" not in source
    assert find(name) is kind


WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if "    >>> " in path.read_text()
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"kilter.{name.removesuffix('.__init__')}")
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize(
    "path",
    sorted(path for folder in ("methods", "blocks") for path in (ROOT / folder).rglob("[!_]*.py")),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_every_method_and_every_block_has_a_test_file(path: Path) -> None:
    folder = TESTS / path.parent.relative_to(ROOT)
    assert (folder / f"test_{path.name}").is_file()


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_the_folders_of_the_tests_are_those_of_the_package(path: Path) -> None:
    folder = path.parent.relative_to(TESTS)
    assert folder in (Path("project"), Path("net/hostile")) or (ROOT / folder).is_dir()

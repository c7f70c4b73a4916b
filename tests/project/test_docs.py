"""The documentation works: every shell and Python block is executed, every link leads somewhere, and the site builds.

Blocks of one page run in order in one folder. A block with a title is written to that file first. A block after
`<!-- not run: reason -->` is skipped. Pages about networks and engines have their own tests (tests/net, tests/engines).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import reference

import kilter

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {"deploy.md", "hospital.md", "engines.md", "hub.md"}
PAGES = [
    p for p in sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]) if p.name not in ELSEWHERE
]


class Block(NamedTuple):
    language: str
    title: str
    text: str
    skip: str


def blocks(page: str) -> list[Block]:
    pattern = r"(?:<!-- not run: ([^>]*?) -->\n)?^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```"
    return [Block(m[2], m[3] or "", m[4], m[1] or "") for m in re.finditer(pattern, page, re.DOTALL | re.MULTILINE)]


def script(page: str) -> str:
    """One bash script for all blocks of a page."""
    lines = ["set -e"]
    for k, block in enumerate(blocks(page)):
        if block.skip:
            continue
        if block.title:
            lines.append(f"cat > {block.title} <<'END-OF-BLOCK'\n{block.text}END-OF-BLOCK")
        elif block.language == "bash":
            lines.append(block.text)
        elif block.language == "python":
            lines.append(f"cat > block{k}.py <<'END-OF-BLOCK'\n{block.text}END-OF-BLOCK\npython block{k}.py")
    return "\n".join(lines)


def is_runnable(page: Path) -> bool:
    return any(b.language in ("bash", "python") and not b.skip and not b.title for b in blocks(page.read_text()))


@pytest.mark.docs
@pytest.mark.timeout(280)
@pytest.mark.parametrize("page", [p for p in PAGES if is_runnable(p)], ids=lambda p: p.stem)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script(page.read_text())],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        target = link.partition("#")[0]
        if target and not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), link


def test_the_parser_sees_titles_and_reasons() -> None:
    page = '```bash\na\n```\n\n```python title="x.py"\nb\n```\n\n<!-- not run: slow -->\n```bash\nc\n```\n'
    assert blocks(page) == [
        Block("bash", "", "a\n", ""),
        Block("python", "x.py", "b\n", ""),
        Block("bash", "", "c\n", "slow"),
    ]
    assert script(page).endswith("cat > x.py <<'END-OF-BLOCK'\nb\nEND-OF-BLOCK")


@pytest.mark.docs
def test_generated_pages_are_current() -> None:
    assert (DOCS / "reference/cli.md").read_text() == reference.page(), "run: make reference"
    assert (DOCS / "reference/schema.json").read_text() == reference.schema_text(), "run: make reference"


def test_the_python_reference_is_complete() -> None:
    page = (DOCS / "reference/python.md").read_text()
    listed = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: kilter")}
    assert set(kilter.__all__) <= listed


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "zensical.toml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f'"{page.relative_to(DOCS).as_posix()}"' in navigation, page


@pytest.mark.docs
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="the documentation tool is not installed")
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    done = subprocess.run(
        [Path(sys.executable).parent / "zensical", "build", "--strict", "--clean"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site/index.html").exists()

"""Wheel and source distribution: they install without a compiler, and hold what they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILERS = {"CC": "/bin/false", "CXX": "/bin/false", "LD": "/bin/false"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    ignore = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "results", "__pycache__", "site", "build", "dist")
    shutil.copytree(ROOT, source, ignore=ignore)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "out"), str(source)]
    done = subprocess.run(command, env={**os.environ, **COMPILERS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "out"


@pytest.mark.slow
def test_the_wheel_is_for_every_platform_and_installs_without_a_compiler(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith((".so", ".c", ".pyx"))]
    for needed in ("kilter/hub/job_queue.py", "kilter/py.typed", "kilter/report/web/"):
        assert any(name.startswith(needed) for name in names), needed
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    for distribution in (wheel, *built.glob("*.tar.gz")):
        target = tmp_path / distribution.name
        extra = ["--no-build-isolation"] if distribution.suffix == ".gz" else []
        done = subprocess.run(
            [*command[:-1], str(target), *extra, str(distribution)],
            env={**os.environ, **COMPILERS},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        code = "import kilter.cli, sys; assert sys.argv[1] in kilter.__file__"
        env = {**os.environ, "PYTHONPATH": str(target)}
        subprocess.run([sys.executable, "-c", code, str(target)], check=True, env=env, cwd=tmp_path)


@pytest.mark.slow
def test_the_source_distribution_holds_no_keys(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = file.getnames()
    assert any(name.endswith("pyproject.toml") for name in names)
    assert not [name for name in names if name.endswith(("key.pem", "seal.key"))]

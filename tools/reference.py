"""Write the reference pages that are generated from the code: docs/reference/cli.md and schema.json (`make reference`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from kilter.cli import app
from kilter.records.codec import schema

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
HEAD = """# Command line

`kilter COMMAND --help` prints the same. `make reference` writes this page.

"""


def usage(*words: str) -> str:
    shown = CliRunner().invoke(app, [*words, "--help"], prog_name="kilter", terminal_width=100, color=False).output
    return "\n".join(line.rstrip() for line in shown.strip().splitlines())


def commands(text: str) -> list[str]:
    """The names below `Commands:` in a help text."""
    listing = text.partition("Commands:\n")[2]
    return re.findall(r"^  ([a-z][\w-]*)", listing, re.MULTILINE)


def page() -> str:
    sections = []
    for name in commands(usage()):
        inner = commands(usage(name))
        for words in [[name, sub] for sub in inner] or [[name]]:
            sections.append(f"## kilter {' '.join(words)}\n\n```text\n{usage(*words)}\n```\n")
    return HEAD + "\n".join(sections)


def schema_text() -> str:
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    (REFERENCE / "cli.md").write_text(page())
    (REFERENCE / "schema.json").write_text(schema_text())

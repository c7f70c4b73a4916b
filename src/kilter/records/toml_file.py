"""Read TOML files."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from kilter.errors import Mistake


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. A Mistake says what is wrong with it."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise Mistake(f"'{path}' cannot be read: {e.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise Mistake(f"'{path}' is not a TOML file: {e}.") from None

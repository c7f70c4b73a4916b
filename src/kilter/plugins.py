"""A user's own class or function, named `file.py:Name`."""

from __future__ import annotations

import sys
import traceback
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from kilter.errors import Mistake, unknown


def is_file_spec(spec: str) -> bool:
    """Whether this names something in a file.

    >>> is_file_spec("my/net.py:Net"), is_file_spec("cnn:32")
    (True, False)
    """
    return ".py:" in spec or spec.endswith(".py")


def load_object(spec: str) -> object:
    """What `Name` is in `file.py`, which is run as a module; it may import the files beside it."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise Mistake(f"'{spec}' does not name an object in a file: write path/to/file.py:Name.")
    module = _run(Path(file))
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        if not own:
            raise Mistake(f"{file} defines no '{name}', nor any other class or function: check the path.")
        raise unknown(f"name in {file}", name, own)
    found: object = getattr(module, name)
    return found


def _run(path: Path) -> ModuleType:
    """The file as a module; the same text at the same place is run once in a process."""
    try:
        path = path.expanduser().resolve()
        source = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: an unknown ~user
        raise Mistake(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}. Check the path.") from error
    name = f"kilter_plugin_{path.stem}_{blake2b(bytes(path) + source, digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        raise Mistake(f"{path} does not run: {error_text(error, path)}. Correct it there.") from error
    return module


def error_text(error: Exception, path: Path) -> str:
    """An error in one line, with the last line of this file in its traceback."""
    if isinstance(error, SyntaxError):
        line, text = error.lineno, error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line, text = next((f.lineno for f in reversed(frames) if f.filename == str(path)), None), str(error)
    first = (text or "no message").strip().split("\n")[0].removesuffix(".")
    return f"{f'line {line}: ' if line else ''}{type(error).__name__}: {first}"

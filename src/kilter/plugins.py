"""Load a user's class or function, written as `file.py:Name`."""

from __future__ import annotations

import sys
import traceback
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from kilter.errors import Mistake, unknown


def is_file_spec(spec: str) -> bool:
    """Whether this names an object in a file.

    >>> is_file_spec("my/net.py:Net"), is_file_spec("cnn:32")
    (True, False)
    """
    return ".py:" in spec or spec.endswith(".py")


def load_object(spec: str) -> object:
    """The object `Name` of `file.py`. The file is run as a module and may import files in its folder."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise Mistake(f"'{spec}' does not name an object in a file: write path/to/file.py:Name.")
    module = _run(Path(file))
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        if not own:
            raise Mistake(f"{file} defines neither '{name}' nor any other class or function: check the path.")
        raise unknown(f"name in {file}", name, own)
    value: object = getattr(module, name)
    return value


def _run(path: Path) -> ModuleType:
    """Run the file as a module. A file with the same path and text is run once in a process."""
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
    sys.modules[name] = module  # before it runs, because dataclasses look up their module
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        raise Mistake(f"{path} cannot be run: {error_text(error, path)}. Correct the file.") from error
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

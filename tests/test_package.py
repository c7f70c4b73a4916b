"""The package itself: public names, imported when they are first used."""

import subprocess
import sys

import pytest

import kilter


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_every_public_name_can_be_imported():
    assert sorted(name for names in kilter.MODULES.values() for name in names) == sorted(kilter.__all__)
    for name in kilter.__all__:
        assert getattr(kilter, name).__name__ == name
    assert set(kilter.__all__) < set(dir(kilter))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kilter' has no attribute 'federates'"):
        kilter.federates  # noqa: B018


@pytest.mark.processes
def test_federate_is_the_function_whatever_was_imported_first():
    assert python("import kilter.federate; from kilter import federate; print(callable(federate))") == "True"
    assert python("from kilter import federate; import kilter.federate; print(callable(kilter.federate))") == "True"
    assert python("from kilter.experiment import Experiment; import kilter; print(callable(kilter.federate))") == "True"


def test_importing_the_package_does_not_import_torch():
    assert python("import sys, kilter; print('torch' in sys.modules)") == "False"

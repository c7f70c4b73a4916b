"""Every method declares in its file what leaves a node."""

from __future__ import annotations

import pytest

from kilter.core import DISCLOSURES, Method
from kilter.methods import methods
from small import method


@pytest.mark.parametrize("name", methods())
def test_a_method_declares_what_leaves_a_node(name: str) -> None:
    assert "sends" in vars(methods()[name])
    assert methods()[name].sends <= set(DISCLOSURES)


def test_methods_that_send_rows_say_so() -> None:
    assert {name for name, kind in methods().items() if "rows" in kind.sends} == {"pooled", "feddisk-oracle"}
    assert "rows" not in method("fedmix").discloses()
    assert "rows" in method("fedmix", mash=1).discloses()


def test_a_method_that_declares_nothing_is_assumed_to_send_rows() -> None:
    assert Method.sends == {"rows"}

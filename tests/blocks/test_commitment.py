"""Commitments bind to the value and hide it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.blocks.commitment import commitment

counts = st.lists(st.integers(0, 1000), min_size=1, max_size=10)


@given(counts, counts, st.integers(0, 2**63), st.integers(0, 2**63))
def test_two_commitments_are_equal_only_for_the_same_value_and_nonce(a, b, x, y):
    assert (commitment(torch.tensor(a), x) == commitment(torch.tensor(b), y)) == ((a, x) == (b, y))

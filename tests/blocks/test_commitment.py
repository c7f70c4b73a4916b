"""Commitments bind to the value and hide it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.blocks.commitment import commitment

counts = st.lists(st.integers(0, 1000), min_size=1, max_size=10)


names = st.sampled_from(["a", "b"])


@given(counts, counts, st.integers(0, 2**63), st.integers(0, 2**63), names, names)
def test_two_commitments_are_equal_only_for_the_same_value_nonce_and_sender(a, b, x, y, m, n):
    same = (a, x, m) == (b, y, n)
    assert (commitment(torch.tensor(a), x, m) == commitment(torch.tensor(b), y, n)) == same

"""A common scale of features: the moments of pooled rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.blocks.density.moments import moments_of, pooled_scale, standardised
from kilter.core import Rows


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 1000))
def test_the_scale_is_that_of_all_rows_together(sizes, seed):
    rng = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, 3, generator=rng) * 5 + 2 for n in sizes]
    scale = pooled_scale([(moments_of(x), len(x)) for x in parts])
    whole = torch.cat(parts)
    assert torch.allclose(scale["mean"], whole.mean(0), atol=1e-5)
    if len(whole) > 1:
        assert torch.allclose(scale["std"], whole.std(0, correction=0), atol=1e-4)


def test_a_constant_feature_and_no_rows_are_left_alone():
    x = torch.full((4, 1), 7.0)
    scale = pooled_scale([(moments_of(x), 4)])
    assert standardised(Rows.of(x=x, y=torch.zeros(4)), scale)["x"].tolist() == [[0.0]] * 4
    empty = Rows.of(x=x[:0], y=torch.zeros(0))
    assert standardised(empty, scale) is empty

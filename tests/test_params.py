"""The algebra of models: it is a vector space, and averages stay where averages belong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kilter import params
from kilter.params import add, apply, average, buffers, count, dot, drop, mean, move, pick, scale, sq_norm, sub, weights
from small import near, same

numbers = st.floats(-1e3, 1e3, width=32)
pair = st.tuples(numbers, numbers)


@st.composite
def models(draw: st.DrawFn, n: int = 1) -> list[dict[str, Tensor]]:
    """n models of one shape, with a weight matrix, a scalar, a buffer and a counter."""
    rows = draw(st.integers(1, 3))

    def one() -> dict[str, Tensor]:
        flat = draw(st.lists(numbers, min_size=2 * rows, max_size=2 * rows))
        return {
            "w": torch.tensor(flat).reshape(rows, 2),
            "s": torch.tensor(draw(numbers)),
            "~mean": torch.tensor([draw(numbers)]),
            "~count": torch.tensor(draw(st.integers(0, 2**40))),
        }

    return [one() for _ in range(n)]


def numeric(p: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in p.items() if v.is_floating_point()}


@given(models(3), numbers)
def test_vector_space(three: list[dict[str, Tensor]], s: float) -> None:
    a, b, c = map(numeric, three)
    assert same(add(a, b), add(b, a))
    assert near(add(add(a, b), c), add(a, add(b, c)), 1e-3)
    assert same(add(a, params.zeros(a)), apply(lambda v: v + 0, a))
    assert near(sub(add(a, b), b), a, 1e-3)
    assert near(scale(add(a, b), s), add(scale(a, s), scale(b, s)), 0.5)
    assert float(dot(a, b)) == pytest.approx(float(dot(b, a)), rel=1e-5, abs=1e-5)
    assert float(sq_norm(a)) == pytest.approx(sum(float((v.double() ** 2).sum()) for v in a.values()), rel=1e-4)


def test_known_answers() -> None:
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 5.0])}
    assert add(a, b)["w"].tolist() == [4, 7]
    assert sub(a, b)["w"].tolist() == [-2, -3]
    assert scale(a, 3)["w"].tolist() == [3, 6]
    assert float(dot(a, b)) == 13
    assert float(sq_norm(b)) == 34
    assert move(a, b, 0.5)["w"].tolist() == [2, 3.5]
    assert count({"a": torch.zeros(2, 3), "b": torch.zeros(())}) == 7


def test_binary_operations_run_over_the_left_names() -> None:
    small, whole = {"w": torch.ones(2)}, {"w": torch.ones(2), "v": torch.ones(3), "~m": torch.ones(1)}
    for operation in (add, sub):
        assert operation(small, whole).keys() == {"w"}
    assert float(dot(small, whole)) == 2
    with pytest.raises(KeyError):
        add(whole, small)


def test_parts_and_whole() -> None:
    p = {"body.w": torch.ones(1), "head.w": torch.ones(2), "~body.m": torch.ones(3)}
    assert list(weights(p)) == ["body.w", "head.w"]
    assert list(buffers(p)) == ["~body.m"]
    names = {"head.w", "not there"}
    assert list(pick(p, names)) == ["head.w"]
    assert list(drop(p, names)) == ["body.w", "~body.m"]
    assert same(
        drop(p, names) | pick(p, names), {"body.w": p["body.w"], "~body.m": p["~body.m"], "head.w": p["head.w"]}
    )


def test_scale_and_move_keep_counters_and_move_copies_buffers() -> None:
    x = {"w": torch.tensor([0.0]), "~m": torch.tensor([0.0]), "~n": torch.tensor(3)}
    to = {"w": torch.tensor([4.0]), "~m": torch.tensor([8.0]), "~n": torch.tensor(7)}
    assert scale(x | {"w": torch.tensor([2.0])}, 0.5)["~n"] == 3
    moved = move(x, to, 0.25)
    assert (moved["w"].item(), moved["~m"].item(), moved["~n"].item()) == (1.0, 8.0, 7)


@given(models(), st.lists(st.floats(0.1, 100), min_size=1, max_size=6))
def test_average_of_identical_models_is_that_model_bit_for_bit(one: list[dict[str, Tensor]], w: list[float]) -> None:
    actual = average((one[0], weight) for weight in w)
    assert all(torch.equal(actual[k], v) for k, v in one[0].items())  # -0.0 may come back as 0.0


@given(models(4), st.lists(st.floats(0, 50), min_size=4, max_size=4).filter(lambda w: sum(w) > 0.1))
def test_average_is_a_weighted_mean_in_the_hull_in_any_order(four: list[dict[str, Tensor]], w: list[float]) -> None:
    # A first weight of zero is allowed: the mean starts there and leaves at once.
    actual = average(zip(four, w, strict=True))
    back = average(zip(four[::-1], w[::-1], strict=True))
    for k, v in numeric(actual).items():
        stack = torch.stack([m[k].double() for m in four])
        counted = torch.stack([m[k] for m, x in zip(four, w, strict=True) if x > 0])
        expected = (stack * torch.tensor(w, dtype=torch.float64).reshape(-1, *[1] * v.dim())).sum(0) / sum(w)
        assert torch.allclose(v.double(), expected, rtol=1e-5, atol=1e-3)
        assert torch.allclose(v, back[k], rtol=1e-5, atol=1e-3)
        slack = 1e-6 * stack.abs().max() + 1e-12
        assert (v >= counted.min(0).values - slack).all()
        assert (v <= counted.max(0).values + slack).all()


@given(models(3), st.floats(0.01, 1e6))
def test_only_ratios_of_weights_matter(three: list[dict[str, Tensor]], s: float) -> None:
    plain = average(zip(three, [1, 2, 3], strict=True))
    scaled = average(zip(three, [s, 2 * s, 3 * s], strict=True))
    assert near(numeric(plain), numeric(scaled), 1e-3)


def test_average_known_answers() -> None:
    models = [{"w": torch.tensor([a, b])} for a, b in [(1.0, 2.0), (3.0, 0.0), (5.0, 4.0)]]
    assert near(average(zip(models, [100, 300, 600], strict=True)), {"w": torch.tensor([4.0, 2.6])})  # METHODS B1
    assert near(mean(models), {"w": torch.tensor([3.0, 2.0])})
    conv = [{"conv": torch.tensor([1.0])}, {"conv": torch.tensor([3.0])}]
    assert average(zip(conv, [0.25, 0.75], strict=True))["conv"].item() == 2.5


def test_counters_are_those_of_the_first_model() -> None:
    models = [{"~n": torch.tensor(n), "~m": torch.tensor([float(n)])} for n in (5, 100, 1000)]
    actual = mean(models)
    assert actual["~n"].item() == 5
    assert actual["~n"].dtype == torch.int64
    assert actual["~m"].item() == pytest.approx(368.3333, rel=1e-5)


def test_average_does_not_modify_its_arguments_and_takes_an_iterator() -> None:
    models = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]
    actual = average((m, 1) for m in models)
    actual["w"] += 100
    assert [m["w"].item() for m in models] == [1, 3]


@pytest.mark.parametrize("bad", [[], [0.0, 0.0], [1.0, -0.5], [1.0, float("nan")]])
def test_average_refuses_invalid_weights(bad: list[float]) -> None:
    with pytest.raises(ValueError):
        average(({"w": torch.ones(1)}, w) for w in bad)

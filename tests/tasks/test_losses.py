"""Losses by name: known answers, textbook definitions, and the same numbers stacked and one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from kilter.errors import Mistake
from kilter.tasks import losses
from kilter.tasks.kinds import KINDS, kind_of
from kilter.tasks.losses import TargetFacts, class_weights, cox

TABLES = {
    "multi-class": losses.CLASSES,
    "multi-label": losses.LABELS,
    "regression": losses.NUMBERS,
    "survival": losses.SURVIVAL,
    "segmentation": losses.PIXELS,
    "next-token": losses.TOKENS,
}
FACTS = TargetFacts(classes=3, mean=5.0, std=2.0, class_weights=(1.0, 2.0, 0.5))


def example(task: str, loss: str, rows: int = 12) -> tuple[Tensor, Tensor]:
    """Outputs and targets of a task."""
    rng = torch.Generator().manual_seed(3)
    n = kind_of(task).outputs(FACTS, loss)
    if task == "segmentation":
        return torch.randn(rows, 3, 4, 5, generator=rng), torch.randint(0, 3, (rows, 4, 5), generator=rng)
    if task == "next-token":
        return torch.randn(rows, 6, 3, generator=rng), torch.randint(0, 3, (rows, 6), generator=rng)
    outputs = torch.randn(rows, n, generator=rng)
    if task == "multi-label":
        return outputs, torch.randint(0, 2, (rows, 3), generator=rng).float()
    if task == "regression":
        return outputs, torch.randn(rows, generator=rng) * 2 + 5
    if task == "survival":
        return outputs, torch.stack(
            [torch.rand(rows, generator=rng) * 10, torch.randint(0, 2, (rows,), generator=rng).float()], 1
        )
    return outputs, torch.randint(0, 3, (rows,), generator=rng)


@pytest.mark.parametrize(("task", "loss"), [(task, loss) for task, table in TABLES.items() for loss in table])
def test_every_loss_gives_one_number_for_each_row_and_a_gradient_also_under_vmap(task: str, loss: str) -> None:
    f = kind_of(task).loss(loss, FACTS)
    outputs, y = example(task, loss)
    plain = f(outputs, y)
    assert plain.shape == (12,)
    assert plain.isfinite().all()
    assert (plain >= 0).all()
    both = torch.func.vmap(f)(torch.stack([outputs, outputs * 0.5]), torch.stack([y, y]))
    assert torch.allclose(both[0], plain, atol=1e-6)
    assert torch.allclose(both[1], f(outputs * 0.5, y), atol=1e-6)
    leaf = outputs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(leaf, y).mean(), [leaf])
    assert grad.isfinite().all()
    assert grad.abs().sum() > 0


def test_focal_loss_with_small_gamma_approaches_cross_entropy_and_discounts_easy_rows() -> None:
    outputs, y = example("multi-class", "focal")
    assert torch.allclose(
        kind_of("multi-class").loss("focal:0.000001", FACTS)(outputs, y),
        cross_entropy(outputs, y, reduction="none"),
        atol=1e-4,
    )
    easy, hard = kind_of("multi-class").loss("focal", FACTS)(torch.tensor([[4.0, 0], [0.0, 4]]), torch.tensor([0, 0]))
    assert easy < 1e-4 * hard


def test_class_weights_make_classes_count_the_same() -> None:
    weights = class_weights([900, 90, 10])
    assert [round(n * w, 6) for n, w in zip([900, 90, 10], weights, strict=True)] == [pytest.approx(1000 / 3)] * 3
    assert class_weights([10, 0]) == (1.0, 1.0)
    f = kind_of("multi-class").loss("class-weights", FACTS)
    outputs, y = example("multi-class", "class-weights")
    assert torch.allclose(f(outputs, y), cross_entropy(outputs, y, reduction="none") * torch.tensor([1.0, 2.0, 0.5])[y])
    with pytest.raises(Mistake, match="class counts"):
        kind_of("multi-class").loss("class-weights", TargetFacts(classes=3))


def test_huber_is_squared_near_zero_and_linear_beyond_in_units_of_the_deviation() -> None:
    f = kind_of("regression").loss("huber:1", TargetFacts(std=10.0))
    near, far = f(torch.tensor([[5.0], [30.0]]), torch.tensor([0.0, 0.0]))
    assert near == pytest.approx(0.5 * 0.5**2)
    assert far == pytest.approx(3 - 0.5)


def cox_by_hand(risks: list[float], times: list[float], events: list[int]) -> list[float]:
    """The definition, pair by pair."""
    rows = range(len(risks))
    return [
        events[i] * (math.log(sum(math.exp(risks[j]) for j in rows if times[j] >= times[i])) - risks[i]) for i in rows
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 6), st.integers(0, 1)), min_size=1, max_size=20), st.booleans()
)
def test_cox_is_the_definition_with_ties_by_pairs_and_by_sorting(
    rows: list[tuple[float, int, int]], sorting: bool
) -> None:
    risks, times, events = ([row[k] for row in rows] for k in range(3))
    outputs, y = torch.tensor(risks, dtype=torch.float64)[:, None], torch.tensor([times, events]).t().double()
    limit = losses.PAIRS
    losses.PAIRS = 0 if sorting else limit
    try:
        assert cox(outputs, y).tolist() == pytest.approx(cox_by_hand(risks, times, events), abs=1e-9)
    finally:
        losses.PAIRS = limit


def test_discrete_time_reaches_the_hazards_of_the_data() -> None:
    """With one common row of outputs, the optimum is the empirical hazard of every interval."""
    facts = TargetFacts(mean=1.0)
    f = kind_of("survival").loss("discrete-time:3", facts)
    cuts = losses.cut_points(1.0, 3)
    times = torch.tensor([0.1] * 2 + [float(cuts[0]) + 0.1] * 3 + [float(cuts[1]) + 1] * 5)
    y = torch.stack([times, torch.ones(10)], 1)
    logits = torch.zeros(1, 3, requires_grad=True)
    for _ in range(2000):
        (grad,) = torch.autograd.grad(f(logits.expand(10, 3), y).mean(), [logits])
        logits = (logits - grad).detach().requires_grad_()
    hazards = torch.sigmoid(logits)[0].tolist()
    assert hazards[:2] == pytest.approx([2 / 10, 3 / 8], abs=1e-3)
    assert hazards[2] > 0.99


def test_padding_counts_for_nothing() -> None:
    outputs, y = example("next-token", "")
    padded = y.clone()
    padded[:, 4:] = losses.IGNORED
    assert torch.allclose(losses.next_token(outputs, padded), losses.next_token(outputs[:, :4], y[:, :4]))


@pytest.mark.parametrize(
    ("task", "spec", "says"),
    [
        ("multi-class", "focl", "did you mean 'focal'"),
        ("multi-class", "focal:x", "a number above 0"),
        ("multi-class", "label-smoothing:1", "at most 0.999"),
        ("multi-class", "cross-entropy:2", "no number"),
        ("regression", "cross-entropy", "loss of this task"),
    ],
)
def test_wrong_losses_are_refused_in_one_sentence(task: str, spec: str, says: str) -> None:
    with pytest.raises(Mistake, match=says):
        kind_of(task).loss(spec, FACTS)


def test_wrong_metrics_are_refused_and_right_ones_added() -> None:
    with pytest.raises(Mistake, match="auroc"):
        kind_of("multi-class").extra("auroc,aurok")
    assert set(kind_of("multi-class").extra("auroc, brier")) == {"auroc", "brier"}
    assert set(kind_of("binary").extra("")) == {"auroc", "auprc"}
    for kind in KINDS.values():
        assert kind.main in ({"accuracy"} if kind.metrics is None else kind.metrics)

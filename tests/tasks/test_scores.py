"""Metrics of tasks against scikit-learn and against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from kilter.errors import Mistake
from kilter.metrics import direction
from kilter.tasks import scores
from kilter.tasks.kinds import KINDS, prediction, probabilities
from kilter.tasks.losses import TargetFacts

RNG = torch.Generator().manual_seed(1)
TIED = torch.randint(0, 5, (200,), generator=RNG).float()  # scores with many ties
TRUTH = torch.randint(0, 2, (200,), generator=RNG)


def test_areas_equal_those_of_scikit_learn_with_ties() -> None:
    assert scores.area_under_roc(TIED, TRUTH) == pytest.approx(sk.roc_auc_score(TRUTH, TIED), abs=1e-12)
    assert scores.average_precision(TIED, TRUTH) == pytest.approx(sk.average_precision_score(TRUTH, TIED), abs=1e-12)


def test_areas_of_classes() -> None:
    outputs, y = torch.randn(150, 3, generator=RNG), torch.randint(0, 3, (150,), generator=RNG)
    p = torch.softmax(outputs.double(), 1).numpy()
    assert scores.auroc(outputs, y) == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"), abs=1e-9)
    assert scores.auroc(outputs[:, :2], TRUTH[:150]) == pytest.approx(
        sk.roc_auc_score(TRUTH[:150], torch.softmax(outputs[:, :2].double(), 1)[:, 1]), abs=1e-9
    )
    assert scores.auprc(outputs, y) == pytest.approx(
        sk.average_precision_score(np.eye(3)[y.numpy()], p, average="macro"), abs=1e-9
    )


def test_metrics_of_each_class_equal_those_of_scikit_learn() -> None:
    outputs, y = torch.randn(150, 3, generator=RNG), torch.randint(0, 2, (150,), generator=RNG)
    measured = {name: f(outputs, y) for name, f in scores.of_classes(("cat", "dog", "emu")).items()}
    p, r, f, _ = sk.precision_recall_fscore_support(y, outputs.argmax(1), labels=[0, 1, 2], zero_division=0)
    for c, name in enumerate(("cat", "dog")):
        ours = [measured[f"{metric}:{name}"] for metric in ("precision", "recall", "f1")]
        assert ours == pytest.approx([p[c], r[c], f[c]])
    assert all(value is None for name, value in measured.items() if name.endswith(":emu"))  # no rows of this class


def test_by_class_is_for_classifiers_only() -> None:
    KINDS["multi-class"].check("", "by_class")
    target = TargetFacts(classes=2)
    assert "recall:1" in KINDS["multi-class"].extra("by_class", target)
    with pytest.raises(Mistake, match="by_class"):
        KINDS["regression"].check("", "by_class")


def test_an_area_without_two_classes_is_not_defined() -> None:
    assert scores.auroc(torch.randn(5, 2), torch.zeros(5, dtype=torch.int64)) is None
    assert scores.average_precision(torch.randn(5), torch.zeros(5)) is None


def test_brier_of_certain_right_and_wrong_rows() -> None:
    outputs = torch.tensor([[100.0, 0.0], [100.0, 0.0]])
    assert scores.brier(outputs, torch.tensor([0, 1])) == pytest.approx(1.0)


def test_labels_equal_scikit_learn() -> None:
    outputs, y = torch.randn(80, 4, generator=RNG), torch.randint(0, 2, (80, 4), generator=RNG).float()
    assert scores.label_auroc(outputs, y) == pytest.approx(sk.roc_auc_score(y, outputs), abs=1e-6)
    assert scores.label_auprc(outputs, y) == pytest.approx(sk.average_precision_score(y, outputs), abs=1e-6)
    assert scores.label_f1(outputs, y) == pytest.approx(sk.f1_score(y, outputs > 0, average="macro"), abs=1e-9)
    assert scores.exact_match(outputs, y) == pytest.approx(sk.accuracy_score(y, outputs > 0))


def test_numbers_equal_scikit_learn() -> None:
    outputs, y = torch.randn(50, 1, generator=RNG), torch.randn(50, generator=RNG)
    assert scores.mae(outputs, y) == pytest.approx(sk.mean_absolute_error(y, outputs), abs=1e-6)
    assert scores.rmse(outputs, y) == pytest.approx(sk.root_mean_squared_error(y, outputs), abs=1e-6)
    assert scores.r2(outputs, y) == pytest.approx(sk.r2_score(y, outputs), abs=1e-6)
    assert scores.r2(outputs, torch.ones(50)) is None


def concordance(risks: list[float], times: list[int], events: list[int]) -> float | None:
    """The definition, pair by pair."""
    right = pairs = 0.0
    for i in range(len(risks)):
        for j in range(len(risks)):
            if events[i] and (times[j] > times[i] or (times[j] == times[i] and not events[j])):
                pairs += 1
                right += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return right / pairs if pairs else None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 5), st.integers(0, 1)), max_size=25))
def test_the_concordance_index_is_its_definition_with_ties_and_censoring(rows: list[tuple[int, int, int]]) -> None:
    risks, times, events = ([row[k] for row in rows] for k in range(3))
    outputs, y = torch.tensor(risks).float().reshape(-1, 1), torch.tensor([times, events]).t().float().reshape(-1, 2)
    expected = concordance(risks, times, events)
    assert scores.c_index(outputs, y) == (None if expected is None else pytest.approx(expected))


def test_risk_of_discrete_time_grows_with_hazards() -> None:
    early, late = scores.risk(torch.tensor([[2.0, 0.0, 0.0], [-2.0, 0.0, 0.0]]))
    assert early > late


def test_overlap_of_pixels() -> None:
    truth = torch.tensor([[[0, 1], [1, 2]]])
    perfect = torch.nn.functional.one_hot(truth, 3).movedim(-1, 1).float()
    assert scores.dice(perfect, truth) == scores.iou(perfect, truth) == scores.pixel_accuracy(perfect, truth) == 1.0
    half = torch.nn.functional.one_hot(torch.tensor([[[0, 1], [0, 0]]]), 3).movedim(-1, 1).float()
    assert scores.dice(half, truth) == pytest.approx((2 / 3 + 0) / 2)
    assert scores.iou(half, truth) == pytest.approx((1 / 2 + 0) / 2)
    assert scores.dice(half, torch.zeros_like(truth)) == 0.0
    assert scores.dice(torch.ones(1, 2, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64)) is None


def test_perplexity_of_a_uniform_guess_is_the_number_of_tokens() -> None:
    y = torch.randint(0, 7, (4, 9), generator=RNG)
    assert scores.perplexity(torch.zeros(4, 9, 7), y) == pytest.approx(7, rel=1e-5)
    certain = 100 * torch.nn.functional.one_hot(y, 7).float()
    assert scores.token_accuracy(certain, y) == 1.0


def test_directions_of_main_metrics() -> None:
    better = {k.name: direction(k.main, (k.metrics or {}).get(k.main)) for k in KINDS.values()}
    assert [name for name, word in better.items() if word == "lower"] == ["regression", "next-token"]


def test_predictions_and_probabilities() -> None:
    outputs = torch.tensor([[2.0, -1.0], [-1.0, 3.0]])
    assert prediction("multi-class", outputs).tolist() == [0, 1]
    assert prediction("multi-label", outputs).tolist() == [[1, 0], [0, 1]]
    assert prediction("regression", outputs[:, :1]).tolist() == [2.0, -1.0]
    assert probabilities("regression", outputs) is None
    assert probabilities("binary", outputs).sum(1).tolist() == pytest.approx([1, 1])
    assert probabilities("multi-label", outputs)[0, 0] == pytest.approx(0.8808, abs=1e-4)

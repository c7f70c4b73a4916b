"""Metrics: known answers, and scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as theirs

from kilter import metrics
from kilter.metrics import (
    calibration_error,
    classification,
    classifications,
    confusion,
    entropy,
    local_accuracy,
    measure_each,
    per_class,
    recalls,
)


def test_one_against_the_rest_known_answers() -> None:
    """METHODS 4.4, B7."""
    counts = torch.tensor([[50, 3, 2], [4, 80, 6], [1, 5, 49]])
    expected = {
        "accuracy": [0.95, 0.91, 0.93],
        "precision": [0.909091, 0.909091, 0.859649],
        "recall": [0.909091, 0.888889, 0.890909],
        "specificity": [0.965517, 0.927273, 0.944828],
        "f1": [0.909091, 0.898876, 0.875],
    }
    actual = per_class(counts)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, abs=1e-6)
    y = torch.arange(3).repeat_interleave(counts.sum(1))
    said = torch.cat([torch.arange(3).repeat_interleave(row) for row in counts])
    outputs = torch.nn.functional.one_hot(said, 3).float()
    assert torch.equal(confusion(outputs, y), counts)
    assert classification(outputs, y)["accuracy"] == pytest.approx(0.895)


@st.composite
def predictions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and labels, often with classes missing in truth, prediction or both."""
    classes, n = draw(st.integers(2, 8)), draw(st.integers(1, 40))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    labels = draw(st.integers(1, classes))
    outputs = torch.randn(n, classes, generator=rng)
    return outputs, torch.randint(0, labels, (n,), generator=rng)


@given(predictions())
def test_scikit_learn_agrees(both: tuple[torch.Tensor, torch.Tensor]) -> None:
    outputs, y = both
    said, classes = outputs.argmax(1), outputs.shape[1]
    actual = classification(outputs, y)
    macro = {"average": "macro", "zero_division": 0}
    assert actual["accuracy"] == pytest.approx(theirs.accuracy_score(y, said))
    assert actual["precision"] == pytest.approx(theirs.precision_score(y, said, **macro))
    assert actual["recall"] == pytest.approx(theirs.recall_score(y, said, **macro))
    assert actual["f1"] == pytest.approx(theirs.f1_score(y, said, **macro))
    assert actual["loss"] == pytest.approx(
        theirs.log_loss(y, torch.softmax(outputs.double(), 1), labels=list(range(classes))), rel=1e-6
    )
    present = y.unique().tolist()
    recalls = theirs.recall_score(y, said, labels=present, average=None, zero_division=0)
    assert actual["balanced_accuracy"] == pytest.approx(recalls.mean())
    assert torch.equal(
        confusion(outputs, y), torch.tensor(theirs.confusion_matrix(y, said, labels=list(range(classes))))
    )
    if classes > 5:
        score = theirs.top_k_accuracy_score(y, outputs, k=5, labels=list(range(classes)))
        assert actual["top5"] == pytest.approx(score)
    else:
        assert actual["top5"] == 1
    assert all(0 <= v <= 1 for k, v in actual.items() if k != "loss")


@given(predictions())
def test_specificity_is_the_recall_of_the_other_classes(both: tuple[torch.Tensor, torch.Tensor]) -> None:
    outputs, y = both
    said = outputs.argmax(1)
    for c, value in enumerate(per_class(confusion(outputs, y))["specificity"]):
        others = y != c
        assert value == pytest.approx(float((said[others] != c).double().mean()) if others.any() else 0)


@given(st.data())
def test_several_nodes_are_measured_like_each_one(data: st.DataObject) -> None:
    outputs, y = data.draw(predictions())
    cuts = sorted(data.draw(st.sets(st.integers(1, len(y) - 1), max_size=5))) if len(y) > 1 else []
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, len(y)], strict=True)]
    actual = classifications(outputs, y, sizes)
    for one, mine, labels in zip(actual, outputs.split(sizes), y.split(sizes), strict=True):
        assert one == pytest.approx(classification(mine, labels), abs=1e-12)
        assert one["calibration_error"] == pytest.approx(calibration_error(mine.double().softmax(1), labels), abs=1e-12)


def test_many_classes_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, y = torch.randn(60, 7), torch.arange(60) % 7
    sizes = [10, 20, 5, 25]
    whole = classifications(outputs, y, sizes)
    for cells in (1, 2 * 7**2, 3 * 7**2):
        monkeypatch.setattr(metrics, "CELLS", cells)
        assert classifications(outputs, y, sizes) == [pytest.approx(one, abs=1e-12) for one in whole]


def test_the_users_metrics_come_with_the_loss() -> None:
    own = {"two": lambda *_: 2, "rows": lambda o, _: len(o)}
    actual = measure_each(torch.zeros(5, 1), torch.ones(5), [2, 3], own, {}, lambda _, y: float(y.sum()))
    assert actual == [{"loss": 2.0, "two": 2.0, "rows": 2.0}, {"loss": 3.0, "two": 2.0, "rows": 3.0}]


def test_local_accuracy_weights_classes_by_the_clients_shares() -> None:
    """METHODS 2.4, S6."""
    assert local_accuracy([0.9, 0.5, 0.7], [2000, 5, 1000]) == pytest.approx(0.832779, abs=1e-6)
    assert local_accuracy([0.9, None, 0.7], [1, 98, 1]) == pytest.approx(
        0.8
    )  # nothing is known of a class without rows
    assert local_accuracy([None, 0.5], [7, 0]) is None
    assert recalls(torch.tensor([[3, 1, 0], [0, 0, 0], [1, 1, 2]])) == [0.75, None, 0.5]


@given(predictions())
def test_with_the_shares_of_the_test_set_local_accuracy_is_accuracy(both: tuple[torch.Tensor, torch.Tensor]) -> None:
    outputs, y = both
    counts = confusion(outputs, y)
    assert local_accuracy(recalls(counts), counts.sum(1).tolist()) == pytest.approx(
        classification(outputs, y)["accuracy"]
    )


def test_calibration_by_hand() -> None:
    """Three of four at confidence .9 are right, one of two at .6: gaps .15 and .1, by rows."""
    p = torch.tensor([[0.9, 0.1]] * 4 + [[0.6, 0.4]] * 2)
    y = torch.tensor([0, 0, 0, 1, 0, 1])
    assert calibration_error(p, y) == pytest.approx((4 * 0.15 + 2 * 0.1) / 6, abs=1e-6)
    assert calibration_error(torch.eye(3), torch.arange(3)) == 0


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_entropy_is_largest_for_a_uniform_prediction(classes: int, seed: int) -> None:
    p = torch.distributions.Dirichlet(torch.ones(classes)).sample((20,))
    actual = entropy(p)
    assert bool(((actual >= 0) & (actual <= 1)).all())
    assert entropy(torch.full((1, classes), 1 / classes)).item() == pytest.approx(1, abs=1e-6)
    nats = torch.distributions.Categorical(p).entropy()
    assert (actual * np.log(classes)).numpy() == pytest.approx(nats.numpy(), abs=1e-5)

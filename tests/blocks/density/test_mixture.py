"""Mixtures of labels: METHODS E2, E4; scikit-learn as the oracle where it computes the same thing; what cannot go wrong."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.mixture import GaussianMixture

from kilter.blocks.density import mixture
from kilter.blocks.density.mixture import bic, bins, choose, density, fit, log_likelihood, most

A = np.array([[0.2, 9, 0.1], [0.8, 1.18181818, 1.33]])
E4 = np.bincount([0] * 30 + [1] * 10 + [8] * 40 + [9] * 20)


def test_e4_em_likelihood_and_bic():
    one, two = fit(E4, 1), fit(E4, 2)
    assert one == pytest.approx(np.array([[1, 5.1, 15.89]]), abs=1e-9)
    assert two == pytest.approx(np.array([[0.4, 0.25, 0.1875], [0.6, 8.333333, 0.222222]]), abs=1e-6)
    assert [log_likelihood(one, E4), log_likelihood(two, E4)] == pytest.approx([-280.178352, -130.593169], abs=1e-6)
    assert [bic(one, E4), bic(two, E4)] == pytest.approx([569.567045, 284.212190], abs=1e-6)
    assert len(choose(E4)) == 2


def test_e4_most_components():
    assert [most(labels) for labels in (1, 2, 3, 5, 10)] == [1, 1, 2, 3, 5]
    assert [most(10, rho) for rho in (0.01, 0.3, 1.0, 7.0)] == [1, 3, 10, 10]


def test_e2_masses_of_classes():
    expected = [0.221752, 0.265198, 0.211836, 0.083447, 0.016163, 0.001532, 0.000071, 0.000002, 0.011384, 0.188615]
    assert bins(A, 10) == pytest.approx(expected, abs=1e-6)
    assert density(A, 10).sum() == pytest.approx(1.001238, abs=1e-6)  # a density at whole numbers is no distribution


def scikit_learn(counts, components, reg_covar):
    """The same start and the same end, by its means."""
    y = np.repeat(np.arange(len(counts)), counts).astype(float)
    start = np.quantile(np.unique(y), (np.arange(components) + 0.5) / components, method="hazen")
    made = GaussianMixture(
        components,
        covariance_type="spherical",
        tol=1e-6 / len(y),  # it looks at the mean log-likelihood of a row
        reg_covar=reg_covar,
        max_iter=mixture.ITERATIONS,
        weights_init=np.full(components, 1 / components),
        means_init=start[:, None],
        precisions_init=np.full(components, 1 / y.var()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 1500 iterations may not be enough for either of us
        made.fit(y[:, None])
    return np.stack([made.weights_, made.means_[:, 0], made.covariances_], axis=1), made.bic(y[:, None])


@pytest.mark.parametrize(
    ("counts", "components"),
    [(E4, 1), (E4, 2), *(([40, 60, 30, 0, 0, 5, 20, 50, 45, 10], m) for m in (1, 2, 3)), ([30] * 8, 3)],
)
def test_same_as_scikit_learn_where_the_floor_does_not_bind(counts, components):
    ours = fit(counts, components)
    theirs, their_bic = scikit_learn(counts, components, reg_covar=1e-9)
    assert ours[:, 2].min() > 0.01
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert bic(ours, counts) == pytest.approx(their_bic, abs=1e-3)


def test_scikit_learn_adds_to_variances_and_does_not_floor_them():
    """Why EM is ours: with its reg_covar the floor would change variances far above it."""
    theirs, _ = scikit_learn(E4, 2, reg_covar=1e-2)
    assert theirs[:, 2] == pytest.approx([0.1975, 0.232222], abs=1e-4)
    assert fit(E4, 2, v_floor=1e-2)[:, 2] == pytest.approx([0.1875, 0.222222], abs=1e-6)


@pytest.mark.parametrize("counts", [[1], [0, 0, 1], [0, 500, 0]])
def test_one_label_only_has_the_smallest_variance(counts):
    assert choose(counts).tolist() == [[1, int(np.flatnonzero(counts)[0]), 0.01]]


def test_components_start_at_different_means():
    theta = fit([997, 1, 1, 1], 2)
    assert theta[0, 1] != theta[1, 1]


def test_more_components_than_labels_is_refused():
    with pytest.raises(ValueError, match="3 components for 2 labels"):
        fit([5, 0, 5], 3)


def test_a_component_without_weight_has_no_mass():
    padded = np.concatenate([A, [[0, 3, 0.01]]])
    assert bins(padded, 10) == pytest.approx(bins(A, 10))
    assert density(padded, 10) == pytest.approx(density(A, 10))
    assert log_likelihood(padded, E4) == pytest.approx(log_likelihood(A, E4))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any))
def test_em_returns_a_valid_mixture(counts):
    theta = choose(counts)
    pi, mu, v = theta.T
    there = np.flatnonzero(counts)
    assert (pi >= 0).all()
    assert pi.sum() == pytest.approx(1)
    assert there[0] - 1e-9 <= mu.min() <= mu.max() <= there[-1] + 1e-9
    assert v.min() >= 0.01
    assert v.max() <= (there[-1] - there[0]) ** 2 / 4 + 0.01
    assert len(theta) <= most(len(there))
    assert bins(theta, len(counts)).sum() == pytest.approx(1)
    assert pi @ mu == pytest.approx(np.arange(len(counts)) @ counts / np.sum(counts), abs=1e-6)  # of any M-step


@pytest.mark.slow
@pytest.mark.slow
def test_three_hundred_classes_take_seconds():
    import time

    counts = np.random.default_rng(0).integers(0, 40, 300)
    began = time.process_time()
    theta = mixture.choose(counts)
    assert time.process_time() - began < 20
    assert theta[:, 0].sum() == pytest.approx(1)


def test_the_listings_mixture_is_valid():
    theta = mixture.choose_as_listed([30, 10, 0, 0, 0, 0, 0, 0, 40, 20], 0.5, 1e-2, 1e-6, np.random.default_rng(0))
    assert theta[:, 0].sum() == pytest.approx(1)
    assert (theta[:, 2] >= 1e-2).all()

"""Is the emitted text the target's own? Tests that can say no.

``g_test`` compares emitted tokens with the law they should follow. A test that never fails proves
nothing, so each comes with two numbers stated beforehand: how seldom it may fail a correct
implementation, and how surely it must fail one whose law is off by a stated distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

FALSE_FAILURE = 1e-6  # how often a whole suite may fail although nothing is wrong
MIN_EXPECTED = 5.0  # cells expected to hold less are pooled, as the chi-square law asks


@dataclass(frozen=True)
class GTest:
    """A likelihood-ratio test of counts against a law (Sokal & Rohlf's G-test).

    statistic G = 2 sum O ln(O/E), about chi-square with ``df`` degrees of freedom if the law is
    right; p_value; outside: how many draws fell where the law has probability 0.
    """

    statistic: float
    df: int
    p_value: float
    outside: int

    def passes(self, tests: int = 1) -> bool:
        """Whether the law stands, the false-failure rate being shared out over ``tests``."""
        return self.outside == 0 and self.p_value > FALSE_FAILURE / tests


def g_test(counts: np.ndarray, law: np.ndarray) -> GTest:
    """Tests observed counts [cells] against probabilities [cells]; rare cells are pooled."""
    counts, law = np.asarray(counts, float).ravel(), np.asarray(law, float).ravel()
    outside = int(counts[law <= 0].sum())
    counts, law = counts[law > 0], law[law > 0]
    observed, expected = pool(counts, law * counts.sum() / law.sum())
    df = len(observed) - 1
    if df == 0:
        return GTest(0.0, 0, 1.0, outside)
    statistic, p = stats.power_divergence(observed, expected, lambda_="log-likelihood")
    return GTest(float(statistic), df, float(p), outside)


def pool(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges the rarest cells until every cell is expected to hold MIN_EXPECTED draws."""
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    rare = int((np.cumsum(expected) < MIN_EXPECTED).sum()) + 1
    rare = max(rare, int((expected < MIN_EXPECTED).sum()))
    if rare >= len(expected):
        return observed.sum(keepdims=True), expected.sum(keepdims=True)
    return (
        np.append(observed[:rare].sum(), observed[rare:]),
        np.append(expected[:rare].sum(), expected[rare:]),
    )


def power(draws: int, df: int, distance: float, tests: int = 1) -> float:
    """How surely ``g_test`` fails a law at this total-variation distance, at least.

    A law at distance t has a chi-square divergence of at least 4 t^2, so that the statistic's
    noncentrality is at least 4 draws t^2, whatever the way in which the law is off.
    """
    critical = stats.chi2.isf(FALSE_FAILURE / tests, df)
    return float(stats.ncx2.sf(critical, df, 4 * draws * distance**2))


def detectable(draws: int, df: int, tests: int = 1, surely: float = 0.999) -> float:
    """The smallest total-variation distance that ``g_test`` fails with probability ``surely``."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if power(draws, df, middle, tests) >= surely else (middle, high)
    return high

"""Figures of a training: every number of the log is drawn, and a live figure is one figure."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from minispec import plots


def log(steps: int = 6) -> pd.DataFrame:
    nan = math.nan
    return pd.DataFrame(
        {
            "step": range(steps),
            "loss": [8.0, 6.0, 5.0, 4.0, 4.0, 3.0][:steps],
            "tau": [nan, nan, 1.1, nan, nan, 1.5][:steps],
            "alpha_1": [nan, nan, 0.1, nan, nan, 0.4][:steps],
            "alpha_2": [nan, nan, nan, nan, nan, 0.2][:steps],
        }
    )


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plots.plt.close("all")


def lines_of(ax) -> dict[str, np.ndarray]:
    return {str(line.get_label()): np.asarray(line.get_ydata()) for line in ax.get_lines()}


def test_training_curves_draw_the_log():
    loss, alpha, tau = plots.training_curves(log()).axes
    drawn = lines_of(loss)
    assert drawn["an update"].tolist() == [8, 6, 5, 4, 4, 3]
    assert drawn["mean of the last ten"][-1] == pytest.approx(5.0)
    (line,) = tau.get_lines()
    assert line.get_ydata().tolist() == [1.1, 1.5]  # where it was validated, nothing between
    assert line.get_xdata().tolist() == [2, 5]
    alphas = lines_of(alpha)
    assert list(alphas) == ["token 1", "token 2"]
    assert alphas["token 1"].tolist() == [0.1, 0.4]
    assert math.isnan(alphas["token 2"][0])  # no draft came so far
    assert alphas["token 2"][1] == 0.2


def test_a_log_without_validation_is_drawn_too():
    assert len(plots.training_curves(log()[["step", "loss"]]).axes) == 1
    assert len(plots.training_curves(log(2)).axes) == 1


def test_a_live_figure_is_shown_once_and_then_redrawn(monkeypatch):
    display = pytest.importorskip("IPython.display")
    seen: list[tuple[str, int]] = []

    def note(what):
        return lambda self, figure, **_: seen.append(
            (what, len(lines_of(figure.axes[0])["an update"]))
        )

    monkeypatch.setattr(display.DisplayHandle, "display", note("display"))
    monkeypatch.setattr(display.DisplayHandle, "update", note("update"))
    watch = plots.live_training()
    for steps in (3, 4, 6):
        watch(log(steps))
    assert seen == [("display", 3), ("update", 4), ("update", 6)]
    assert not plots.plt.get_fignums()  # nothing is left for the cell to show again

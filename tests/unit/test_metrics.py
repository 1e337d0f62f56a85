"""Metrics are pure functions: plain numbers in, plain numbers or one exact line out."""

import math

import pytest

from strategies.core.sizes import human_duration
from trainer.run import metrics


def test_eta_is_the_mean_pace_times_what_is_left() -> None:
    assert metrics.eta_s(40, 200, 20.0) == pytest.approx(80.0)
    assert metrics.eta_s(200, 200, 20.0) == 0
    assert metrics.eta_s(0, 200, 20.0) is None
    assert metrics.eta_s(5, -1, 20.0) is None


def test_perplexity_overflows_to_infinity() -> None:
    assert metrics.perplexity(0.0) == 1.0
    assert metrics.perplexity(1e9) == math.inf
    assert math.isnan(metrics.perplexity(math.nan))


@pytest.mark.parametrize(
    ("seconds_s", "text"),
    [
        (0, "0s"),
        (0.44, "0.4s"),
        (5.4, "5s"),
        (59.7, "1m00s"),
        (72, "1m12s"),
        (3_700, "1h01m"),
        (90_000, "1d01h"),
        (math.inf, "?"),
    ],
)
def test_human_duration(seconds_s: float, text: str) -> None:
    assert human_duration(seconds_s) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (4.8, 4, "4.800"),
        (49.91, 3, "49.9"),
        (22_026.4, 3, "22,026"),
        (0.00123, 3, "0.00123"),
        (1.5e-7, 3, "1.50e-07"),
        (3e9, 3, "3.00e+09"),
        (0.0, 3, "0"),
        (math.nan, 3, "nan"),
        (-math.inf, 3, "-inf"),
    ],
)
def test_human_number(value: float, digits: int, text: str) -> None:
    assert metrics.human_number(value, digits) == text


def test_an_evaluated_set_with_a_name() -> None:
    assert metrics.eval_lines(7, {"eval_wiki_loss": 1e9}) == ["eval wiki at step 7: loss 1.00e+09  perplexity inf"]


def test_progress_line_without_a_known_end() -> None:
    assert metrics.progress_line(3, 0, {"loss": 1.0}) == "step 3  loss 1.000"

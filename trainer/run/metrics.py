"""Perplexity and time left, and how records are written. Pure functions: no torch, no clock, no state.

- A token is an input position of a training batch, padding included, counted over all ranks. Seconds are training
  seconds, without evaluation and saving.
- MFU uses the arithmetic of the model, as torch counts it in one forward, times three for forward and backward, less
  the gradients of frozen weights. For a Transformer in which nothing is frozen that is PaLM's 6N + 12*L*h*s per token
  (arXiv 2204.02311, appendix B): dense attention, not halved for the causal mask, and without recomputation.
- A number that is not known is left out of the line and never shown as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from strategies.core.sizes import human, human_duration


def eta_s(num_done: int, num_total: int, elapsed_s: float) -> float | None:
    """Seconds left at the mean speed so far; None before the first step or without a known end."""
    if num_done < 1 or num_total < num_done:
        return None
    return elapsed_s / num_done * (num_total - num_done)


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def human_number(value: float, digits: int) -> str:
    """``value`` with this many significant digits, trailing zeros kept so that columns stay aligned."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def progress_line(step: int, num_steps: int, record: Mapping[str, float]) -> str:
    """One training record as one line; values that ``record`` lacks are left out.

    ``step 40/200  20%  loss 4.812  lr 9.2e-04  grad 1.35  5,210 tok/s  mfu 41.2%  device 3.1 GiB  ...``
    """
    columns = {
        "loss": lambda value: f"loss {human_number(value, 4)}",
        "learning_rate": lambda value: f"lr {value:.1e}",
        "grad_norm": lambda value: f"grad {human_number(value, 3)}",
        "tokens_per_s": lambda value: f"{value:,.0f} tok/s",
        "mfu": lambda value: f"mfu {value:.1%}",
        "device_peak_bytes": lambda value: f"device {human(value)}",
        "host_peak_bytes": lambda value: f"host {human(value)}",
        "eta_s": lambda value: f"eta {human_duration(value)}",
    }
    head = [f"step {step}/{num_steps}", f"{step / num_steps:.0%}"] if num_steps > 0 else [f"step {step}"]
    return "  ".join(head + [show(float(record[key])) for key, show in columns.items() if key in record])


def eval_lines(step: int, record: Mapping[str, float]) -> list[str]:
    """One line per evaluated set: ``eval at step 200: loss 3.91  perplexity 49.9``.

    The keys are transformers': ``eval_loss``, or ``eval_<name>_loss`` when there are several sets.
    """
    lines = []
    for key, value in record.items():
        if key.startswith("eval_") and key.endswith("_loss"):
            name = key.removeprefix("eval").removesuffix("_loss").strip("_")
            label = f"eval {name}" if name else "eval"
            loss, odds = human_number(value, 3), human_number(perplexity(value), 3)
            lines.append(f"{label} at step {step}: loss {loss}  perplexity {odds}")
    return lines


def final_line(step: int, record: Mapping[str, float]) -> str:
    """The record that transformers logs once at the end: ``finished at step 200: mean loss 4.1  in 3m12s``."""
    loss = f"mean loss {human_number(record['train_loss'], 4)}"
    return f"finished at step {step}: {loss}  in {human_duration(record.get('train_runtime', math.nan))}"

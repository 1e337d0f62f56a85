"""What a run says about itself: one line per logging step, one JSON record per log, a sample of text.

The order of things. transformers calls ``Trainer.log(logs)``, which stores the record and hands it to every
callback in turn, TensorBoard first. So our own numbers must be in ``logs`` before that, and the trainer's ``log``
override is where they go in::

    def training_step(self, model, inputs, *rest):
        self.meter.count(inputs["input_ids"].numel())
        return super().training_step(model, inputs, *rest)

    def log(self, logs, start_time=None):
        self.meter.add_to(logs, self.state)
        super().log(logs, start_time)

Then the line, the file and TensorBoard show the same values, whatever the order of the callbacks.

Why tokens are counted here and not by ``include_num_input_tokens_seen``: that option is right over several ranks
(``"all"`` gathers and sums the sizes of every rank's input), but it does so with a collective and an ``.item()``
for *every micro-batch*, a host-device synchronisation inside the step. A tensor's size is known to the host for
free; one sum over ranks when a record is logged, where the loss is being gathered anyway, gives the same number.

Files and lines come from world rank 0 only; its peak memory stands for the others.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from strategies.core.commit import replace_file
from trainer.machine.probe import status_bytes
from trainer.run import metrics

MIN_NEW_TOKENS = 20  # a sample that ends at once shows nothing


def write_line(line: str) -> None:
    """One whole line to standard output, at once: a log that is followed or cut off stays readable."""
    print(line, flush=True)


def host_peak_bytes() -> int:
    """Most memory this process ever had resident."""
    return status_bytes("VmHWM")


def device_peak_bytes() -> int | None:
    """Most device memory that tensors held at once; None without a device."""
    import torch

    from strategies.engine.memory import accelerator

    return torch.accelerator.max_memory_allocated() if accelerator.kind() is not None else None


class Meter(TrainerCallback):
    """Counts tokens and training seconds between records, and adds what follows from them to each record.

    Training time is wall time less evaluations and saves. Loading data belongs to it. The end of a pause is an
    event (``on_evaluate``, ``on_save``); its beginning is the last thing that happened before it, which is the end
    of a step or of an epoch, a record, or another pause. Put the meter last among the callbacks, so that what the
    others do at those events belongs to the pause too.

    Args:
        flops_per_token: from ``metrics.flops_per_token``; None leaves MFU out.
        peak_flops: of one device in the training dtype; None leaves MFU out.
        num_devices: over all ranks.
        sum_over_ranks: adds up one integer over all ranks. Called on every rank once per training record.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        num_devices: int = 1,
        sum_over_ranks: Callable[[int], int] = lambda num_tokens: num_tokens,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._num_devices = num_devices
        self._sum_over_ranks = sum_over_ranks
        self._clock = clock
        self._restart(first_step=0)

    def _restart(self, first_step: int) -> None:
        self._first_step = first_step
        self._num_tokens = 0
        self._paused_s = 0.0
        self._began_s = self._lap_began_s = self._latest_s = self._clock()

    def count(self, num_tokens: int) -> None:
        """Tokens of one micro-batch of this rank. No synchronisation."""
        self._num_tokens += num_tokens

    def add_to(self, logs: dict[str, float], state: TrainerState) -> None:
        """Add our values to one record, in place. Call on every rank, before the record goes anywhere."""
        for key in [key for key in logs if key.startswith("eval_") and key.endswith("_loss")]:
            logs[key.removesuffix("loss") + "perplexity"] = metrics.perplexity(logs[key])
        if "loss" in logs:
            logs.update({key: value for key, value in self._lap(state).items() if value is not None})

    def _lap(self, state: TrainerState) -> dict[str, float | None]:
        """Values since the last training record; starts the next lap."""
        now_s = self._clock()
        num_tokens = self._sum_over_ranks(self._num_tokens)
        speed = metrics.tokens_per_second(num_tokens, now_s - self._lap_began_s - self._paused_s)
        used = None
        if speed is not None and self._flops_per_token is not None:
            used = metrics.mfu(self._flops_per_token, speed, self._peak_flops, self._num_devices)
        num_done, num_total = state.global_step - self._first_step, state.max_steps - self._first_step
        self._num_tokens, self._paused_s = 0, 0.0
        self._lap_began_s = self._latest_s = now_s
        return {
            "tokens": num_tokens,
            "tokens_per_s": speed,
            "mfu": used,
            "device_peak_bytes": device_peak_bytes(),
            "host_peak_bytes": host_peak_bytes(),
            "eta_s": metrics.eta_s(num_done, num_total, now_s - self._began_s),
        }

    def _mark(self) -> None:
        self._latest_s = self._clock()

    def _end_pause(self) -> None:
        began_s = self._latest_s
        self._mark()
        self._paused_s += self._latest_s - began_s

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._restart(first_step=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._mark()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end_pause()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end_pause()


class StepSeen(TrainerCallback):
    """Tells linear layers with second copies of their weights that an optimizer has stepped, whichever it was."""

    def __init__(self) -> None:
        self._layers: list[Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.on_optimizer_step(args, state, control, **kwargs)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        from strategies.engine.routed_linear import copies_of, weights_changed

        if self._layers is None:
            self._layers = copies_of(model)
        weights_changed(self._layers)


class ProgressLine(TrainerCallback):
    """One plain line per record, on a terminal and in a file alike."""

    def __init__(self, write: Callable[[str], None] = write_line) -> None:
        self._write = write

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            self._write(metrics.progress_line(state.global_step, state.max_steps, logs))
        elif "train_loss" in logs:
            self._write(metrics.final_line(state.global_step, logs))
        for line in metrics.eval_lines(state.global_step, logs):
            self._write(line)


class MetricsFile(TrainerCallback):
    """Every record as one line of JSON in ``path``: ``step``, ``epoch``, ``time`` (Unix seconds) and all values.

    The file is one consistent history: when a run resumes, records beyond the step it resumes from, and a line
    that a kill cut in half, are dropped before the first new one. A fresh run starts an empty file. Values that
    JSON has no number for are the strings "nan", "inf" and "-inf".
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            rewind(self._path, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        record = {"step": state.global_step, "epoch": state.epoch, "time": round(self._clock(), 3), **logs}
        line = json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:  # closed, hence flushed, after each record
            file.write(line + "\n")


def rewind(path: Path, step: int) -> None:
    """Drop records beyond ``step``, all of them at step 0, and unreadable lines. Atomic: old file or new file."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if step > 0 else []
    kept = [line for line in lines if _step_of(line) <= step]
    replace_file(path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    """The step of one stored record; infinite, so never kept, for a line that is not one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _plain(value: Any) -> Any:
    """``value`` as JSON: a tensor or numpy scalar becomes a number (DeepSpeed's gradient norm may be a tensor)."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str | bool | None) else str(value)


class SampleText(TrainerCallback):
    """Shows what the model writes: the greedy continuation of one prompt, at the end and if asked at evaluations.

    Greedy, because a sample that draws random numbers would change the run it looks at; with a penalty on repetition,
    to which small models are prone. ``generate`` returns the continuation and is called on every rank, so it may be a
    collective (sharded weights); the default is the model's own ``generate``. Rank 0 writes. A model that cannot
    generate, as some that bring their own code, gets a line that says so; a look at a run does not end it.
    """

    def __init__(
        self,
        prompt: str,
        *,
        generate: Callable[[], str] | None = None,
        at_evaluations: bool = False,
        max_new_tokens: int = 60,
        write: Callable[[str], None] = write_line,
    ) -> None:
        self._prompt = prompt
        self._generate = generate
        self._at_evaluations = at_evaluations
        self._max_new_tokens = max_new_tokens
        self._write = write

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._at_evaluations:
            self._show(state, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show(state, **kwargs)

    def _show(self, state: TrainerState, *, model: Any, processing_class: Any, **kwargs: Any) -> None:
        try:
            text = self._generated(model, processing_class)
        except (AttributeError, TypeError, ValueError) as error:
            shown = f"no sample: the model cannot generate ({type(error).__name__}: {str(error).splitlines()[0]})"
        else:
            shown = sample_block(state.global_step, self._prompt, text)
        if state.is_world_process_zero:
            self._write(shown)

    def _generated(self, model: Any, processing_class: Any) -> str:
        if self._generate is not None:
            return self._generate()
        return continuation(model, processing_class, self._prompt, self._max_new_tokens)


def sample_block(step: int, prompt: str, text: str) -> str:
    """Prompt (in brackets) and continuation as a reader wants them: indented, wrapped, single blank lines."""
    lines = re.sub(r"\n\s*\n+", "\n\n", f"[{prompt.strip()}]{text.rstrip()}").splitlines()
    folded = [part for line in lines for part in textwrap.wrap(line, width=100) or [""]]
    return "\n".join([f"sample at step {step}, the prompt in brackets:", *(f"    {line}".rstrip() for line in folded)])


def continuation(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """Greedy continuation of ``prompt``, without the prompt. Leaves the model's mode as it was."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if longest is not None:
        max_new_tokens = max(1, min(max_new_tokens, longest - inputs["input_ids"].shape[1]))
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    was_training = model.training
    model.eval()
    try:
        output = model.generate(
            **inputs,
            do_sample=False,
            repetition_penalty=1.2,
            min_new_tokens=min(MIN_NEW_TOKENS, max_new_tokens),
            max_new_tokens=max_new_tokens,
            pad_token_id=padding,
        )
    finally:
        model.train(was_training)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

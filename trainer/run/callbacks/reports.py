"""What a run reports: a line and a JSON record per logging step, a sample of text, and where a rank is.

Hugging Face's ``Trainer.log`` stores the record and hands it to the callbacks in turn, TensorBoard first. So our own
numbers are put into it before, by ``Meter.add_to``. Only the first rank writes; its peak memory stands for the others.
A number that is not known is left out and never shown as 0.

Tokens are input positions of training batches, padding included. They are counted here because
``include_num_input_tokens_seen`` gathers sizes over the ranks for every micro-batch, which makes the host wait for the
device inside the step. One sum over the ranks per record gives the same number.

MFU uses the arithmetic of the model, as torch counts it in one forward, times three for forward and backward, less the
gradients of frozen weights. For a Transformer in which nothing is frozen that is PaLM's 6N + 12*L*h*s per token (arXiv
2204.02311, appendix B): dense attention, not halved for the causal mask, and without recomputation.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from deepstow.strategies.core.sizes import human, human_duration, human_number
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.distributed.ranks import limit_groups
from deepstow.trainer.distributed.stopping import KEYBOARD, Phase, Stop, Stopped, code_of
from deepstow.trainer.errors import ConfigError, DiskFails, first_line, nearest, warning, write_line
from deepstow.trainer.machine.probe import status_bytes
from deepstow.trainer.planning.positions import declared
from deepstow.trainer.run.appended import Appended

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.distributed.agreement import Agreement
    from deepstow.trainer.distributed.watchdog import Watchdog
    from deepstow.trainer.run.trainer import Trainer

SAID = (
    "perplexity",
    "accuracy",
    "f1",
    "mae",
    "exact_match",
    "rewards/accuracies",
    "rewards/margins",
)  # of an evaluation
UNSAID = ("loss", "tokens", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
FEW = 100  # tokens of an evaluation, of which the mean says little
MIN_NEW_TOKENS, MAX_NEW_TOKENS = 20, 60  # of a sample; one that ends at once shows nothing
EVAL_LOSS = re.compile(r"eval_(?:(.+)_)?loss")  # the key of the one evaluated set, or of one of several by its name


def host_peak_bytes() -> int:
    """The largest resident size this process has had."""
    return status_bytes("VmHWM")


def device_peak_bytes() -> int | None:
    """The most device memory that tensors have taken at once; None without a device."""
    return torch.accelerator.max_memory_allocated() if accelerator.kind() is not None else None


class Meter(TrainerCallback):
    """Counts tokens and training seconds between records, and adds speed, MFU and time left to each record.

    Training time is wall time without evaluations and saves; loading data is part of it. A pause ends with
    ``on_evaluate`` or ``on_save`` and begins with the event before it: the end of a step or an epoch, a record, or
    another pause. What callbacks before the meter do then counts as pause, what those after it do as training.

    Args:
        flops_per_token: of forward and backward.
        peak_flops: of all devices together in the training dtype; None leaves MFU out.
        sum_over_ranks: adds up one integer over all ranks; called on every rank once per training record.
    """

    def __init__(self, flops_per_token: float, peak_flops: float | None, sum_over_ranks: Callable[[int], int]) -> None:
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._sum_over_ranks = sum_over_ranks
        self._num_tokens = 0
        self._began_s = self._lap_began_s = self._latest_s = self._paused_s = 0.0  # evaluation needs no training before

    def count(self, num_tokens: int) -> None:
        """Add the tokens of one micro-batch of this rank. Does not synchronise."""
        self._num_tokens += num_tokens

    def add_to(self, logs: dict[str, float], state: TrainerState) -> None:
        """Add our values to one record in place; to be called on every rank before the record goes anywhere."""
        for key in filter(EVAL_LOSS.fullmatch, list(logs)):
            name = key.removesuffix("loss")
            if f"{name}tokens" in logs:  # then the loss is a mean over tokens
                logs[f"{name}perplexity"] = perplexity(logs[key])
        if "loss" in logs:
            logs.update({key: value for key, value in self._lap(state).items() if value is not None})

    def _lap(self, state: TrainerState) -> dict[str, float | None]:
        """The values since the last training record; starts the next lap."""
        now_s = time.perf_counter()
        num_tokens = self._sum_over_ranks(self._num_tokens)
        seconds_s = now_s - self._lap_began_s - self._paused_s
        speed = num_tokens / seconds_s if seconds_s > 0 else None
        used = speed * self._flops_per_token / self._peak_flops if speed and self._peak_flops else None
        num_done, num_total = state.global_step - self._first_step, state.max_steps - self._first_step
        self._num_tokens, self._paused_s = 0, 0.0
        self._lap_began_s = self._latest_s = now_s
        return {
            "tokens": num_tokens,
            "tokens_per_s": speed,
            "mfu": used,
            "device_peak_bytes": device_peak_bytes(),
            "host_peak_bytes": host_peak_bytes(),
            "eta_s": (now_s - self._began_s) / num_done * (num_total - num_done) if 0 < num_done <= num_total else None,
        }

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._first_step = state.global_step
        self._num_tokens, self._paused_s = 0, 0.0
        self._began_s = self._lap_began_s = self._latest_s = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._latest_s = time.perf_counter()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        now_s = time.perf_counter()
        self._paused_s += now_s - self._latest_s
        self._latest_s = now_s

    on_epoch_end = on_step_end
    on_evaluate = on_save


class SaveAndStop(TrainerCallback):
    """Asks for a save when a rank was asked to stop, and ends the run after it.

    A signal reaches one rank, or several at different moments, and a rank that saved on its own would wait for the
    others in the collectives of saving. So the ranks agree at the end of every step, and after what takes long.

    Invariant. ``Stopped`` is raised on all ranks or on none, after every rank has left the save. The checkpoint is an
    ordinary one, so the resumed run ends with the bits of one that nobody stopped. An evaluation that is due is made
    before.
    """

    def __init__(self, stop: Stop, trainer: Trainer, together: Agreement) -> None:
        self._stop = stop
        self._trainer = trainer
        self._together = together
        self._agreed = False  # to save and to end

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._stop.phase, self._stop.ended.step = Phase.TRAINING, state.global_step

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._stop.ended.step = state.global_step
        self._agreed = self._agreed or self._together.any(self._stop.is_asked)
        if self._agreed:
            control.should_save = True
            if args.save_strategy == SaveStrategy.BEST:  # else an evaluation that is not the best would cancel the save
                args.save_strategy = SaveStrategy.STEPS

    on_evaluate = on_step_end

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # Also what makes every rank wait for the first one, which is the last to leave a save.
        self._agreed = self._together.any(self._stop.is_asked or self._agreed)
        if not self._agreed:
            return
        reasons, step = self._together.gathered(self._stop.reason), state.global_step
        asked_ranks = [rank for rank, reason in enumerate(reasons) if reason is not None]
        rank = next((interrupted for interrupted in asked_ranks if reasons[interrupted] == KEYBOARD), asked_ranks[0])
        why = f"{reasons[rank]}{f' on rank {rank}' if len(set(reasons)) > 1 else ''}"
        self._trainer.settle()
        if self._trainer.newest != f"checkpoint-{step}":
            raise DiskFails(f"{why}: ended at step {step}, which could not be saved")
        line = f"{why}: step {step} is saved, the run ends; training.resume_from_checkpoint=auto goes on from there"
        raise Stopped(line, code_of(reasons[rank]))


class Watched(TrainerCallback):
    """Notes for the watchdog what the rank does. The last callback, so that what follows an event is what it says.
    Groups that libraries have made get the timeout, too.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        limit_groups(self._watchdog.timeout_s)
        self._watchdog.doing = f"at the beginning of training, after step {state.global_step}"

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._watchdog.doing = f"in step {state.global_step + 1}"

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        pauses = control.should_save or control.should_evaluate
        self._watchdog.doing = f"{'saving or evaluating ' if pauses else ''}after step {state.global_step}"

    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._watchdog.doing = f"evaluating after step {state.global_step}"

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._watchdog.doing = "at the end of training, exporting"


def of_best(config: RunConfig, state: TrainerState, text: str) -> str:
    """``text`` about weights that are those of the best evaluation, or that should be, were it saved; empty if they are
    the last ones, and the best.
    """
    best, saved = state.best_global_step, Path(state.best_model_checkpoint or "")
    if not config.training.load_best_model_at_end or best in (None, state.global_step):
        return ""
    if saved.name == f"checkpoint-{best}":
        return text.format(f"the weights of step {best}, of the best evaluation")
    step = saved.name.rpartition("-")[2] or state.global_step
    return text.format(f"the weights of step {step}, since that of the best evaluation, {best}, was not saved")


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


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


def eval_lines(step: int, record: Mapping[str, float], *, whole: bool = False) -> Iterator[str]:
    """One line per evaluated set: ``eval at step 200: loss 3.91  perplexity 49.9``, or what else its task says; the
    ``whole`` of it with metrics that the user has added.
    """
    for key, value in record.items():
        if match := EVAL_LOSS.fullmatch(key):
            label, start = f"eval {match[1]}" if match[1] else "eval", key.removesuffix("loss")
            added = [name.removeprefix(start) for name in record if whole and name.startswith(start)]
            names = [*SAID, *(name for name in added if name not in (*SAID, *UNSAID))]
            figures = [f"{name} {human_number(record[start + name], 3)}" for name in names if start + name in record]
            yield "  ".join([f"{label} at step {step}: loss {human_number(value, 3)}", *figures])


class ProgressLine(TrainerCallback):
    """Prints one plain line per record, on a terminal and in a file alike; ``whole``: see ``eval_lines``."""

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._warned = False

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            write_line(progress_line(state.global_step, state.max_steps, logs))
        elif "train_loss" in logs:
            loss = f"mean loss {human_number(logs['train_loss'], 4)}"
            seconds = human_duration(logs.get("train_runtime", math.nan))
            write_line(f"trained to step {state.global_step}: {loss}  in {seconds}")
        for line in eval_lines(state.global_step, logs, whole=self._whole):
            write_line(line)
        if not self._warned and (tokens := logs.get("eval_tokens", FEW)) < FEW:
            self._warned = True
            what = "no token" if not tokens else f"{int(tokens)} tokens"
            cure = "hold out more rows (data.eval_fraction, data.eval_path)"
            write_line(warning(f"evaluations are over {what} on which there is a loss: they say little; {cure}"))

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        name = "eval_" + str(args.metric_for_best_model).removeprefix("eval_")
        if state.is_world_process_zero and math.isnan((metrics or {}).get(name, 0.0)):
            what = f"{name} is not a number at step {state.global_step}"
            write_line(f"{what}: this evaluation is never the best")


class MetricsFile(TrainerCallback):
    """Appends every record to ``path`` as a line of JSON: ``step``, ``epoch``, ``time`` (Unix seconds) and all values.

    When a run resumes, the records after the step that it resumes from, and a line that a kill has cut in half, are
    dropped first, so the file is one consistent history. A fresh run starts with an empty file. Values that JSON has
    no number for are the strings "nan", "inf" and "-inf". What the disk does not take is appended with a later one.
    A file that cannot be read begins with the records of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, Appended(path, "records")

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            try:
                lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                lines = [_line(record) for record in state.log_history]
            kept_lines = (line for line in lines if state.global_step > 0 and _step_of(line) <= state.global_step)
            self._file.begin("".join(f"{line}\n" for line in kept_lines).encode())

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        record = {"step": state.global_step, "epoch": state.epoch, "time": round(time.time(), 3), **logs}
        self._file.add(f"{_line(record)}\n".encode())
        self._file.flush()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file.end()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)


def _step_of(line: str) -> float:
    """The step of one record; infinite for a line that is not a record."""
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
    """Prints the continuation of a prompt at the end of training, and of the ``asked`` ones at each evaluation; greedy,
    since sampling would draw random numbers. The latter are records of ``file`` as well: step, prompt, sample.

    All ranks generate, since with sharded weights that is a collective. If a model cannot generate, as some that bring
    their own code, the line says so, and the run goes on. ``chats``: the ``asked`` prompts are the user's turn, written
    by the chat template.
    """

    def __init__(
        self,
        prompt: str | Sequence[int],
        asked: Sequence[str] = (),
        file: MetricsFile | None = None,
        *,
        chats: bool = False,
    ) -> None:
        self._prompt = prompt
        self._asked = asked
        self._file = file
        self._chats = chats

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._prompt:
            self._show(self._prompt, state, kwargs)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        for prompt in self._asked:
            text = self._show(prompt, state, kwargs, chats=self._chats)
            if self._file is not None and text is not None:
                self._file.on_log(args, state, control, {"prompt": prompt, "sample": text})

    def _show(
        self, prompt: str | Sequence[int], state: TrainerState, known: Mapping[str, Any], *, chats: bool = False
    ) -> str | None:
        """Prints the continuation and returns it; None if the model cannot generate."""
        text, words = None, known["processing_class"]
        try:
            prompt_text = prompt if isinstance(prompt, str) else str(words.decode(prompt, skip_special_tokens=True))
            text = continuation(known["model"], words, as_turn(words, prompt_text) if chats else prompt)
        except (AttributeError, TypeError, ValueError, TemplateError) as error:
            shown = [f"no sample: the model cannot generate ({first_line(error)})"]
        else:  # indented, wrapped, without double blank lines
            lines = re.sub(r"\n\s*\n+", "\n\n", f"[{prompt_text.strip()}]{text.rstrip()}").splitlines()
            folded = [wrapped for line in lines for wrapped in textwrap.wrap(line, width=100) or [""]]
            shown = [f"sample at step {state.global_step}, the prompt in brackets:"]
            shown += [f"    {line}".rstrip() for line in folded]
        if state.is_world_process_zero:
            write_line("\n".join(shown))
        return text


class EarlyStopping(EarlyStoppingCallback):
    """Hugging Face's. A resumed run counts on where its checkpoint was, with the patience that it is given now; not if
    the best of the checkpoint is ``another`` run's.
    """

    def __init__(
        self, early_stopping_patience: int, early_stopping_threshold: float | None = 0.0, *, another: bool = False
    ) -> None:
        super().__init__(early_stopping_patience, early_stopping_threshold)
        self._another = another

    def over(self, state: TrainerState) -> bool:
        """Whether training had stopped at this ``state``, which was saved; takes its count."""
        states: Any = state.stateful_callbacks  # a mapping, once it was read from a file
        if (saved := (states or {}).get(type(self).__name__)) and not self._another:
            self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
        return self.early_stopping_patience_counter >= self.early_stopping_patience

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
        if name not in metrics:
            key = f'training.metric_for_best_model = "{args.metric_for_best_model}"'
            raise ConfigError(f"{key}: evaluations give {', '.join(sorted(metrics))}{nearest(name, metrics)}")
        super().on_evaluate(args, state, control, metrics, **kwargs)
        count, best = self.early_stopping_patience_counter, state.best_metric
        if control.should_training_stop and state.is_world_process_zero and best is not None:
            write_line(f"{count} evaluations without a better {name}, which was {human_number(best, 4)}: training ends")


def as_turn(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a chat in which the user says ``text``, up to where the answer begins."""
    turn = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(chat, add_special_tokens=False)["input_ids"]
    return ids


def continuation(model: Any, tokenizer: Any, prompt: str | Sequence[int]) -> str:
    """The greedy continuation of a text or its tokens, without those. Raises ValueError if that is too long."""
    min_new_tokens = MIN_NEW_TOKENS if isinstance(prompt, str) else 1  # an answer may be short
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    else:
        ids = torch.tensor([list(prompt)], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompt_length, longest = inputs["input_ids"].shape[1], declared(model.config) or math.inf
    if prompt_length > longest:
        raise ValueError(f"the prompt has {prompt_length} tokens, and the model {longest} positions")
    max_new_tokens = max(1, min(MAX_NEW_TOKENS, longest - prompt_length))
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    was_training = model.training
    model.eval()
    try:
        output = model.generate(
            **inputs,
            do_sample=False,
            repetition_penalty=1.2,
            min_new_tokens=min(min_new_tokens, max_new_tokens),
            max_new_tokens=max_new_tokens,
            pad_token_id=padding,
        )
    finally:
        model.train(was_training)
    return str(tokenizer.decode(output[0, prompt_length:], skip_special_tokens=True))


def sample_prompt(tokenizer: PreTrainedTokenizerBase, rows: Any) -> str | list[int]:
    """What the sample continues: the tokens before the first answer of the first row, or its first words."""
    row = next(iter(rows))
    labels = row["labels"]
    masked = next((i for i, label in enumerate(labels[1:], start=1) if label != MASKED), 0)
    if masked > 1:
        return list(row["input_ids"][:masked])
    start = str(tokenizer.decode(row["input_ids"][:24], skip_special_tokens=True))
    return start.rsplit(maxsplit=1)[0] if len(start.split()) > 1 else start  # the last word may be cut

"""A teacher's answers to the rows of a run: asked once, before training, and kept on the disk beside the rows.

A teacher that answers in the step would need memory for its weights beside the student's training state. Answers that
are kept need none: training is a run of the student alone, whose rows have one more column, under any strategy that
leaves rows whole. They take 4 (2 top_k + 1) bytes for each token that is trained on.

The teacher computes without gradients, in bf16 with ``training.bf16`` and else in fp32. If its weights and the logits
of ``distill.teacher_batch_size`` rows fit into the memory of the device that the run may use, it is there; else the
memory engine streams its weights from the host, row by row of blocks, with the same bits.

Answers are written in parts, each whole or not at all; asking goes on after the last that is there. At the end they
are sealed under a hash of the contents of teacher and rows and of all that decides an answer. Several runs may ask at
once: one does, the others wait for it.

Refused, before a weight is loaded: a teacher with other tokens, or without room for its weights or its answers.
"""

from __future__ import annotations

import fcntl
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from tqdm import tqdm

from strategies.core.commit import remove, replace_file, sync
from strategies.core.protocol import Refusal
from strategies.core.sealed import digest_of, seal, size_and_hash
from strategies.core.sizes import human
from strategies.engine.forward.distilled_loss import TEACHER, Distillation, answers
from trainer.config.sections import ModelSection
from trainer.data import tokenizer as tokenizers
from trainer.data.collate import Collator
from trainer.data.packing import MASKED
from trainer.data.prepare import is_whole
from trainer.errors import ConfigError, DataError, first_line
from trainer.model import build
from trainer.model.student import comparison
from trainer.planning.streamed import placed, plan_within, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainer.config.sections import RunConfig
    from trainer.data.prepare import Prepared
    from trainer.data.report import Say

PART_BYTES = 64 << 20  # of answers that are written at once
SAY_EVERY_S = 10


@dataclass(frozen=True)
class Lesson:
    """What is asked of a teacher. ``teacher``: a hash of its contents; ``key``: of all that decides the answers;
    ``budget``: bytes of the device that it may use; ``rows``: as many are in a part.
    """

    how: Distillation
    teacher: str
    key: str
    budget: int
    rows: int


def section_of(config: RunConfig) -> ModelSection:
    """The teacher as a model."""
    assert config.distill is not None
    dtype: Any = "bfloat16" if config.training.bf16 else "float32"
    trusts = config.model.trust_remote_code
    return ModelSection(name_or_path=config.distill.teacher, dtype=dtype, trust_remote_code=trusts)


def check(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Prepared,
    student_words: int,
    budget: int,
    folder: Path,
    say: Say,
) -> Lesson:
    """What will be asked, after a line about what it takes. ConfigError: see above. ``student_words``: rows of its
    embedding; ``folder``: where answers are kept.
    """
    assert config.distill is not None
    section, name, hf_config = section_of(config), config.distill.teacher, config_of(config)
    with _named(config):
        own = tokenizers.load(None, name, section.trust_remote_code, folder, ())
    if why := unlike(own, tokenizer, config.model.name_or_path or "the student"):
        raise config.error("distill.teacher", name, f"{why}; a teacher has the student's tokens")
    teacher_words = hf_config.get_text_config().vocab_size
    if teacher_words < len(tokenizer):
        what = f"its model has {teacher_words} words, fewer than the {len(tokenizer)} of the tokenizer"
        raise config.error("distill.teacher", name, what)
    how = comparison(config, min(teacher_words, student_words))
    mark = contents(name, hf_config)
    decide = [prepared.fingerprint, mark, section.dtype, how.temperature, how.top_k, how.words]
    key = digest_of(decide)[:16]
    rows: Any = prepared.train
    count = num_answers(rows)
    needed, home = 4 * count * how.width, folder / key
    in_part = max(1, PART_BYTES * len(rows) // max(1, needed))  # whatever the batches are: asking may go on with others
    kept = sum(path.stat().st_size for path in _writing(home).glob("*.arrow"))
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not home.is_dir() and needed - kept > free:
        what = f"{count:,} answers take {human(needed)}, and {folder} has {human(free)} free"
        raise config.error("distill.top_k", config.distill.top_k, f"{what}; lower it, or make room")
    lesson = Lesson(how, mark, key, budget, in_part)
    where = "answered already"
    if not home.is_dir():
        with _named(config):
            model = build.build(section, hf_config, seed=0, partitioned=False, on_meta=True)
        where = _place(config, lesson, model)[1]
    say(f"teacher: {name}, {where}; {count:,} answers of {human(4 * how.width)}: {human(needed)} in {folder}")
    return lesson


def config_of(config: RunConfig) -> Any:
    """The configuration of the teacher's model. ConfigError: there is none."""
    section = section_of(config)
    with _named(config):
        build.refuse_missing_folder(section)
        return build.load_config(section)


@contextmanager
def _named(config: RunConfig) -> Iterator[None]:
    """Inside, errors about the teacher name its key."""
    try:
        yield
    except ConfigError as error:
        lines = [line.replace("model.name_or_path", "distill.teacher") for line in error.lines]
        lines = [line.replace("model.tokenizer", "distill.teacher") for line in lines]
        raise ConfigError([config.located("distill.teacher", line) for line in lines]) from None
    except ValueError as error:  # Transformers', of a configuration that has no such model
        what = f"Transformers has no AutoModelForCausalLM of it: {str(error).splitlines()[0]}"
        raise config.error("distill.teacher", config.distill and config.distill.teacher, what) from None


def unlike(teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, name: str) -> str:
    """Where the tokens of two tokenizers differ, in words; empty if they do not. ``name``: of the student."""
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    if len(theirs) != len(ours):
        return f"its tokenizer has {len(theirs)} tokens, and that of {name} has {len(ours)}"
    other = next((token for token in ours if theirs.get(token) != ours[token]), None)
    if other is None:
        return ""
    number = theirs.get(other)
    has = "has none" if number is None else f"has number {number}"
    return f"its tokenizer {has} for {other!r}, and that of {name} has number {ours[other]}"


def contents(name: str, hf_config: Any) -> str:
    """A hash of a saved model: of its files, or of the commit that the hub's cache has."""
    if not Path(name).is_dir():
        return digest_of([name, getattr(hf_config, "_commit_hash", None)])
    files = [path for path in sorted(Path(name).iterdir()) if path.suffix in (".json", ".safetensors", ".bin", ".py")]
    return digest_of([[path.name, *size_and_hash(path)] for path in files])


def num_answers(rows: Dataset) -> int:
    """How many tokens are predicted and trained on."""
    total = 0
    for chunk in rows.data.column("labels").chunks:
        trained = chunk.flatten().to_numpy() != MASKED
        starts = chunk.offsets.to_numpy()[:-1] - chunk.offsets[0].as_py()
        total += int(trained.sum()) - int(trained[starts].sum())  # nothing predicts the first token of a row
    return total


def _place(config: RunConfig, lesson: Lesson, model: PreTrainedModel) -> tuple[Any, str]:
    """The plan that streams the teacher, or None if it fits, and what is said of it. ConfigError: there is no room."""
    assert config.distill is not None
    weights = weights_of(model)
    tokens, size = config.distill.teacher_batch_size * config.data.max_length, next(model.parameters()).element_size()
    logits = 2 * tokens * model.config.get_text_config().vocab_size * size
    try:
        plan = plan_within(model, lesson.budget - logits)
    except (Refusal, ValueError) as error:
        what = f"{human(weights)} of weights and {human(logits)} for logits of {tokens:,} tokens do not fit"
        why = first_line(error).replace("strategies.offload.", "")
        line = f"{what} into {human(lesson.budget)} ({why}); lower it, or data.max_length"
        raise config.error("distill.teacher_batch_size", config.distill.teacher_batch_size, line) from None
    through = "all on the device" if plan is None else f"streamed through {human(lesson.budget - logits)}"
    return plan, f"{human(weights)} of weights, {through}"


def answered(
    config: RunConfig,
    lesson: Lesson,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Prepared,
    folder: Path,
    device: torch.device,
    say: Say,
    *,
    compares: bool,
) -> Prepared:
    """``prepared`` with answers to its training rows, asked now or found in ``folder``, and ``compares`` with it."""
    home = folder / lesson.key
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{lesson.key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, however this ends
        if not home.is_dir() or (compares and not is_whole(home, say, TEACHER)):
            _ask(config, lesson, tokenizer, prepared, home, device, say)
    parts = [Dataset.from_file(str(path)) for path in sorted(home.glob("*.arrow"))]
    rows: Any = prepared.train
    return replace(prepared, train=concatenate_datasets([rows, concatenate_datasets(parts)], axis=1))


def _writing(home: Path) -> Path:
    return home.with_name(f".{home.name}.writing")


def _ask(
    config: RunConfig,
    lesson: Lesson,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Prepared,
    home: Path,
    device: torch.device,
    say: Say,
) -> None:
    """Write the parts of ``home`` that are not there yet, and seal them. Without a bar, ``say`` how far it is."""
    assert config.distill is not None
    draft, size, pad = _writing(home), config.distill.teacher_batch_size, tokenizer.pad_token_id
    rows: Any = prepared.train
    assert isinstance(pad, int)
    draft.mkdir(exist_ok=True)
    collate, said = Collator(pad, config.data.packing), monotonic()
    bar = tqdm(total=len(rows), desc="teacher", unit=" rows", leave=False, disable=None)
    with _teacher(config, lesson, device) as model, bar:
        for number, start in enumerate(range(0, len(rows), lesson.rows)):
            path, stop = draft / f"{number:06}.arrow", min(start + lesson.rows, len(rows))
            if path.exists():
                bar.update(stop - start)
                continue
            made = list[bytes]()
            for at in range(start, stop, size):
                batch = collate([rows[i] for i in range(at, min(at + size, stop))])
                made += _asked(model, batch, lesson.how)
                bar.update(min(size, stop - at))
                if bar.disable and monotonic() - said > SAY_EVERY_S:
                    said = monotonic()
                    say(f"teacher: {start + len(made):,} of {len(rows):,} rows answered")
            replace_file(path, _arrow(made))
    seal(draft, TEACHER, {"key": lesson.key})
    remove(home)
    draft.rename(home)
    sync(home.parent)


def _asked(model: Callable[..., Any], batch: dict[str, torch.Tensor], how: Distillation) -> list[bytes]:
    """The answers to each row of ``batch``. Raise DataError if one is not finite."""
    labels = batch.pop("labels")
    predicts = labels[:, 1:] != MASKED
    logits = model(**batch).logits
    found = []
    for scores, trained in zip(logits[:, :-1], predicts, strict=True):
        answer = answers(scores[trained.to(scores.device)], how).cpu()
        if not answer[:, how.top_k or 0 :].contiguous().view(torch.float32).isfinite().all():
            raise DataError(
                "distill.teacher: its logits are not finite, so it has no answer; take another dtype or model"
            )
        found.append(answer.numpy().tobytes())
    return found


def _arrow(made: list[bytes]) -> bytes:
    """A file with one column."""
    batch = pa.record_batch({TEACHER: pa.array(made, pa.large_binary())})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


@contextmanager
def _teacher(config: RunConfig, lesson: Lesson, device: torch.device) -> Iterator[Callable[..., Any]]:
    """The teacher, to be called with tensors of the host; freed at the end."""
    section = section_of(config)
    model: Any = build.build(section, build.load_config(section), seed=0, partitioned=False)
    with placed(model, _place(config, lesson, model)[0], device) as call:
        yield call

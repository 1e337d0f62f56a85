"""The answers of teachers to the rows of a run: asked once, before training, and kept on the disk beside the rows.

A teacher that answers in the step would need memory for its weights beside the student's training state. Answers that
are kept need none: training is a run of the student alone, whose rows have one more column, under any strategy that
leaves rows whole. They take 4 (2 top_k + 1) bytes for each token that is trained on.

The teacher computes without gradients, in bf16 with ``training.bf16`` and else in fp32. If its weights and the logits
of ``distill.teacher_batch_size`` rows fit into the memory of the device that the run may use, it is there; else the
memory engine streams its weights from the host, row by row of blocks, with the same bits. Several teachers answer each
batch together, and share that memory by their weights' bytes: what is kept is their average.

Answers are written in parts, each whole or not at all; asking goes on after the last that is there. At the end they
are sealed under a hash of the contents of teacher and rows and of all that decides an answer. Several runs may ask at
once: one does, the others wait for it.

A checkpoint names the contents of the teacher. A run that is resumed with another one, under the same name, would learn
from two; it is refused unless ``training.allow_change`` has ``loss``, as other keys of ``distill``.

Refused, before a weight is loaded: a teacher with other tokens, or without room for its weights or its answers.
"""

from __future__ import annotations

import fcntl
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from tqdm import tqdm

from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory.accelerator import device_of
from deepstow.strategies.state.commit import remove, replace_file, sync
from deepstow.strategies.state.sealed import digest_of, seal
from deepstow.trainer.config.recipe import RECIPES
from deepstow.trainer.config.sections import ModelSection, QuantizationSection
from deepstow.trainer.data import prepare
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.data.collate import Collator, check_packing
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.distributed.agreement import DAY_S, agreement, first_then_all
from deepstow.trainer.errors import ConfigError, DataError, write_line, write_nothing
from deepstow.trainer.machine.probe import disk_free_bytes
from deepstow.trainer.model import build, quantise
from deepstow.trainer.model.contents import contents
from deepstow.trainer.planning import facts
from deepstow.trainer.planning.from_config import budget_of
from deepstow.trainer.planning.streamed import placed, plan_within, weights_of
from deepstow.trainer.recipes.distill import TEACHER, asked_of
from deepstow.trainer.recipes.distill.loss import Distillation, answers, comparison, keep_state, width_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.data.prepare import Prepared
    from deepstow.trainer.data.report import Say
    from deepstow.trainer.machine.probe import Machine
    from deepstow.trainer.run.session import Session

PART_BYTES = 64 << 20  # of answers that are written at once
SAY_EVERY_S = 10


@dataclass(frozen=True)
class Lesson:
    """What is asked of the teachers. ``teacher``: a hash of their contents; ``key``: of all that decides the answers;
    ``budget``: bytes of the device that they may use; ``rows``: as many are in a part.
    """

    how: Distillation
    teacher: str
    key: str
    budget: int
    rows: int


def sections_of(config: RunConfig) -> dict[str, ModelSection]:
    """The teachers as models, by name."""
    section = asked_of(config)
    dtype: Any = "bfloat16" if config.training.bf16 else "float32"
    trusts = config.model.trust_remote_code
    bits: dict[Any, dict[str, Any]] = {
        "int8": {"load_in_8bit": True},
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype},
    }
    few = bits.get(section.teacher_dtype)
    options = {"dtype": dtype, "trust_remote_code": trusts, "quantization_config": few and QuantizationSection(**few)}
    return {name: ModelSection(name_or_path=name, **options) for name in section.teachers}


def refuse(config: RunConfig) -> None:
    """Raise ConfigError if a teacher has no configuration, or hidden states of another width than the student."""
    on = asked_of(config).on
    configs = configs_of(config)
    expected = width_of(build.config_of(config).get_text_config())
    for name, hf_config in configs.items():
        if on != "logits" and (width := width_of(hf_config.get_text_config())) != expected:
            why = f"hidden states of {name} have {width} numbers, and the student's {expected}"
            what = "a projection between them would be a trained parameter that no export has a place for; write logits"
            raise config.error("distill.on", on, f"{why}; {what}")


def check(session: Session) -> Lesson:
    """What the teacher will be asked. A collective. ConfigError: it cannot be this student's, or has no room."""
    config, home = session.config, _home(session.config)
    arguments = config, session.tokenizer, session.prepared, build.config_of(config).get_text_config()
    budget = budget_of(config, session.plan)
    with agreement(session.ranks, DAY_S) as together:
        lesson = together.on_first(lambda: lesson_of(*arguments, budget, home, write_line))
    for section in sections_of(config).values():
        check_packing(config.model_copy(update={"model": section}))
    return lesson


def _home(config: RunConfig) -> Path:
    """Where answers are: beside the rows."""
    return prepare.cache(Path(config.training.output_dir) / "data")


def lesson_of(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Prepared,
    student: Any,
    budget: int,
    folder: Path,
    say: Say,
) -> Lesson:
    """What will be asked, after a line about what it takes. ConfigError: see above. ``student``: its model's
    configuration; ``folder``: where answers are kept.
    """
    section, configs = asked_of(config), configs_of(config)
    sections, called = sections_of(config), config.model.name_or_path or "the student"
    for name, hf_config in configs.items():
        with _named(config, name):
            teacher_tokenizer = tokenizers.load(None, name, config.model.trust_remote_code, folder, ())
        if why := unlike(teacher_tokenizer, tokenizer, called):
            raise config.error("distill.teacher", name, f"{why}; a teacher has the student's tokens")
        if (words := hf_config.get_text_config().vocab_size) < len(tokenizer):
            what = f"its model has {words} words, fewer than the {len(tokenizer)} of the tokenizer"
            raise config.error("distill.teacher", name, what)
    words = min(hf_config.get_text_config().vocab_size for hf_config in (student, *configs.values()))
    how = comparison(config, words, width_of(student))
    mark = mark_of(config)
    decide = [prepared.fingerprint, mark, next(iter(sections.values())).dtype, how.temperature, how.top_k, how.words]
    decide += [section.on] if how.hidden else []
    decide += [section.teacher_dtype] if section.teacher_dtype else []
    key = digest_of(decide)[:16]
    rows: Any = prepared.train
    count = num_answers(rows)
    needed, home = 4 * count * how.width, folder / key
    in_part = max(1, PART_BYTES * len(rows) // max(1, needed))  # whatever the batches are: asking may go on with others
    kept_bytes = sum(path.stat().st_size for path in _writing(home).glob("*.arrow"))
    free = disk_free_bytes(folder)
    if not home.is_dir() and needed - kept_bytes > free:
        what = f"{count:,} answers take {human(needed)}, and {folder} has {human(free)} free"
        cure = "lower it, or make room" if how.logits else "make room"
        option = "top_k" if how.logits else "on"
        raise config.error(f"distill.{option}", getattr(section, option), f"{what}; {cure}")
    where = ["answered already"] * len(configs)
    if not home.is_dir():
        where = [place for _, place in _place(config, budget, _described(config))]
    places = "; ".join(f"{name}, {place}" for name, place in zip(configs, where, strict=True))
    say(f"teacher: {places}; {count:,} answers of {human(4 * how.width)}: {human(needed)} in {folder}")
    return Lesson(how, mark, key, budget, in_part)


def mark_of(config: RunConfig) -> str:
    """A hash of the contents of the teachers, with their shares. ConfigError: there is none."""
    marks = [contents(name, hf_config) for name, hf_config in configs_of(config).items()]
    return marks[0] if len(marks) == 1 else digest_of([marks, list(asked_of(config).teachers.values())])


def configs_of(config: RunConfig) -> dict[str, Any]:
    """The configuration of each teacher's model. ConfigError: there is none."""
    configs = {}
    for name, section in sections_of(config).items():
        with _named(config, name):
            if section.quantization_config is not None:
                quantise.config_of(section.quantization_config)
            build.refuse_missing_folder(section)
            configs[name] = build.load_config(section)
    return configs


def _described(config: RunConfig, *, saved: bool = True) -> list[PreTrainedModel]:
    """The teachers without values; those that are not ``saved`` yet, by their configuration."""
    models = []
    for (name, section), hf_config in zip(sections_of(config).items(), configs_of(config).values(), strict=True):
        quantization = section.quantization_config
        section = section.model_copy(update={"quantization_config": None})
        if not saved:
            section = section.model_copy(update={"name_or_path": None, "config": {"model_type": hf_config.model_type}})
        with _named(config, name):
            model = build.build(section, hf_config, seed=0, partitioned=False, on_meta=True)
        models.append(model if quantization is None else quantise.quantise(model, quantization))
    return models


def priced(config: RunConfig, budget: int, machine: Machine) -> list[str]:
    """A line of the plan for each teacher, by its configuration alone. ConfigError: see above."""
    size, lines = asked_of(config).teacher_batch_size, []
    training = config.training.model_copy(update={"per_device_train_batch_size": size})
    plain: dict[str, Any] = {**dict.fromkeys(RECIPES), "recipes": {}, "strategies": {}}
    alone = config.model_copy(update={**plain, "training": training})
    places = _place(config, budget, _described(config, saved=False), machine)
    for (name, section), (plan, where) in zip(sections_of(config).items(), places, strict=True):
        with _named(config, name):
            flops = facts.counted(alone.model_copy(update={"model": section})).forward_flops
        buckets = () if plan is None or plan.layout is None else plan.layout.buckets
        sent_bytes = sum(bucket.weight_bytes for bucket in buckets if not bucket.resident)
        lines.append(
            f"teacher, before training: {name}, {where}; a forward of {size} x {config.data.max_length:,} tokens takes "
            f"{flops / 1e12:,.4g} TFLOP and sends {human(sent_bytes)} over the link"
        )
    return lines


@contextmanager
def _named(config: RunConfig, name: str) -> Iterator[None]:
    """Inside, errors about the teacher ``name`` have its key."""
    try:
        yield
    except ConfigError as error:
        lines = [line.replace("model.name_or_path", "distill.teacher") for line in error.lines]
        lines = [line.replace("model.tokenizer", "distill.teacher") for line in lines]
        lines = [line.replace("model.quantization_config", "distill.teacher_dtype") for line in lines]
        raise ConfigError([config.located("distill.teacher", line) for line in lines]) from None
    except (OSError, ValueError) as error:  # Transformers', of a folder without weights, or one that has no such model
        what = f"Transformers has no AutoModelForCausalLM of it: {str(error).splitlines()[0]}"
        raise config.error("distill.teacher", name, what) from None


def unlike(teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, name: str) -> str:
    """Where the tokens of two tokenizers differ, in words; empty if they do not. ``name``: of the student."""
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    if len(theirs) != len(ours):
        return f"its tokenizer has {len(theirs)} tokens, and that of {name} has {len(ours)}"
    differing = next((token for token in ours if theirs.get(token) != ours[token]), None)
    if differing is None:
        return ""
    number = theirs.get(differing)
    has = "has none" if number is None else f"has number {number}"
    return f"its tokenizer {has} for {differing!r}, and that of {name} has number {ours[differing]}"


def num_answers(rows: Dataset) -> int:
    """How many tokens are predicted and trained on."""
    total = 0
    for chunk in rows.data.column("labels").chunks:
        trained = chunk.flatten().to_numpy() != MASKED
        starts = chunk.offsets.to_numpy()[:-1] - chunk.offsets[0].as_py()
        total += int(trained.sum()) - int(trained[starts].sum())  # nothing predicts the first token of a row
    return total


def _place(
    config: RunConfig, budget: int, models: Sequence[PreTrainedModel], machine: Machine | None = None
) -> list[tuple[Any, str]]:
    """Of each teacher the plan that streams it, or None if all fit, and what is said of it. ConfigError: there is no
    room.
    """
    size, needs = asked_of(config).teacher_batch_size, list(map(weights_of, models))
    tokens = size * config.data.max_length
    logits = sum(
        2 * tokens * model.config.get_text_config().vocab_size * next(model.parameters()).element_size()
        for model in models
    )
    room, plans = budget - logits, []
    for model, weights in zip(models, needs, strict=True):
        share = room if len(models) == 1 else weights if sum(needs) <= room else room * weights // sum(needs)
        try:
            plans.append(plan_within(model, share, machine))
        except ValueError as error:
            what = f"{human(sum(needs))} of weights and {human(logits)} for logits of {tokens:,} tokens do not fit"
            line = f"{what} into {human(budget)} ({error}); lower it, or data.max_length"
            raise config.error("distill.teacher_batch_size", size, line) from None
    return plans


def answered(session: Session, lesson: Lesson) -> Session:
    """The run whose rows have the teacher's answers, asked by the first rank of a machine and opened by all."""
    config, first = session.config, session.ranks.is_first_local
    arguments = config, lesson, session.tokenizer, session.prepared, _home(config)
    where = device_of("cpu" if config.training.use_cpu else None)
    say = write_line if first else write_nothing
    prepared = first_then_all(session.ranks, lambda: with_answers(*arguments, where, say, compares=first))
    return replace(session, prepared=prepared)


def with_answers(
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
    """``prepared`` with answers to its training rows, asked now or found in ``folder``; ``compares`` those with their
    manifest.
    """
    home = folder / lesson.key
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{lesson.key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, however this ends
        if not home.is_dir() or (compares and not prepare.is_whole(home, say, TEACHER)):
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
    section = asked_of(config)
    draft = _writing(home)
    size = section.teacher_batch_size
    pad = tokenizer.pad_token_id
    rows: Any = prepared.train
    assert isinstance(pad, int)
    draft.mkdir(exist_ok=True)
    collate, said_s = Collator(pad, config.data.packing), monotonic()
    bar = tqdm(total=len(rows), desc="teacher", unit=" rows", leave=False, disable=None)
    with _teachers(config, lesson, device) as calls, bar:
        for number, start in enumerate(range(0, len(rows), lesson.rows)):
            path, stop = draft / f"{number:06}.arrow", min(start + lesson.rows, len(rows))
            if path.exists():
                bar.update(stop - start)
                continue
            row_answers = list[bytes]()
            for at in range(start, stop, size):
                batch = collate([rows[i] for i in range(at, min(at + size, stop))])
                row_answers += _asked(calls, batch, lesson.how, list(section.teachers.values()))
                bar.update(min(size, stop - at))
                if bar.disable and monotonic() - said_s > SAY_EVERY_S:
                    said_s = monotonic()
                    say(f"teacher: {start + len(row_answers):,} of {len(rows):,} rows answered")
            replace_file(path, _arrow(row_answers))
    seal(draft, TEACHER, {"key": lesson.key})
    remove(home)
    draft.rename(home)
    sync(home.parent)


def _asked(
    calls: Sequence[tuple[Callable[..., Any], list[torch.Tensor]]],
    batch: dict[str, torch.Tensor],
    how: Distillation,
    shares: Sequence[float],
) -> list[bytes]:
    """The answers to each row of ``batch``. Raise DataError if one is not finite."""
    labels = batch.pop("labels")
    predicts = labels[:, 1:] != MASKED
    logits = [call(**batch).logits[:, :-1] for call, _ in calls]
    states = [hidden.pop() for _, hidden in calls if how.hidden]
    row_answers = []
    for row, trained in enumerate(predicts):
        where = trained.to(logits[0].device)
        state = states[0][row, :-1][where] if how.hidden else None
        answer = answers([teacher_logits[row][where] for teacher_logits in logits], how, shares, state).cpu()
        if not (how.log_probabilities(answer).isfinite().all() and how.state(answer).isfinite().all()):
            raise DataError(
                "distill.teacher: its numbers are not finite, so it has no answer; take another dtype or model"
            )
        row_answers.append(answer.numpy().tobytes())
    return row_answers


def _arrow(answers: list[bytes]) -> bytes:
    """A file with one column."""
    batch = pa.record_batch({TEACHER: pa.array(answers, pa.large_binary())})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


@contextmanager
def _teachers(
    config: RunConfig, lesson: Lesson, device: torch.device
) -> Iterator[list[tuple[Callable[..., Any], list[torch.Tensor]]]]:
    """The teachers, to be called with tensors of the host, and their last hidden states; freed at the end."""
    sections = sections_of(config).values()
    models: list[Any] = [build.build(each, build.load_config(each), seed=0, partitioned=False) for each in sections]
    with ExitStack() as stack:
        places = _place(config, lesson.budget, models)
        yield [
            (stack.enter_context(placed(model, plan, device)), keep_state(model) if lesson.how.hidden else [])
            for model, (plan, _) in zip(models, places, strict=True)
        ]

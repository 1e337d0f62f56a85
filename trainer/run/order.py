"""The order in which a run is set up, from a config to a trainer. Read it top to bottom.

    data (first rank of each machine, the others wait) -> facts -> plan, shown -> arguments
    -> weights -> trainer -> the folder (``begin.py``) -> train -> finish

Everything before ``arguments`` uses no device memory, so a run that cannot work ends there. Whatever refuses a run does
it before the folder of the run is touched; prepared data, which is kept by content, is no part of that. The data comes
first because it decides the size of the vocabulary. Arguments come before weights because Hugging Face must know of
ZeRO stage 3, or each rank would build the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from deepstow.strategies.core.compose import degrees
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import Axis
from deepstow.strategies.engine import StowOptimizer
from deepstow.strategies.parallel import deepspeed, stages
from deepstow.strategies.parallel.stages import Form, Stage
from deepstow.strategies.parallel.tensor_shards import whole_shape
from deepstow.strategies.planner.step_cost import plan_cost, step_flops
from deepstow.strategies.report import full_report
from deepstow.strategies.state.sealed import digest_of
from deepstow.trainer.config.saved_adapter import base_of
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data import endings, teacher
from deepstow.trainer.data import prepare as preparing
from deepstow.trainer.data import rows as task_rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.data.collate import check_batch, check_packing
from deepstow.trainer.data.prepare import Prepared
from deepstow.trainer.distributed.agreement import WEEK_S, agreement
from deepstow.trainer.distributed.ranks import Ranks, name_device
from deepstow.trainer.errors import ConfigError, warning, write_line, write_nothing
from deepstow.trainer.formats.format import FORMATS
from deepstow.trainer.machine import block_timing
from deepstow.trainer.machine.probe import Machine, probe
from deepstow.trainer.machine.profiles import known_rates
from deepstow.trainer.model import attention, build, contents, mapped, parts, student, tying
from deepstow.trainer.model import folder as folder_of_model
from deepstow.trainer.model.adapters import loraplus
from deepstow.trainer.model.structured import config_of
from deepstow.trainer.planning import evaluation, facts, positions
from deepstow.trainer.planning.fit import explained
from deepstow.trainer.planning.from_config import advice, plans_of, refuse_impossible, short
from deepstow.trainer.registry import codes
from deepstow.trainer.run import (
    changes,
    checkpoint,
    further,
    inputs,
    machines,
    metrics,
    resuming,
    structured,
    teaching,
    trackers,
)
from deepstow.trainer.run.callbacks import (
    EarlyStopping,
    Meter,
    MetricsFile,
    ProgressLine,
    SampleText,
    sample_prompt,
)
from deepstow.trainer.run.checkpoint import About, DataFacts, ModelFacts
from deepstow.trainer.run.collated import collated
from deepstow.trainer.run.plan_check import PlanCheck
from deepstow.trainer.run.profile import Profile
from deepstow.trainer.run.pruning import Pruning
from deepstow.trainer.run.resuming import Resumed
from deepstow.trainer.run.stage_trial import form_of_stages
from deepstow.trainer.run.structured import Smaller
from deepstow.trainer.run.task_trainer import adapters_follow, class_for, left_out, options
from deepstow.trainer.run.trainer import Trainer
from deepstow.trainer.run.user_callbacks import UserCallbacks
from deepstow.trainer.tasks.task import loaded

T = TypeVar("T")


@dataclass(slots=True)
class Run:
    """The results of the steps below so far."""

    config: RunConfig
    ranks: Ranks
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    machine: Machine
    plan: Plan
    resumed: Resumed | None = None
    over: str | None = None  # the line of a run of which only further exports are missing
    files: Mapping[str, str] | None = None  # of a plan that was shown, by name, on the first rank; not written yet
    form: Form | None = None  # of the architecture's forward, where the model is cut into stages
    stage: Stage | None = None
    lesson: teacher.Lesson | None = None  # what a teacher is asked before training
    smaller: Smaller | None = None  # what becomes of the model before training
    evaluating: evaluation.Taken | None = None  # of the rows that are held out
    source: RunConfig | None = None  # names the model whose weights are loaded, if it is not the one of ``config``
    pour: Callable[[StowOptimizer], None] | None = None  # gives the stowed model its values
    weights: list[list[int]] = field(default_factory=list)  # ``inputs.files_now``, before they were read
    user_callbacks: UserCallbacks | None = None  # callbacks of the config, once the trainer has them
    applied: list[str] = field(default_factory=list)  # what strategies did to the model, a line each, on the first rank

    def say(self, line: str) -> None:
        """Print a line on the first rank."""
        if self.ranks.is_first:
            write_line(line)


def prepare(config: RunConfig, ranks: Ranks, resumed: Resumed | None = None) -> Run:
    """Prepare the data and plan: everything that can fail before a weight exists. ``resumed``: the checkpoint."""
    folder = Path(config.training.output_dir)
    known = config.model.config is not None  # a saved model's is found by the first rank, with the data
    if known:
        facts.check_model(config, config_of(config))
    form = form_of_stages(config) if known else None
    machines.refuse(config, ranks)
    if config.model.name_or_path is not None:
        folder_of_model.refuse_weights(config.model.name_or_path)
    weights = inputs.files_now(config, resumed)
    tokenizer, prepared = opened(config, ranks, resumed)
    machine = machines.agreed(ranks, probe())
    batches = collated(config, prepared.train)
    with explained(config, ranks, machine):
        plans = plans_of(batches.config, ranks, machine, resumes=resumed is not None, masked=batches.masked)
    machines.refuse_other_plans(ranks, plans)
    plan = plans[plans[0].facts.run.grid.cell(ranks.rank).stage]
    check_packing(config)
    further.refuse(config)
    check_batch(config, prepared.train, plan.facts.run.replicas)
    form = form or form_of_stages(config)
    refuse_under_zero(config, deepspeed.stage(plan))
    refuse_lost_weights(config, plan)
    run = Run(config, ranks, folder, tokenizer, prepared, machine, plan, resumed, form=form, weights=weights)
    before = teaching.priced(config, plan, machine)
    if prepared.eval is not None:
        evaluated = collated(config, prepared.eval)
        run.evaluating = evaluation.rows(evaluated.config, plan, masked=evaluated.masked)
        before += [run.evaluating.line] if run.evaluating.line else []
    if resumed is None and (tokens := block_timing.measured_for_other_rows(folder, plan.facts)):
        which = f"{tokens} tokens where this run has {plan.facts.run.sequence}, or of another mask or batch"
        before.append(f"block times in {folder / block_timing.FILE} are of rows of {which}: they are not used")
    run.files = show_plan(run, plans, before)
    with explained(config, ranks, machine):
        for each in plans:
            refuse_impossible(each)
    machines.refuse_without_room(config, ranks, plan, run.say)
    if ranks.is_first:
        ends = endings.ends_of(tokenizer, config_of(config), config.model.name_or_path)
        for line in filter(None, (other_base(config), endings.never_ends(prepared, tokenizer, ends))):
            run.say(warning(line))
    run.lesson = teaching.check(config, ranks, tokenizer, prepared, plan)
    run.smaller = structured.check(config, ranks, prepared, plan, machine)
    for line in resumed.said if resumed else ():
        run.say(line)
    return run


def other_base(config: RunConfig) -> str:
    """A line if the adapter that training goes on with names another base; empty if not. Its weights fit both."""
    section = config.model
    base = base_of(section.adapter) if section.adapter is not None else None
    if base is None or section.name_or_path is None or Path(base).resolve() == Path(section.name_or_path).resolve():
        return ""
    what = f"the adapter was trained on {base}, and model.name_or_path is {section.name_or_path}"
    return f"model.adapter: {what}: on other weights it means nothing"


def refuse_lost_weights(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError for weights that Transformers would tie where ranks have parts of them, which it takes for
    equal, though the files have other values.
    """
    untied = plan.facts.run.untied
    if deepspeed.stage(plan) == 3 and untied and not tying.config_says(config_of(config), config.chosen_task, untied):
        files = f"the files of {config.model.name_or_path} have {untied[0]} of their own, which its config cannot say"
        raise config.error("strategies.zero.stage", 3, f"{files}, so that it would be lost; write stage: 2")


def refuse_under_zero(config: RunConfig, stage: int | None) -> None:
    """Raise ConfigError for a schedule that DeepSpeed's optimizer, which replaces torch's, would not follow: it does
    not know the first rate, which ``min_lr`` is a part of.
    """
    lowest = (config.training.lr_scheduler_kwargs or {}).get("min_lr")
    if stage and lowest is not None:
        why = f"not with strategies.zero.stage {stage}, whose optimizer does not know the first rate"
        cure = f"write min_lr_rate: {lowest / config.training.learning_rate:.6g}"
        raise config.error("training.lr_scheduler_kwargs.min_lr", lowest, f"{why}; {cure}")


def opened(config: RunConfig, ranks: Ranks, resumed: Resumed | None) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """Tokenizer and data. A run that is resumed is refused here, with ConfigError, if it would read other contents than
    the checkpoint's. A collective.
    """
    found = first_then_all(ranks, lambda: read_data(config, ranks, resumed, quiet=not ranks.is_first))
    if resumed is not None:
        inputs.compare(config, ranks, resumed)
    return found


def read_data(
    config: RunConfig, ranks: Ranks, resumed: Resumed | None = None, *, quiet: bool
) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """The tokenizer and the tokenised data, made now or found in the run's folder. Raise DataError if it cannot be
    trained on, and ConfigError if the tokenizer cannot be used, or the run resumes one with other contents.
    """
    section, folder = config.model, Path(config.training.output_dir)
    hf_config = config_of(config)
    facts.check_model(config, hf_config)
    teaching.refuse(config)  # before rows are prepared
    task = config.chosen_task
    build.refuse_lost_buffers(section, hf_config, task)
    texts = preparing.texts(config.data) if task.language else task_rows.texts(task, config.data)
    words = tokenizers.load(
        section.tokenizer,
        section.name_or_path,
        section.trust_remote_code,
        folder,
        texts,
        partial(preparing.mark, config.data),
        resumes=resumed is not None,
    )
    rows = hf_config.get_text_config().vocab_size
    if len(words) > rows:
        saved = "name its own in model.tokenizer, or save it after resize_token_embeddings"
        cure = f"raise model.config.vocab_size from {rows}, or leave it out" if section.config else saved
        raise ConfigError(f"model: has {rows} tokens, and the tokenizer has {len(words)}; {cure}")
    say = write_nothing if quiet else write_line
    opened = preparing.opened_by_nobody
    if resumed is not None:
        opened = partial(resumed.compare_contents, config, hf_config, contents.code(section, hf_config))
    seed, home, compares = config.training.seed, preparing.cache(folder / "data"), ranks.is_first_local
    if not task.language:
        return words, task_rows.prepare(task, config, words, hf_config, home, say, opened, compares=compares)
    prepared = preparing.prepare(config.data, words, rows, seed, home, say, opened, compares=compares)
    if task.plain and not prepared.plain:
        takes = " and ".join(each.name for each in FORMATS.values() if each.plain)
        what = f"the rows are {prepared.format}, and {task.name} takes {takes}; write sft"
        raise config.error("task", config.task, what)
    if prepared.chat_template is not None:
        words.chat_template = prepared.chat_template  # the exported model is talked to as it was trained
    return words, prepared


def first_then_all(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run ``work`` on the first rank of each machine, then on the others, which find its files.

    The others wait for a week, since tokenising can take hours. An error on any machine is raised on every rank.
    """
    made: list[T] = []
    with agreement(ranks, WEEK_S) as together:
        together.by_some(ranks.is_first_local, lambda: made.append(work()))
    return made[0] if made else work()


def show_plan(run: Run, plans: Sequence[Plan], before: Sequence[str] = ()) -> dict[str, str]:
    """Print the short plan on the first rank. Returns the files that the run's folder will have of it: the whole plan
    as text and as JSON, the config, and DeepSpeed's config.
    """
    if not run.ranks.is_first:
        return {}
    cost, edits = plan_cost(run.plan), advice(run.config, run.plan)
    other_mask = attention.trained_otherwise(run.config.model, config_of(run.config))
    remarks = [known_rates(run.machine).ignored, other_mask]
    known = run.plan.facts.run.positions
    if collated(run.config, run.prepared.train).config.data.max_length > known:  # some row may be so long
        remarks += positions.beyond(run.config, known)
    found = short(run.config, plans, edits, before, more=f"{run.folder / 'plan.txt'}, or deepstow plan --full")
    for line in [*filter(None, remarks), "\n".join(["", *found.lines, ""])]:
        write_line(line)
    if found.lacks:
        write_line(warning(found.lacks))
    return {
        "config.yaml": run.config.dump(),
        "plan.json": json.dumps(full_report.to_json(run.plan, cost), indent=1),
        "plan.txt": full_report.text(run.plan, cost, edits, plans, before) + "\n",
        "ds_config.json": json.dumps(deepspeed.ds_config(run.plan), indent=1),
    }


def make_arguments(run: Run) -> TrainingArguments:
    """Hugging Face's arguments: the user's, and those that DeepStow decides."""
    given: dict[str, Any] = dict(run.config.training.arguments())
    if run.prepared.eval is None:
        given["eval_strategy"] = "no"
    if run.evaluating is not None:
        given["per_device_eval_batch_size"] = run.evaluating.rows
    if deepspeed.clips_itself(run.plan):
        given["max_grad_norm"] = 0.0
    if run.plan.layout is not None:
        given["bf16"] = False  # the engine computes with bf16 weights; autocast would cast them once more
    given.setdefault("use_cpu", run.machine.device_kind == "cpu")
    given.setdefault("dataloader_pin_memory", run.machine.device_kind != "cpu")
    name_device(run.ranks, run.machine.device_kind, on_cpu=given["use_cpu"])
    task = run.config.chosen_task
    arguments: TrainingArguments = loaded(task.arguments)(
        **task.complete(given, run.config),
        deepspeed=deepspeed.ds_config(run.plan) or None,
        logging_nan_inf_filter=False,  # a loss that is not finite is logged as it is
        # Batches are copied beside compute. Each rank reads a stream: one that sent batches could send one length only.
        accelerator_config={"non_blocking": bool(given["dataloader_pin_memory"]), "dispatch_batches": False},
        disable_tqdm=True,
        label_names=["labels"],
    )
    kind = run.machine.device_kind
    if arguments.device.type != kind and not given["use_cpu"]:
        what = f"the plan is for {kind}, and Accelerate trains on {arguments.device}"
        raise ConfigError(f"{what}: training.use_cpu: true trains on the CPU")
    if arguments.world_size != run.ranks.world_size:
        raise ConfigError(f"Accelerate knows no ranks on {kind}: train in one process, or on the CPU")
    return arguments


def make_model(run: Run) -> PreTrainedModel:
    """Build the model on the CPU, or split over the ranks where the plan splits parameters; of a pipeline the stage."""
    source = run.source or run.config
    section, seed, task = source.model, run.config.training.seed, run.config.chosen_task
    hf_config = config_of(source)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if section.config is not None and name not in section.config:
            setattr(hf_config, name, getattr(run.tokenizer, name))
    in_spans, sliced = changes.loads_spans(run.config, run.plan), changes.loads_slices(source, run.plan)
    split, apart = deepspeed.stage(run.plan) == 3, run.plan.facts.run.apart > 0
    untied = run.plan.facts.run.untied
    make = partial(build.build, sliced or section, hf_config, seed=seed, partitioned=split, task=task, untied=untied)
    weights = make(on_meta=run.form is not None or in_spans or apart or sliced is not None)
    tying.check(weights, section.name_or_path, untied)
    task.name_tokens(weights, run.tokenizer)
    if adapters_follow(run.config):
        return weights

    def fill(names: Collection[str]) -> None:
        shards = changes.shards(weights, run.config, run.ranks.rank)
        if sliced is None and (line := parts.fill(weights, names, section.name_or_path, seed, make, shards=shards)):
            run.say(line)
        changes.to_compute(weights, run.plan)

    def give_away(give: parts.Give) -> PreTrainedModel:
        twin = make(on_meta=True)
        if line := parts.fill(twin, (), section.name_or_path, seed, make, give):
            write_line(line)
        return twin

    if sliced is not None:
        first, writes = run.ranks.rank - run.ranks.local_rank, run.ranks.is_first_local
        with agreement(run.ranks, WEEK_S) as together:
            mapped.load(weights, give_away, run.folder / f"weights-{first}.part", together, writes=writes)
        weights = changes.adapted(weights, section, seed)
    if apart:
        fill(dict(weights.named_parameters(remove_duplicate=False)))
    if run.form is None:
        changes.to_compute(weights, run.plan)
        if in_spans:
            parts.hollow(weights)
            run.pour = partial(parts.pour, weights, make, section.name_or_path, seed, say=run.say)
    else:
        known = run.plan.facts
        assert known.cut is not None
        form = replace(run.form, width=known.run.hidden_size)
        try:
            run.stage = stages.Stage(weights, known.cut.parts, known.cut.of_stage(known.run.stage), form, fill)
        except stages.CannotCut as error:
            line = f"strategies.pipeline: {error}"
            raise ConfigError(run.config.located("strategies.pipeline", line)) from None
    changes.apply_strategies(weights, run.config, run.plan)
    if run.lesson is not None:
        student.learn(weights, run.config, run.lesson.how)
    return weights


def make_trainer(run: Run) -> Trainer:
    """The trainer with its callbacks, in the order in which they see an event; the meter must be last."""
    if run.lesson is not None:  # before the arguments, or Hugging Face would split the teacher under ZeRO stage 3
        ask = partial(teaching.answered, run.config, run.lesson, run.tokenizer, run.prepared)
        run.prepared = first_then_all(run.ranks, partial(ask, compares=run.ranks.is_first_local))
    if run.smaller is not None:
        run.source = structured.made(run.config, run.ranks, run.smaller, run.prepared)
    arguments = make_arguments(run)
    meter = make_meter(run, arguments.device)
    task = run.config.chosen_task
    prompt = sample_prompt(run.tokenizer, run.prepared.eval or run.prepared.train) if task.language else ""
    file, training = MetricsFile(run.folder / "metrics.jsonl"), run.config.training
    # Stages cannot generate, and ranks that divide experts would end at different tokens.
    generates = task.generates and not {Axis.STAGES, Axis.EXPERTS} & degrees(run.config.strategies).keys()
    chats = endings.holds_chats(run.prepared)
    sample = [SampleText(prompt, training.sample_prompts or (), file, chats=chats)] if generates else []
    patience, threshold = training.early_stopping_patience, training.early_stopping_threshold
    plan_check = _plan_check(run)
    ratio = run.config.model.lr_ratio
    run.user_callbacks = UserCallbacks(run.config)
    model: Any = make_model(run)
    if run.config.model.quantization_config is not None and run.plan.layout is None:
        model.to(arguments.device)  # Hugging Face leaves quantised models where they are
    trainer: Trainer = class_for(task)(
        model=model,
        args=arguments,
        train_dataset=run.prepared.train,
        eval_dataset=run.prepared.eval,
        processing_class=run.tokenizer,
        **metrics.beside(options(run.config, model, run.tokenizer), run.config),
        meter=meter,
        plan=run.plan,
        stage=run.stage,
        pour=run.pour,
        plan_check=plan_check,
        describe=partial(describe, run),
        make_optimizer=partial(loraplus, ratio=ratio) if ratio is not None else None,
        scores_alone=task.language and run.lesson is None,
        callbacks=[
            ProgressLine(whole=training.compute_metrics is not None),
            file,
            *sample,
            *([EarlyStopping(patience, threshold)] if patience is not None else []),
            *([plan_check] if plan_check else []),
            resuming.TakenOver(resuming.other(run.resumed, run.config)),
            *run.user_callbacks.made(),
            meter,
        ],
    )
    if not task.language:
        if line := left_out(run.config, len(run.prepared.train), trainer):
            run.say(line)
        left = trainer.about.data.model_copy(update={"rows": len(trainer.train_dataset)})  # type: ignore[arg-type]
        trainer.about = trainer.about.model_copy(update={"data": left})  # TRL may have dropped some
    if run.config.prune is not None and run.smaller is None:
        trainer.add_callback(Pruning(trainer, run.config))
    trainer.remove_callback(PrinterCallback)  # our line says more
    trackers.take_over(trainer)
    if training.profile is not None:
        model_name = run.config.model.name_or_path or type(model).__name__
        trainer.add_callback(Profile(trainer, run.plan, training.profile.steps, run.folder, model_name))
    trainer.say_memory = run.applied.append
    return trainer


def _plan_check(run: Run) -> PlanCheck | None:
    """What compares the plan with what the run takes, on the rank that writes files."""
    if run.files is None:
        return None
    training = run.config.training
    # Nothing can be counted in a process where Liger's kernels are applied.
    without_mask = dict if training.use_liger_kernel else partial(facts.saved_without_mask, run.config)
    return PlanCheck(
        run.plan,
        run.folder,
        run.files.get("plan.json", ""),
        recomputes=training.recomputes,
        without_mask=without_mask,
        evaluating=run.evaluating.peak if run.evaluating else 0,
    )


def describe(run: Run, model: PreTrainedModel) -> About:
    """``about`` the model as the Trainer has it; adapters that it has added are part of the plan."""
    if adapters_follow(run.config):
        changes.to_compute(model, run.plan)
        changes.apply_strategies(model, run.config, run.plan)
    return about(run, model)


def about(run: Run, model: PreTrainedModel) -> About:
    """What every checkpoint of the run says about it. Raise ConfigError if it resumes one with other parameters."""
    named = (run.stage.whole if run.stage else model).named_parameters()
    shapes = digest_of({name: list(whole_shape(each)) for name, each in named})
    if run.resumed is not None:
        run.resumed.compare_shapes(shapes)
    code = code_of(run)
    former = run.resumed.found.manifest.run.code if run.resumed else {}
    for name in (name for name, own in code.items() if former.get(name, own) != own):
        run.say(warning(f"{name} is other code than the checkpoint's: the result may be another run's"))
    as_loaded = config_of(run.config)  # the run may change its copy
    tree, data = json.loads(json.dumps(run.config.tree()), parse_constant=str), run.prepared
    rows = None if run.config.data.streaming else len(data.train)  # type: ignore[arg-type]
    weights, brought = inputs.recorded(run.config, run.ranks, run.resumed), contents.code(run.config.model, as_loaded)
    return About(
        config=tree,
        arguments=resuming.resolved(run.config, tree["training"]),
        config_sha256=digest_of(tree),
        versions=checkpoint.versions(),
        code=code,
        world_size=run.ranks.world_size,
        threads=torch.get_num_threads(),
        data=DataFacts(**data.contents._asdict(), rows=rows, teacher=run.lesson.teacher if run.lesson else ""),
        model=ModelFacts(config=checkpoint.plain_config(as_loaded), shapes=shapes, weights=weights, code=brought),
    )


def code_of(run: Run) -> dict[str, str]:
    """The hash of the file of each thing from outside that decides the result, by its name in the config."""
    data = run.config.data.parts()
    things = [run.config.chosen_task, *(part.asked_format() for part in data), *(part.asked_reader() for part in data)]
    return codes(things) | (run.user_callbacks.codes if run.user_callbacks else {})


def make_meter(run: Run, device: torch.device) -> Meter:
    """The meter of tokens and time over all ranks, with MFU if the device's peak is known."""
    known = run.plan.facts.run
    peak = run.machine.peak_flops.get(known.precision.value)

    def sum_over_ranks(number: int) -> int:
        total = torch.tensor(number, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(total)
        return int(total.item()) * known.replicas // known.world_size  # ranks of one copy have counted the same

    part = known.forward_flops / known.model_flops if known.model_flops else 1.0  # of the model on this rank
    return Meter(
        flops_per_token=step_flops(run.plan.facts) / part / (known.micro_batch * known.sequence),
        peak_flops=peak and peak * known.world_size,
        sum_over_ranks=sum_over_ranks if known.world_size > 1 else lambda number: number,
    )

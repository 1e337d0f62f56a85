"""The trainer of a run: Hugging Face's arguments, then the model, then the Trainer with its callbacks.

Arguments come before weights because Hugging Face must know of ZeRO stage 3, or each rank would build the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from deepstow.strategies.core.compose import degrees, in_order
from deepstow.strategies.core.facts import EXPERT, Precision
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import Axis
from deepstow.strategies.engine import StowOptimizer
from deepstow.strategies.engine.forward.compiled import compile_blocks
from deepstow.strategies.engine.tensors.quantised import is_quantised
from deepstow.strategies.parallel import deepspeed, stages
from deepstow.strategies.parallel.stages import Stage
from deepstow.strategies.parallel.tensor_shards import Shard, whole_shape
from deepstow.strategies.planner.step_cost import step_flops
from deepstow.strategies.state.sealed import digest_of
from deepstow.trainer.config.sections import ModelSection, RunConfig
from deepstow.trainer.data import endings
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.data.report import MANY
from deepstow.trainer.distributed.agreement import WEEK_S, agreement
from deepstow.trainer.distributed.ranks import name_device
from deepstow.trainer.errors import ConfigError, DataError, warning, write_line
from deepstow.trainer.model import attention, build, contents, mapped, parts, tying
from deepstow.trainer.model.adapters import loraplus
from deepstow.trainer.model.build import config_of, with_lora
from deepstow.trainer.planning import facts
from deepstow.trainer.registry import codes
from deepstow.trainer.run import inputs
from deepstow.trainer.run.callbacks import metrics, trackers
from deepstow.trainer.run.callbacks.plan_check import PlanCheck
from deepstow.trainer.run.callbacks.profile import Profile
from deepstow.trainer.run.callbacks.reports import (
    EarlyStopping,
    Meter,
    MetricsFile,
    ProgressLine,
    SampleText,
    sample_prompt,
)
from deepstow.trainer.run.checkpoints import checkpoint, resuming
from deepstow.trainer.run.checkpoints.checkpoint import About, DataFacts, ModelFacts
from deepstow.trainer.run.stage_trial import form_of_stages
from deepstow.trainer.run.trainer import Trainer
from deepstow.trainer.tasks.task import Task, loaded, mean_over_tokens, takes_no_count, token_losses

if TYPE_CHECKING:
    from deepstow.trainer.run.session import Session


class Built(NamedTuple):
    """The model: whole, as this rank's ``stage`` of a pipeline, or without values, which ``pour`` gives it later."""

    model: PreTrainedModel
    stage: Stage | None = None
    pour: Callable[[StowOptimizer], None] | None = None


def make_arguments(session: Session) -> TrainingArguments:
    """Hugging Face's arguments: the user's, and those that DeepStow decides."""
    keywords: dict[str, Any] = dict(session.config.training.arguments())
    if session.prepared.eval is None:
        keywords["eval_strategy"] = "no"
    if session.evaluating is not None:
        keywords["per_device_eval_batch_size"] = session.evaluating.rows
    if deepspeed.torch_clips(session.plan):
        keywords["max_grad_norm"] = 0.0
    if session.plan.layout is not None:
        keywords["bf16"] = False  # the engine computes with bf16 weights; autocast would cast them once more
    keywords.setdefault("use_cpu", session.machine.device_kind == "cpu")
    keywords.setdefault("dataloader_pin_memory", session.machine.device_kind != "cpu")
    name_device(session.ranks, session.machine.device_kind, on_cpu=keywords["use_cpu"])
    task = session.config.chosen_task
    arguments: TrainingArguments = loaded(task.arguments)(
        **task.complete(keywords, session.config),
        deepspeed=deepspeed.ds_config(session.plan) or None,
        logging_nan_inf_filter=False,  # a loss that is not finite is logged as it is
        # Batches are copied beside compute. Each rank reads a stream: one that sent batches could send one length only.
        accelerator_config={"non_blocking": bool(keywords["dataloader_pin_memory"]), "dispatch_batches": False},
        disable_tqdm=True,
        label_names=["labels"],
    )
    kind = session.machine.device_kind
    if arguments.device.type != kind and not keywords["use_cpu"]:
        what = f"the plan is for {kind}, and Accelerate trains on {arguments.device}"
        raise ConfigError(f"{what}: training.use_cpu: true trains on the CPU")
    if arguments.world_size != session.ranks.world_size:
        raise ConfigError(f"Accelerate knows no ranks on {kind}: train in one process, or on the CPU")
    return arguments


def make_model(session: Session) -> Built:
    """Build the model on the CPU, or split over the ranks where the plan splits parameters; of a pipeline the stage."""
    config = session.config
    plan = session.plan
    source = session.source or session.config
    section = source.model
    seed = config.training.seed
    task = config.chosen_task
    hf_config = config_of(source)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if section.config is not None and name not in section.config:
            setattr(hf_config, name, getattr(session.tokenizer, name))
    # Others would look at weights before the engine is given them: adapters, and Trainers that copy the model.
    in_spans = task.language and config.model.lora is None and plan.loads_spans
    sliced = loads_slices(source, plan)
    split, apart = deepspeed.stage(plan) == 3, plan.facts.run.apart > 0
    form, untied = form_of_stages(config), plan.facts.run.untied
    make = partial(build.build, sliced or section, hf_config, seed=seed, partitioned=split, task=task, untied=untied)
    weights = make(on_meta=form is not None or in_spans or apart or sliced is not None)
    tying.check(weights, section.name_or_path, untied)
    task.name_tokens(weights, session.tokenizer)
    if not task.counts_items(weights):
        takes_no_count(weights)
    if adapters_follow(config):
        return Built(weights)

    def fill(names: Collection[str]) -> None:
        shards = shards_of(weights, config, session.ranks.rank)
        if sliced is None and (line := parts.fill(weights, names, section.name_or_path, seed, make, shards=shards)):
            session.say(line)
        to_compute(weights, plan)

    def give_away(give: parts.Give) -> PreTrainedModel:
        twin = make(on_meta=True)
        if line := parts.fill(twin, (), section.name_or_path, seed, make, give):
            write_line(line)
        return twin

    if sliced is not None:
        first, writes = session.ranks.rank - session.ranks.local_rank, session.ranks.is_first_local
        with agreement(session.ranks, WEEK_S) as together:
            mapped.load(weights, give_away, session.folder / f"weights-{first}.part", together, writes=writes)
        if section.lora is not None:  # as ``build`` adds adapters
            torch.manual_seed(seed)
            weights = with_lora(weights, section.lora, adapter=section.adapter)
    if apart:
        fill(dict(weights.named_parameters(remove_duplicate=False)))
    stage, pour = None, None
    if form is None:
        to_compute(weights, plan)
        if in_spans:
            parts.hollow(weights)
            pour = partial(parts.pour, weights, make, section.name_or_path, seed, say=session.say)
    else:
        planned = plan.facts
        assert planned.cut is not None
        form = replace(form, width=planned.run.hidden_size)
        try:
            stage = stages.Stage(weights, planned.cut.parts, planned.cut.of_stage(planned.run.stage), form, fill)
        except stages.CannotCut as error:
            line = f"strategies.pipeline: {error}"
            raise ConfigError(config.located("strategies.pipeline", line)) from None
    apply_strategies(weights, config, plan)
    for recipe in config.switched_on:
        recipe.set_loss(weights, session)
    return Built(weights, stage, pour)


def make_trainer(session: Session) -> Trainer:
    """The trainer with its callbacks, in the order in which they see an event; what comes after the meter is short."""
    config = session.config
    arguments = make_arguments(session)
    meter = make_meter(session, arguments.device)
    task = config.chosen_task
    prompt = sample_prompt(session.tokenizer, session.prepared.eval or session.prepared.train) if task.language else ""
    file, training = MetricsFile(session.folder / "metrics.jsonl"), config.training
    # Stages cannot generate, and ranks that divide experts would end at different tokens.
    generates = task.generates and not {Axis.STAGES, Axis.EXPERTS} & degrees(config.strategies).keys()
    chats = endings.holds_chats(session.prepared)
    sample = [SampleText(prompt, training.sample_prompts or (), file, chats=chats)] if generates else []
    patience, threshold = training.early_stopping_patience, training.early_stopping_threshold
    plan_check, reset_best = _plan_check(session), resuming.other(session.resumed, config)
    ratio = config.model.lr_ratio
    built = make_model(session)
    model: Any = built.model
    if config.model.quantization_config is not None and session.plan.layout is None:
        model.to(arguments.device)  # Hugging Face leaves quantised models where they are
    trainer: Trainer = class_for(task)(
        model=model,
        args=arguments,
        train_dataset=session.prepared.train,
        eval_dataset=session.prepared.eval,
        processing_class=session.tokenizer,
        **metrics.beside(options(config, model, session.tokenizer), config),
        meter=meter,
        plan=session.plan,
        stage=built.stage,
        pour=built.pour,
        plan_check=plan_check,
        describe=partial(describe, session, built.stage),
        make_optimizer=partial(loraplus, ratio=ratio) if ratio is not None else None,
        scores_alone=task.language and not any(recipe.own_loss for recipe in config.switched_on),
        callbacks=[
            ProgressLine(whole=training.compute_metrics is not None),
            file,
            *sample,
            *([EarlyStopping(patience, threshold, another=bool(reset_best))] if patience is not None else []),
            *([plan_check] if plan_check else []),
            resuming.TakenOver(reset_best),
            *session.user_callbacks.made(),
            meter,
        ],
    )
    if not task.language:
        if line := left_out(config, len(session.prepared.train), trainer):
            session.say(line)
        data = trainer.about.data.model_copy(update={"rows": len(trainer.train_dataset)})  # type: ignore[arg-type]
        trainer.about = trainer.about.model_copy(update={"data": data})  # TRL may have dropped some
    for callback in (callback for recipe in config.switched_on for callback in recipe.callbacks(session, trainer)):
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)  # our line says more
    trackers.take_over(trainer)
    if training.profile is not None:
        model_name = config.model.name_or_path or type(model).__name__
        trainer.add_callback(Profile(trainer, session.plan, training.profile.steps, session.folder, model_name))
    trainer.say_memory = session.applied.append
    return trainer


def _plan_check(session: Session) -> PlanCheck | None:
    """What compares the plan with what the run takes; None for a copy of a run, as ``deepstow verify`` trains."""
    if session.files is None:
        return None
    training = session.config.training
    # Nothing can be counted in a process where Liger's kernels are applied.
    without_mask = dict if training.use_liger_kernel else partial(facts.saved_without_mask, session.config)
    return PlanCheck(
        session.plan,
        session.folder,
        session.files.get("plan.json", ""),
        recomputes=training.recomputes,
        without_mask=without_mask,
        evaluating=session.evaluating.peak if session.evaluating else 0,
    )


def make_meter(session: Session, device: torch.device) -> Meter:
    """The meter of tokens and time over all ranks, with MFU if the device's peak is known."""
    run = session.plan.facts.run
    peak = session.machine.peak_flops.get(run.precision.value)

    def sum_over_ranks(number: int) -> int:
        total = torch.tensor(number, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(total)
        return int(total.item()) * run.replicas // run.world_size  # ranks of one copy have counted the same

    model_share = run.forward_flops / run.model_flops if run.model_flops else 1.0  # of the model on this rank
    return Meter(
        flops_per_token=step_flops(session.plan.facts) / model_share / (run.micro_batch * run.sequence),
        peak_flops=peak and peak * run.world_size,
        sum_over_ranks=sum_over_ranks if run.world_size > 1 else lambda number: number,
    )


def describe(session: Session, stage: Stage | None, model: PreTrainedModel) -> About:
    """``about`` the model as the Trainer has it; adapters that it has added are part of the plan."""
    if adapters_follow(session.config):
        to_compute(model, session.plan)
        apply_strategies(model, session.config, session.plan)
    return about(session, stage, model)


def about(session: Session, stage: Stage | None, model: PreTrainedModel) -> About:
    """What every checkpoint of the run says about it; ``stage``: this rank's, of a pipeline. Raise ConfigError if the
    run resumes one with other parameters.
    """
    named = (stage.whole if stage else model).named_parameters()
    shapes = digest_of({name: list(whole_shape(param)) for name, param in named})
    if session.resumed is not None:
        session.resumed.compare_shapes(shapes)
    code = code_of(session)
    former = session.resumed.found.manifest.run.code if session.resumed else {}
    for name in (name for name, code_hash in code.items() if former.get(name, code_hash) != code_hash):
        session.say(warning(f"{name} is other code than the checkpoint's: the result may be another run's"))
    as_loaded = config_of(session.config)  # the run may change its copy
    tree, data = json.loads(json.dumps(session.config.tree()), parse_constant=str), session.prepared
    rows = None if session.config.data.streaming else len(data.train)  # type: ignore[arg-type]
    weights = inputs.recorded(session.config, session.ranks, session.resumed)
    brought = contents.code(session.config.model, as_loaded)
    files = {fact: value for recipe in session.config.switched_on for fact, value in recipe.recorded(session).items()}
    return About(
        config=tree,
        arguments=resuming.resolved(session.config, tree["training"]),
        config_sha256=digest_of(tree),
        versions=checkpoint.versions(),
        code=code,
        world_size=session.ranks.world_size,
        threads=torch.get_num_threads(),
        data=DataFacts(**data.contents._asdict(), rows=rows, **files),
        model=ModelFacts(config=checkpoint.plain_config(as_loaded), shapes=shapes, weights=weights, code=brought),
    )


def code_of(session: Session) -> dict[str, str]:
    """The hash of the file of each thing from outside that decides the result, by its name in the config."""
    data = session.config.data.parts()
    things: list[Any] = [
        session.config.chosen_task,
        *session.config.switched_on,
        *(part.asked_format() for part in data),
        *(part.asked_reader() for part in data),
    ]
    return codes(things) | session.user_callbacks.codes


# --- what a run does with a model that was built -----------------------------------------------------------------


def shards_of(weights: PreTrainedModel, config: RunConfig, rank: int) -> dict[str, Shard]:
    """The parts that ``rank`` has of parameters of which it is given some rows alone."""
    ways, shards = degrees(config.strategies).get(Axis.EXPERTS, 1), {}
    for name, param in weights.named_parameters():
        if ways > 1 and EXPERT.search(name):
            sizes = (len(param) // ways,) * ways
            shards[name] = Shard(0, sizes, rank % ways, tuple(param.shape))
    return shards


def loads_slices(config: RunConfig, plan: Plan) -> ModelSection | None:
    """The model, without adapters, of which tensor ranks load slices; None: they load no slices. Adapters are added to
    what is loaded; on random weights they go on with the numbers of these, which every rank has to draw for that.
    """
    section = config.model
    if plan.facts.run.tensor == 1 or (section.lora is not None and section.name_or_path is None):
        return None
    return section.model_copy(update={"lora": None, "adapter": None})


def to_compute(weights: PreTrainedModel, plan: Plan) -> None:
    """Give weights that the engine computes with in bf16 that dtype."""
    if plan.layout is not None and plan.facts.run.precision is Precision.BF16:
        for parameter in weights.parameters():  # one by one; the engine keeps fp32 masters
            if not is_quantised(parameter):
                parameter.data = parameter.data.to(torch.bfloat16)


def apply_strategies(weights: PreTrainedModel, config: RunConfig, plan: Plan) -> None:
    """Let recipes change the model, and compile blocks, if the config says so; then let each strategy and those that it
    implies change the model, in the order of deciding. Names stay the same.
    """
    for recipe in config.switched_on:
        recipe.apply(weights, config)
    if (backend := config.training.compile_backend) is not None:
        compile_blocks(weights, backend)
    for name, strategy in in_order(config.strategies).items():
        names = _names_of(weights)
        strategy.apply(weights, plan)
        assert _names_of(weights) == names, f"strategies.{name} renamed, reordered or dropped something"


def _names_of(weights: PreTrainedModel) -> list[str]:
    """The names of all modules, parameters and buffers, in order."""
    kinds = (weights.named_modules(), weights.named_parameters(remove_duplicate=False), weights.named_buffers())
    return [name for kind in kinds for name, _ in kind]


# --- what is the task's ------------------------------------------------------------------------------------------


def class_for(task: Task) -> type[Trainer]:
    """The Trainer of a task, as one rank of a job."""
    base = loaded(task.trainer)
    return Trainer if base is transformers.Trainer else type("Trainer", (Trainer, base), {})


def adapters_follow(config: RunConfig) -> bool:
    """Whether the Trainer adds adapters to the model that it is given."""
    return config.model.lora is not None and config.chosen_task.adds_adapters


def options(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The keyword arguments of the Trainer that are the task's."""
    task, packing = config.chosen_task, config.data.packing
    if not task.language:
        task_options = task.options(model, tokenizer, config)
        if config.model.lora is not None and config.model.adapter is None and task.adds_adapters:
            task_options["peft_config"] = build.lora_config(config.model.lora, task)
        return task_options
    # Flash attention takes packed documents as one long row instead of a batch of rows.
    flatten = packing and str(config.model.attn_implementation).startswith("flash_attention")
    least_length = config.data.max_length if config.training.compile_backend else 0
    documents = packing and attention.takes_documents(config)
    pad: Any = tokenizer.pad_token_id
    losses = {"compute_metrics": mean_over_tokens, "preprocess_logits_for_metrics": token_losses}
    columns = {name: make for recipe in config.switched_on for name, make in recipe.columns(config).items()}
    collate = Collator(pad, packing, flatten=flatten, least=least_length, documents=documents, columns=columns)
    return {"data_collator": collate, **losses}


def left_out(config: RunConfig, rows: int, trainer: Trainer) -> str:
    """A line about how many of the rows that it was given a Trainer of TRL has dropped; empty if none. Raise DataError
    if all.
    """
    kept_rows = len(trainer.train_dataset)  # type: ignore[arg-type]
    line = f"data: {rows - kept_rows:,} of {rows:,} rows are dropped: their prompts fill data.max_length"
    cure = f"raise it from {config.data.max_length}"
    if not kept_rows:
        raise DataError(f"{line}; {cure}")
    return warning(f"{line}; {cure}") if (rows - kept_rows) * MANY > rows else line if kept_rows < rows else ""

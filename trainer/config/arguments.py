"""The ``training`` section: the names of Hugging Face's TrainingArguments, with types and ranges.

Every name of that dataclass is either a field here, or refused with what to write instead (``foreign.yaml``); a test
compares both with the installed one. Refused is what the plan or another section decides (``deepspeed``), what hides
errors (``logging_nan_inf_filter``), and what breaks exact resuming (``ignore_data_skip``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from deepstow.strategies.core.optimizers import refuse_optimizer
from deepstow.strategies.core.protocol import COMPILE_KEYS
from deepstow.strategies.core.resume import Change, Rule, on_resume
from deepstow.trainer.registry import LIKE, REFERENCE, Registry
from deepstow.trainer.tasks.preference import DpoLoss, KtoLoss


class Allowed(str):
    """Metadata that describes a type whose generated words would be clumsy: ``Annotated[..., Allowed("...")]``."""


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys; only whole numbers are converted, to floats."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def one_of(registry: Registry[Any], elsewhere: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The type of a name of the registry, or of module:Class. ``elsewhere``: what is said of names that others have."""
    names, like = registry.names(), LIKE.format(f"My{registry.base.__name__}")
    reference = Annotated[str, Field(pattern=f"^{REFERENCE}$")]

    def known(value: Any) -> Any:
        if isinstance(value, str) and value in elsewhere and value not in names:
            raise ValueError(elsewhere[value])
        return value

    allowed = Allowed(f"one of {', '.join(names)}, or {like}")
    return Annotated[Literal[names] | reference, allowed, BeforeValidator(known)]


def option(description: str, default: object = None, *, resume: Rule | None = None) -> Any:
    """A key that may be left out, unless its default is ``...``; if it is None then, Hugging Face's, or the model's,
    own default applies. ``resume``: its rule for resuming; None: that of its section.
    """
    return Field(default=default, description=description, json_schema_extra=on_resume(resume) if resume else None)


def free(description: str, default: object = None) -> Any:
    """An ``option`` that a resumed run may have otherwise without a word: no bit of the result depends on it."""
    return option(description, default, resume="free")


NonEmpty = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Steps = Annotated[Count | Fraction, Allowed("a whole number >= 1, or a share of all steps > 0 and < 1")]
Warmup = Annotated[Natural | Ratio, Allowed("a whole number >= 0, or a share of all steps < 1")]
MaxSteps = Annotated[Literal[-1] | Count, Allowed("a whole number >= 1, or -1 for no limit")]
Interval = Literal["no", "steps", "epoch"]
Reporter = Literal["tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab", "none"]
Reporters = Annotated[
    list[Reporter] | Reporter,
    Allowed("one of tensorboard, wandb, trackio, mlflow, comet_ml, swanlab, none, or a list of them"),
]
LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
]  # fmt: skip
Sampling = Literal["random", "sequential", "group_by_length", "batch_rebalance"]
CompileBackend = Literal["inductor", "aot_eager"]
Function = Annotated[
    str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"), Allowed("module:function, as in my_metrics:accuracy")
]


def _has_class(callback: Any) -> Any:
    """A callback: a reference, or a mapping with one under ``class``."""
    name = callback.get("class") if isinstance(callback, dict) else callback
    if not (isinstance(name, str) and re.fullmatch(REFERENCE, name)):
        raise ValueError(f"must be {CALLBACKS}")
    return callback


CALLBACKS = "a list, each module:Class or a mapping {class: module:Class, ARGUMENT: VALUE, ...}"
Callbacks = Annotated[list[Annotated[Any, AfterValidator(_has_class)]], Allowed(CALLBACKS)]
Reference = Annotated[
    str, Field(pattern=f"^{REFERENCE}$"), Allowed("module:Class, as in my_module:MyClass or folder/my_file.py:MyClass")
]
Start = Literal["fork", "spawn", "forkserver"]
Counting = Annotated[bool | Literal["all", "non_padding", "no"], Allowed("true, false, all, non_padding or no")]
Resume = Annotated[bool | NonEmpty, Allowed("the folder of a checkpoint, true, false or auto")]
FirstAndLast = Annotated[
    list[Annotated[int, Field(ge=2)]],
    Field(min_length=2, max_length=2),
    Allowed("the first and the last step, as in [10, 12]; from 2 on, since one is for warming up"),
]
Optimizer = Annotated[
    Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "lion_32bit"],
    BeforeValidator(refuse_optimizer),
]

# Release 5.23 of Transformers renamed these and warns about the old names; earlier releases have only the old ones.
# Both are accepted in the config, and the old one, which every supported release understands, is passed on.
RENAMED: Mapping[str, str] = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
LESS = ("perplexity", "mae")  # metrics of ours that are better if smaller
# Not passed on: with it, Hugging Face's Trainer uploads the run's folder at each save (run/exporting/upload.py).
UPLOADS = frozenset(["push_to_hub", "hub_model_id", "hub_revision"])
# Not passed on: with it, Hugging Face's Trainer makes each kernel wait (trainer/machine/repeated_sums.py).
REPEATS = frozenset(["full_determinism"])
# Keys that TrainingArguments does not have.
OWN = frozenset(
    {"allow_change", "overwrite", "early_stopping_patience", "early_stopping_threshold", "sample_prompts", "profile"}
    | {"compute_metrics", "preprocess_logits_for_metrics", "callbacks"}
)

# Keys that earlier versions had, and what to do now.
REMOVED: Mapping[str, str] = {"training.live": "deepstow watch FOLDER, in any terminal, shows the run; leave it out"}


class ProfileSection(Section):
    """A torch profiler's trace of some optimizer steps."""

    steps: FirstAndLast = Field(description="Optimizer steps to profile; a few, since each is many megabytes.")


class TrainingSection(Section):
    """How to train: the names of transformers.TrainingArguments, checked."""

    output_dir: NonEmpty = free("Folder of the run: checkpoints, logs, plan, export.", ...)
    learning_rate: Positive = option("Peak learning rate.", 5e-5, resume="said")
    per_device_train_batch_size: Count = option(
        "Samples per device and forward pass (the micro-batch).", 8, resume="batch_size"
    )
    gradient_accumulation_steps: Count = option("Micro-batches per optimizer step.", 1, resume="accumulation")
    num_train_epochs: Positive = option("Passes over the data; ignored if max_steps is set.", 3.0, resume="said")
    max_steps: MaxSteps = option("Optimizer steps; -1 means num_train_epochs decides.", -1, resume="said")
    max_grad_norm: NonNegative = option(
        "Gradients are clipped to this global norm; 0 switches clipping off.", 1.0, resume="clipping"
    )
    optim: Optimizer = option("Optimizer; lion_32bit is bitsandbytes'.", "adamw_torch_fused", resume="fixed")
    optim_args: NonEmpty | None = option(
        "Further options of sgd, adagrad or rmsprop, as in momentum=0.9,nesterov=true.", resume="fixed"
    )
    weight_decay: NonNegative | None = option("Weight decay; not applied to biases and norms.", resume="weight_decay")
    adam_beta1: Ratio | None = option("Decay of Adam's first moment; Lion's for the update.", resume="betas")
    adam_beta2: Ratio | None = option("Decay of Adam's second moment; of Lion's only one.", resume="betas")
    adam_epsilon: Positive | None = option("Added to Adam's denominator.", resume="betas")
    lr_scheduler_type: Scheduler | None = option("Course of the learning rate.", resume="said")
    lr_scheduler_kwargs: dict[str, Any] | None = option("Options of the scheduler, e.g. num_cycles.", resume="said")
    warmup_steps: Warmup | None = option("Steps of linear warm-up; below 1 it is a share of all steps.", resume="said")
    seed: Seed = option("Seed of everything random but the order of the data.", 42, resume="seed")
    data_seed: Seed | None = option("Seed of the order of the data; not set means seed.", resume="seed")
    full_determinism: bool | None = option(
        "Only kernels whose sums have one order; slower (deepstow docs exactness).", resume="kernels"
    )
    bf16: bool = option("Compute in bfloat16 and keep fp32 master weights.", False, resume="precision")
    fp16: bool = option("Compute in float16 with loss scaling and keep fp32 master weights.", False, resume="precision")
    tf32: bool | None = option("Allow TF32 in fp32 matrix products.", resume="precision")
    use_cpu: bool | None = option("Train on the CPU although an accelerator is present.", resume="kernels")
    average_tokens_across_devices: bool | None = option(
        "Loss is the mean over the tokens of all devices.", resume="loss"
    )
    label_smoothing_factor: Ratio | None = option(
        "Share of the target taken from the true token and spread over all.", resume="loss"
    )
    neftune_noise_alpha: Positive | None = option("Strength of NEFTune's noise on the embeddings.", resume="loss")
    gradient_checkpointing: bool | None = free("Recompute activations block by block.")
    gradient_checkpointing_kwargs: dict[str, Any] | None = free("Options of gradient_checkpointing.")
    activation_checkpointing: bool | None = free("Newer name of gradient_checkpointing.")
    activation_checkpointing_kwargs: dict[str, Any] | None = free("Newer name of gradient_checkpointing_kwargs.")
    torch_compile: bool | None = option("Compile each block of the model with torch.compile.", resume="kernels")
    torch_compile_backend: CompileBackend | None = option(
        "Backend of torch.compile; setting it switches compiling on.", resume="kernels"
    )
    torch_compile_mode: Literal["default"] | None = option(
        "Mode of torch.compile; setting it switches compiling on.", resume="kernels"
    )
    use_liger_kernel: bool | None = option("Use Liger's fused kernels; needs liger-kernel.", resume="kernels")
    liger_kernel_config: dict[str, bool] | None = option("Which Liger kernels to use.", resume="kernels")
    torch_empty_cache_steps: Count | None = free("Return the device's cached memory every so many steps.")
    logging_strategy: Interval | None = free("When to log.")
    logging_steps: Steps = free("Optimizer steps between two log lines.", 10)
    logging_first_step: bool | None = free("Log the first step too.")
    log_on_each_node: bool | None = free("Log on every node and not on the first only.")
    log_level: LogLevel | None = free("Level of messages on the first process.")
    log_level_replica: LogLevel | None = free("Level of messages on the other processes.")
    include_num_input_tokens_seen: Counting | None = free("Count the tokens seen.")
    report_to: Reporters = free("Where metrics go besides metrics.jsonl.", ["tensorboard"])
    profile: ProfileSection | None = free("Trace of some steps, in the run's folder profile; slower meanwhile.")
    run_name: NonEmpty | None = free("Name of the run at the trackers.")
    project: NonEmpty | None = free("Project at wandb and Trackio, experiment at MLflow.")
    trackio_space_id: NonEmpty | None = free("Hugging Face Space that shows Trackio's metrics.")
    trackio_bucket_id: NonEmpty | None = free("Hugging Face bucket that holds Trackio's metrics.")
    trackio_static_space_id: Annotated[NonEmpty | Literal[False] | None, Allowed("text or false")] = free(
        "Static Space that shows Trackio's metrics after the run; false for none."
    )
    eval_strategy: Interval = option("When to evaluate; needs evaluation data.", "no", resume="evaluations")
    eval_steps: Steps | None = option(
        "Optimizer steps between two evaluations; not set means logging_steps.", resume="evaluations"
    )
    eval_delay: NonNegative | None = option(
        "Epochs or steps, as eval_strategy, before the first evaluation.", resume="evaluations"
    )
    eval_on_start: bool | None = option("Evaluate before the first step.", resume="evaluations")
    per_device_eval_batch_size: Count | None = free(
        "Samples per device and evaluation pass; not set: 8, or as many as the plan has room for."
    )
    eval_accumulation_steps: Count | None = free("Evaluation batches between two moves of results to the host.")
    save_strategy: Literal["no", "steps", "epoch", "best"] = free("When to write a checkpoint.", "steps")
    save_steps: Steps = free("Optimizer steps between two checkpoints.", 500)
    save_total_limit: Count | None = free("Checkpoints to keep; not set means all.")
    save_on_each_node: bool | None = free("Write checkpoints on every node's own disk.")
    load_best_model_at_end: bool | None = free("End with the weights of the best evaluation.")
    metric_for_best_model: NonEmpty | None = option(
        "Metric that decides which evaluation is best; not set means loss.", resume="evaluations"
    )
    greater_is_better: bool | None = option("Whether a greater metric is better.", resume="evaluations")
    early_stopping_patience: Count | None = option(
        "Training ends after so many evaluations that are not better.", resume="said"
    )
    early_stopping_threshold: NonNegative = option("How much better the metric must be, to count.", 0.0, resume="said")
    sample_prompts: Annotated[list[NonEmpty], Field(min_length=1)] | None = free(
        "Prompts that are continued, greedily, at each evaluation; printed, and in metrics.jsonl. Where rows are chats "
        "each is the user's turn, written by the chat template."
    )
    compute_metrics: Function | None = option(
        "Function for further metrics of an evaluation, as Hugging Face's.", resume="evaluations"
    )
    preprocess_logits_for_metrics: Function | None = option(
        "Function that says what of the logits is kept for it.", resume="evaluations"
    )
    callbacks: Callbacks | None = option("Callbacks of your own (deepstow docs extending).", resume="said")
    resume_from_checkpoint: Resume | None = free("Folder to resume from; true or auto for the newest valid one.")
    allow_change: list[Change] = free("What a resumed run may do differently although the result changes.", [])
    overwrite: bool = free("Delete an earlier run in output_dir; otherwise it moves to earlier-N in it.", False)
    restore_callback_states_from_checkpoint: bool | None = free("Restore the state of callbacks on resume.")
    push_to_hub: bool | None = free("Upload the export to the hub at the end.")
    hub_model_id: NonEmpty | None = free("Repository on the hub; not set means the name of output_dir.")
    hub_private_repo: bool | None = free("Create the repository as a private one.")
    hub_revision: NonEmpty | None = free("Branch to upload to.")
    dataloader_drop_last: bool | None = option("Drop the last batch if it is not full.", resume="order")
    dataloader_num_workers: Natural | None = free("Processes per device that load data; 0 loads in the main one.")
    dataloader_pin_memory: bool | None = free("Batches in pinned host memory.")
    dataloader_persistent_workers: bool | None = free("Keep the loading processes between epochs.")
    dataloader_prefetch_factor: Count | None = free("Batches each loading process prepares ahead.")
    dataloader_multiprocessing_context: Start | None = free("How loading processes start.")
    dataloader_in_order: bool | None = option("Batches in order although one worker is slow.", resume="order")
    train_sampling_strategy: Sampling | None = option("Order of the samples.", resume="order")
    ddp_timeout: Count | None = free(
        "Seconds before a silent collective, rank or loading process ends the run; not set means 1800."
    )

    # Of the arguments of a task's trainer; ``Task.keys`` says whose.
    beta: Positive | None = option(
        "dpo, kto: how strongly the model is held near the reference; orpo: weight of the odds ratio.", resume="loss"
    )
    loss_type: DpoLoss | KtoLoss | None = option("dpo, kto: the loss, by TRL's names.", resume="loss")
    precompute_ref_log_probs: bool | None = option(
        "dpo, kto: what the reference says is computed once, before training; always so without model.lora.",
        resume="loss",
    )
    desirable_weight: Positive | None = option("kto: weight of rows whose label is true.", resume="loss")
    undesirable_weight: Positive | None = option("kto: weight of rows whose label is false.", resume="loss")
    center_rewards_coefficient: Positive | None = option(
        "reward: how strongly the mean of rewards is held at zero.", resume="loss"
    )
    disable_dropout: bool | None = option(
        "dpo, orpo, kto, reward: no dropout; TRL's default is true.", resume="dropout"
    )
    predict_with_generate: bool | None = free(
        "seq2seq: evaluations generate, and compare the texts with those of the data."
    )
    generation_max_length: Count | None = free("seq2seq: tokens generated at most.")
    generation_num_beams: Count | None = free("seq2seq: beams of generation.")

    @property
    def recomputes(self) -> bool:
        """Whether Hugging Face recomputes blocks, by the name of any release."""
        return bool(self.gradient_checkpointing or self.activation_checkpointing)

    @property
    def compile_backend(self) -> str | None:
        """What compiles blocks; None: they are not compiled."""
        return (self.torch_compile_backend or "inductor") if self.compile_key else None

    @property
    def compile_key(self) -> str | None:
        """The first key that says so. As in Hugging Face's, any of them does it."""
        return next((key for key in COMPILE_KEYS if getattr(self, key)), None)

    def arguments(self) -> dict[str, object]:
        """The keyword arguments for TrainingArguments: what is set, without our own and ``Trainer.train``'s, and those
        of compiling, by which Hugging Face's Trainer compiles the whole model.
        """
        arguments = self.model_dump(exclude={"resume_from_checkpoint", *OWN, *UPLOADS, *REPEATS, *COMPILE_KEYS})
        if self.early_stopping_patience is not None:
            arguments["metric_for_best_model"] = self.metric_for_best_model or "loss"
        if self.greater_is_better is None and str(self.metric_for_best_model).endswith(LESS):
            arguments["greater_is_better"] = (
                False  # Hugging Face takes whatever does not end in loss to be better if greater
            )
        return {RENAMED.get(name, name): value for name, value in arguments.items() if value is not None}

"""Any Hugging Face Trainer with the memory engine: ``stowed(SFTTrainer, gpu_memory="20GiB")`` is a subclass of it.

The engine holds weights, gradients and optimizer state. A Trainer would move the model to the device, clip gradients
that are not in ``param.grad``, average them over the ranks again, and copy the whole optimizer state to save it. The
subclass overrides only that. It plans from the Trainer's own arguments.

Invariant. The result has the bits of the Trainer alone, in the precision of model and arguments: fp32 weights stay fp32
and are autocast with ``bf16=True`` or ``fp16=True``. A model loaded in bf16 gets fp32 masters, which plain training
does not have.

Refused: optimizers that do not update element by element (``strategies/core/optimizers.py``), DeepSpeed and FSDP
together with the engine, one process with several devices, compiled models whose weights travel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deepstow.strategies.core.optimizers import STATE
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import Refusal
from deepstow.strategies.engine import StowOptimizer, UpdateRule, stow, stowed_by
from deepstow.strategies.engine.forward.checkpointing import recompute
from deepstow.strategies.engine.model_checks import not_in_kernels
from deepstow.strategies.engine.updating.optim import class_of
from deepstow.trainer.errors import CountingError, first_line, write_line
from deepstow.trainer.execution.base import Execution
from deepstow.trainer.execution.stowed import Stowed
from deepstow.trainer.planning.plan_for import plan_for, shape_of
from deepstow.trainer.run.accelerator import StowAccelerator
from deepstow.trainer.run.checkpoints import training_state


def stowed(base: type, **options: Any) -> type:
    """A subclass of ``base``, a ``transformers.Trainer``, that trains with the memory engine.

    Args:
        options: of ``plan_for``, except those that the Trainer's arguments decide: ``gpu_memory`` and
            ``host_memory`` ("20GiB", a share such as 0.8), ``batch`` (by default ``max_length`` tokens of as many
            rows as a device takes at a time), ``recompute``, and those of ``strategies.offload``.

    Raises:
        TypeError: ``base`` is not a Trainer, or an option is one that its arguments decide.
    """
    import transformers

    if not (isinstance(base, type) and issubclass(base, transformers.Trainer)):
        raise TypeError(f"{base!r} is not a subclass of transformers.Trainer")
    decided = [name for name in ("max_grad_norm", "accumulation", "world_size", "moments") if name in options]
    if decided:
        raise TypeError(f"{decided[0]}: the Trainer's own arguments decide that; leave it out")
    return type(f"Stowed{base.__name__}", (_WithCheckpoints, base), {"stow_options": options})


class StowedTrainer:
    """The mixin that ``stowed`` puts before a Trainer class in the order of methods."""

    stow_options: Mapping[str, Any] = {}
    say_memory: Callable[[str], None] = staticmethod(write_line)  # told of the arenas, a line each, on the first rank
    plan: Plan | None = None
    execution: Execution
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any

    @property
    def stows(self) -> bool:
        """Whether the engine trains this model: it has something to train, or is not made yet."""
        return self.model is None or any(parameter.requires_grad for parameter in self.model.parameters())

    @property
    def whole(self) -> Any:
        """The model with all its names and shapes."""
        return self.execution.whole(self.model)

    @property
    def stowed(self) -> StowOptimizer | None:
        """The memory engine's optimizer, once training or evaluation has begun."""
        inner = self.inner_optimizer
        return inner if isinstance(inner, StowOptimizer) else None

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer, without what Accelerate has wrapped it in."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def place_model_on_device(self) -> bool:
        """As Hugging Face decides, but the engine moves a stowed model as planned."""
        return self._places and not self.stows

    @place_model_on_device.setter
    def place_model_on_device(self, places: bool) -> None:
        self._places = places

    def create_accelerator_and_postprocess(self) -> None:
        """Make a ``StowAccelerator`` of Hugging Face's. Raise ValueError if arguments exclude the engine."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.stows:
            self._refuse_others()
        self.accelerator = StowAccelerator.of(self.accelerator)
        self.execution = self.accelerator.execution = self.make_execution()
        self.gather_function = self.accelerator.gather_for_metrics  # ours, not the one that it was bound to

    def make_execution(self) -> Execution:
        """How steps are made."""
        return Stowed()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Let the Trainer make its optimizer, plan with it, and give the model to the engine."""
        if self.stowed is not None:
            return self.optimizer  # type: ignore[no-any-return]
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if not self.stows or isinstance(optimizer, StowOptimizer):
            return optimizer
        former_engine = stowed_by(self.model)
        if former_engine is not None:  # another trainer's; every trainer begins with an optimizer of its own
            former_engine.close()
        rule, groups = adopt(optimizer)
        self.plan = self.make_plan(groups, len(rule.names))
        assert self.plan.layout is not None
        if self.args.torch_compile and not all(bucket.resident for bucket in self.plan.layout.buckets):
            # Compiled code does not fetch weights.
            raise ValueError("torch_compile=True: weights travel in this plan; say weights='resident', or leave it out")
        rank_options = self.execution.among_ranks(self.model)
        stow_optimizer = stow(self.model, self.plan, groups, rule, device=self.args.device, **rank_options)
        self.execution.adopt(stow_optimizer)
        if self.args.process_index == 0:
            for line in stow_optimizer.engine.arena.owners():
                self.say_memory(line)
        self.optimizer = stow_optimizer
        return stow_optimizer

    def make_plan(self, groups: list[dict[str, Any]], moments: int) -> Plan:
        """A plan from the Trainer's arguments and the options. Raise ValueError if there is none that fits."""
        options = {
            **self.stow_options,
            "max_grad_norm": self.args.max_grad_norm,
            "accumulation": self.args.gradient_accumulation_steps,
            "world_size": self.args.world_size,
            "moments": moments,
        }
        if self.args.fp16:  # its loss scale needs all gradients first
            options["update_in_backward"] = False
        try:
            with self.accelerator.autocast():
                plan = self._plan(groups, options)
        except Refusal as refused:
            line = str(refused).replace("strategies.offload.", "")
            if "eval_rows" not in self.stow_options:
                line = line.replace("eval_rows = ", "rows of a call by per_device_eval_batch_size = ")
            raise ValueError(line) from None
        if "recompute" in options:
            recompute(self.model, plan)
        return plan

    def _plan(self, groups: list[dict[str, Any]], options: Mapping[str, Any]) -> Plan:
        """With the batch of the options, or of the Trainer's arguments; without, if forward cannot be counted on it."""
        if "batch" not in options:
            options = {**options, "batch": self._batch()}
        args = self.args
        if getattr(self, "eval_dataset", None) is None:
            options = {"eval_rows": 0, **options}
        elif options["batch"] is not None and args.eval_strategy != "no":
            # A call of the model may have two rows for each row of data, or one for all.
            rows = shape_of(options["batch"])[0]
            number = -(-rows * args.per_device_eval_batch_size // args.per_device_train_batch_size)
            options = {"eval_rows": number, **options}
        try:
            return plan_for(self.model, groups, **options)
        except CountingError as error:
            if "batch" in self.stow_options:
                raise
            assert error.__cause__ is not None
            if args.process_index == 0:
                why = f"forward cannot be counted on tensors without values: {first_line(error.__cause__)}"
                write_line(f"what backward keeps is not counted ({why})")
            return plan_for(self.model, groups, **{**options, "batch": None})

    def _batch(self) -> tuple[int, int]:
        """Rows and tokens of the largest call of the model, by the Trainer's arguments. Raise ValueError if they do not
        say how long rows are.
        """
        args = self.args
        if not getattr(args, "max_length", None):
            raise ValueError(
                f"batch is missing, since {type(args).__name__} says no max_length: write batch=(rows, tokens) of the "
                f"largest call of the model, or batch=None to count nothing of what backward keeps"
            )
        pairs = "Preference" in type(self.data_collator).__name__  # type: ignore[attr-defined]  # TRL's: two for a row
        return args.per_device_train_batch_size * (2 if pairs else 1), args.max_length

    def _refuse_others(self) -> None:
        """Raise ValueError if an argument of the Trainer cannot be combined with the engine."""
        import transformers

        args = self.args
        engine = getattr(self, "is_deepspeed_enabled", False) or getattr(self, "is_fsdp_enabled", False)
        own_buffers = args.ddp_broadcast_buffers is False and args.world_size > 1
        early = self.stow_options.get("update_in_backward")
        order = self.stow_options.get("order", "micro_batches")
        prepares = type(self)._prepare_inputs is not transformers.Trainer._prepare_inputs  # type: ignore[attr-defined]
        twice = "recompute" in self.stow_options and (args.gradient_checkpointing or args.activation_checkpointing)
        refusals = {
            "a stowed trainer cannot be combined with DeepSpeed or FSDP: leave out deepspeed= and fsdp=": engine,
            f"update_in_backward={early}: fp16's loss scale needs all gradients first; leave it out": (
                early is True and args.fp16
            ),
            f"one process with {args.n_gpu} devices: start one for each, as torchrun does": args.n_gpu > 1,
            "ddp_broadcast_buffers=False: a stowed trainer copies the first rank's buffers; leave it out": own_buffers,
            f"order={order!r}: this trainer prepares inputs by itself, step by step; leave order= out": (
                order != "micro_batches" and prepares
            ),
            "fp16_full_eval, bf16_full_eval: a stowed trainer evaluates in the precision of training; leave it out": (
                args.fp16_full_eval or args.bf16_full_eval
            ),
            "recompute= cannot be combined with gradient_checkpointing=True: keep one of the two": twice,
        }
        for why, is_so in refusals.items():
            if is_so:
                raise ValueError(why)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; the execution is told of all micro-batches of the step."""
        batches, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.execution.begin_step(batches)
        return batches, count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **more: Any) -> torch.Tensor:
        """As Hugging Face's, by the execution."""
        step = super().training_step  # type: ignore[misc]

        def one(batch: Any) -> torch.Tensor:
            return step(model, batch, num_items_in_batch, **more)  # type: ignore[no-any-return]

        return self.execution.training_step(one, inputs, num_items_in_batch)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; before training the model is stowed first, so that it is where training will have it."""
        if self.stows:
            self.create_optimizer()
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def compute_ref_log_probs(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, which asks the model as it is before training; it is stowed first, since nothing else moves it."""
        if self.stows:
            self.create_optimizer()
        return super().compute_ref_log_probs(*args, **kwargs)  # type: ignore[misc]


class _WithCheckpoints(StowedTrainer):
    """Checkpoints are those of the Trainer, but the engine's state is in our format."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As Hugging Face's, but the engine's state is written bucket by bucket, without a second copy in memory."""
        if self.stowed is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        else:
            training_state.save_stowed(self, Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As Hugging Face's for what Hugging Face has written; the engine loads what is in our format."""
        if self.stowed is None or checkpoint is None or not (Path(checkpoint) / training_state.OPTIMIZER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        else:
            training_state.load(self, Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The generators' states as we have written them; Hugging Face's where there are only those."""
        if checkpoint is None or not training_state.random_states(Path(checkpoint)):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif line := training_state.load_random_state(self, Path(checkpoint)):
            write_line(line)


def adopt(optimizer: torch.optim.Optimizer) -> tuple[UpdateRule, list[dict[str, Any]]]:
    """The update rule and the parameter groups of a torch optimizer that has not been used yet. Raise ValueError if the
    engine has no such rule, or the optimizer has state or hooks.

    The groups are the same objects, so a scheduler that was made for the optimizer still sets their learning rates.
    """
    kind = type(optimizer)
    if kind.__name__ not in STATE or class_of(kind.__name__) is not kind:
        raise ValueError(
            f"a stowed trainer updates element by element, as {', '.join(STATE)} do, and not with {kind.__name__}: "
            f"write optim='adamw_torch_fused', or pass no other optimizer"
        )
    options = inspect.signature(kind).parameters
    rule = UpdateRule(kind.__name__, **{name: value for name, value in optimizer.defaults.items() if name in options})
    for complaint in (*not_in_kernels(optimizer.param_groups, rule), *_not_in_groups(optimizer)):
        raise ValueError(f"{kind.__name__} of a stowed trainer: {complaint}")
    if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad has some from the beginning
        raise ValueError("this optimizer has state already: pass a stowed trainer a new one")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError("this optimizer has step hooks, which a stowed trainer would not call: use a TrainerCallback")
    return rule, optimizer.param_groups


def _not_in_groups(optimizer: Any) -> Iterator[str]:
    """What an optimizer of bitsandbytes does to a parameter otherwise than its group says, one line each."""
    for number, group in enumerate(optimizer.param_groups if hasattr(optimizer, "get_config") else ()):
        expected = {"optim_bits": 32, "max_unorm": 0.0, "skip_zeros": False, **group}
        for index in range(len(group["params"])):
            for name, value in optimizer.get_config(number, index, group).items():
                if name in expected and expected[name] != value:
                    yield f"parameter {index} of group {number} has {name} = {value} of its own; leave it out"

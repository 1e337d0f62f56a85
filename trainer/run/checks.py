"""All that may refuse a run before it trains, by the moment at which it is asked, in that order.

A check raises a UserError, or returns. Only those before the weights leave something: a tracker that runs, and a
repository of the hub, which a run cannot do without. Whatever is made may be refused as well, where it is made:
data, a plan, a model; and a checkpoint that does not go with the config, in ``checkpoints/resuming.py``. A run that is
refused has moved and written nothing of an earlier run (``begin.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from math import ceil, inf
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from deepstow.strategies.core.compose import requirements_of
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import Requirement
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.parallel import deepspeed
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data import collate
from deepstow.trainer.distributed import deepspeed_ops
from deepstow.trainer.distributed.ranks import Ranks, collectives_of
from deepstow.trainer.errors import first_line
from deepstow.trainer.model import build, folder, tying
from deepstow.trainer.model.build import config_of
from deepstow.trainer.planning import facts, from_config
from deepstow.trainer.run import machines, stage_trial
from deepstow.trainer.run.callbacks import metrics, trackers
from deepstow.trainer.run.callbacks.user_callbacks import UserCallbacks
from deepstow.trainer.run.exporting import results, upload

WITHOUT_OPTIONS = ("constant", "constant_with_warmup")  # schedules


class Before(Enum):
    """The moments at which a run is checked, in their order. In brackets: what is known, besides the ``config``."""

    MEETING = auto()  # of the ranks, each on its own (ranks)
    LOCK = auto()  # on the run's folder; on the first rank
    DATA = auto()  # (ranks)
    ROWS = auto()  # on the ranks that read (model: the config of a saved one)
    SHOWING = auto()  # the plan (ranks, rows, the plans of all stages, this rank's plan)
    SPENDING = auto()  # memory, which a plan that was shown takes (ranks, plans, plan, say: prints on the first rank)
    WEIGHTS = auto()  # on the first rank


def check(before: Before, **known: Any) -> None:
    """Raise the UserError of the first check of this moment that has one. ``known``: parts of the run, by name."""
    for refuse in CHECKS[before].values():
        refuse(SimpleNamespace(**known))


def _is_described(run: Any) -> bool:
    """Whether the config says what the model is. A saved one is found by the first rank, with the data."""
    return run.config.model.config is not None


def _has_engine(run: Any) -> bool:
    return Requirement.DEEPSPEED in requirements_of(run.config.strategies)


def refuse_folders(config: RunConfig, ranks: Ranks) -> None:
    """Raise ConfigError for checkpoints in a folder of each machine."""
    if config.training.save_on_each_node and not ranks.is_local:
        what = (
            "a checkpoint is one folder, into which the ranks of all machines write what they hold; leave it out, and"
        )
        raise config.error("training.save_on_each_node", True, f"{what} put output_dir where all machines see it")


def refuse_schedule(config: RunConfig) -> None:
    """Raise ConfigError for options that the scheduler does not take, without which it cannot be made, or that give a
    rate that is negative or no number where the course begins, in its middle or where it ends.
    """
    args, key = config.training, "training.lr_scheduler_kwargs"
    kind, options = args.lr_scheduler_type or "linear", args.lr_scheduler_kwargs
    if options and kind in WITHOUT_OPTIONS:
        raise config.error(key, options, f"lr_scheduler_type {kind} takes no options; leave it out")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    steps = args.max_steps if args.max_steps > 0 else 1_000_000
    share = args.warmup_steps or 0
    warm_up = ceil(share * steps) if share < 1 else int(share)
    at, problem = 0, ""
    try:
        scheduler = get_scheduler(kind, optimizer, warm_up, steps, dict(options or {}))
        for at in (warm_up, (warm_up + steps) // 2, steps - 1, steps) if isinstance(scheduler, LambdaLR) else ():
            factor = scheduler.lr_lambdas[0](at)
            if isinstance(factor, complex) or not 0 <= factor < inf:
                problem = f"the learning rate would be {factor} of training.learning_rate"
                break
    except Exception as error:  # options can be wrong in any way
        problem = first_line(error)
    if problem:
        raise config.error(key, options, f"lr_scheduler_type {kind}: {problem}{f' at step {at}' * (at > 0)}")


def refuse_min_lr(config: RunConfig, stage: int | None) -> None:
    """Raise ConfigError for a schedule that DeepSpeed's optimizer, which replaces torch's, would not follow: it does
    not know the first rate, which ``min_lr`` is a part of.
    """
    lowest = (config.training.lr_scheduler_kwargs or {}).get("min_lr")
    if stage and lowest is not None:
        why = f"not with strategies.zero.stage {stage}, whose optimizer does not know the first rate"
        cure = f"write min_lr_rate: {lowest / config.training.learning_rate:.6g}"
        raise config.error("training.lr_scheduler_kwargs.min_lr", lowest, f"{why}; {cure}")


def refuse_lost_weights(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError for weights that Transformers would tie where ranks have parts of them, which it takes for
    equal, though the files have other values.
    """
    untied = plan.facts.run.untied
    if deepspeed.stage(plan) == 3 and untied and not tying.config_says(config_of(config), config.chosen_task, untied):
        files = f"the files of {config.model.name_or_path} have {untied[0]} of their own, which its config cannot say"
        raise config.error("strategies.zero.stage", 3, f"{files}, so that it would be lost; write stage: 2")


CHECKS: Mapping[Before, Mapping[str, Callable[[Any], object]]] = {
    Before.MEETING: {
        "collectives": lambda run: (
            collectives_of(accelerator.kind() or "cpu")
            if (_has_engine(run) or run.ranks.world_size > 1) and not run.config.training.use_cpu
            else None
        ),
        "trackers": lambda run: trackers.refuse(run.config),
        "schedule": lambda run: refuse_schedule(run.config),
        "folders": lambda run: refuse_folders(run.config, run.ranks),
        "compiler": lambda run: deepspeed_ops.refuse_what_cannot_be_built() if _has_engine(run) else None,
        # From here on code that the config names runs.
        "options": lambda run: from_config.check_options(run.config, run.ranks.world_size),
        "metrics": lambda run: metrics.refuse(run.config),
        "callbacks": lambda run: UserCallbacks(run.config),
    },
    Before.LOCK: {
        "folder": lambda run: from_config.refuse_folder(run.config),
        "hub": lambda run: upload.refuse(run.config),
    },
    Before.DATA: {
        "model": lambda run: facts.check_model(run.config, config_of(run.config)) if _is_described(run) else None,
        "stages": lambda run: stage_trial.form_of_stages(run.config) if _is_described(run) else None,
        "machines": lambda run: machines.refuse(run.config, run.ranks),
        "weights": lambda run: None if _is_described(run) else folder.refuse_weights(run.config.model.name_or_path),
    },
    Before.ROWS: {
        "model": lambda run: facts.check_model(run.config, run.model),
        "recipes": lambda run: [recipe.refuse_before_rows(run.config) for recipe in run.config.switched_on],
        "buffers": lambda run: build.refuse_lost_buffers(run.config.model, run.model, run.config.chosen_task),
    },
    Before.SHOWING: {
        "one plan": lambda run: machines.refuse_other_plans(run.ranks, run.plans),
        "packing": lambda run: collate.check_packing(run.config),
        "exports": lambda run: results.refuse(run.config),
        "batch": lambda run: collate.check_batch(run.config, run.rows, run.plan.facts.run.replicas),
        "stages": lambda run: None if _is_described(run) else stage_trial.form_of_stages(run.config),
        "min_lr": lambda run: refuse_min_lr(run.config, deepspeed.stage(run.plan)),
        "lost weights": lambda run: refuse_lost_weights(run.config, run.plan),
    },
    Before.SPENDING: {
        "memory": lambda run: [*map(from_config.refuse_impossible, run.plans)],
        "disks": lambda run: machines.refuse_without_room(run.config, run.ranks, run.plan, run.say),
    },
    Before.WEIGHTS: {
        "trackers": lambda run: trackers.start(run.config),
        "repository": lambda run: upload.repository(run.config),
    },
}

"""A run, from its config to what it leaves. Read it top to bottom.

    config checked -> ranks meet -> lock on the folder -> checkpoint to go on from -> data (first rank of each machine,
    the others wait) -> plan, shown -> what recipes do before -> arguments -> weights -> trainer
    -> the folder (``begin.py``) -> train -> export -> upload

Everything up to the plan uses no device memory, so a run that cannot work ends there. Whatever refuses a run leaves all
that an earlier one has made (``checks.py``). It may leave prepared data, kept by content, a tokenizer and
``exit.json``, which says how it has ended.
The data comes first because it decides the size of the vocabulary. Exit code 0 is for a run whose exports are there,
under their names and uploaded where the config says so.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from transformers import PreTrainedTokenizerBase

from deepstow.strategies.core.applied import shown_by
from deepstow.strategies.core.compose import requirements_of
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import Requirement
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.config.saved_adapter import other_base
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.config.yaml_file import leaves
from deepstow.trainer.data import endings
from deepstow.trainer.data.prepare import Prepared
from deepstow.trainer.distributed.agreement import DAY_S, Agreement, agreement
from deepstow.trainer.distributed.ranks import Ranks, process_group, quiet_libraries
from deepstow.trainer.distributed.stopping import Phase, Stop, Stopped
from deepstow.trainer.distributed.watchdog import Watchdog
from deepstow.trainer.errors import ExitCode, warning, write_line, write_nothing
from deepstow.trainer.machine import block_timing
from deepstow.trainer.machine.probe import Machine, probe
from deepstow.trainer.machine.repeated_sums import repeated_sums
from deepstow.trainer.model.build import config_of
from deepstow.trainer.planning import evaluation
from deepstow.trainer.planning.fit import explained
from deepstow.trainer.planning.from_config import plans_of, show_plan
from deepstow.trainer.run import building, failures, inputs, loading, lock, machines
from deepstow.trainer.run.begin import Begin
from deepstow.trainer.run.callbacks.reports import SaveAndStop, Watched
from deepstow.trainer.run.callbacks.user_callbacks import UserCallbacks, keeping
from deepstow.trainer.run.checkpoints import finished, resuming, saving
from deepstow.trainer.run.checkpoints.resuming import Resumed
from deepstow.trainer.run.checks import Before, check
from deepstow.trainer.run.collated import collated
from deepstow.trainer.run.data import opened
from deepstow.trainer.run.exporting import results, upload
from deepstow.trainer.run.failures import timeout_s


@dataclass(frozen=True, slots=True)
class Session:
    """A run that is prepared: its data is read, its plan is shown, and no weight exists."""

    config: RunConfig
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    machine: Machine
    plan: Plan
    user_callbacks: UserCallbacks
    files: Mapping[str, str] | None = None  # of a plan that was shown, by name, on the first rank; not written yet
    weights: Sequence[list[int]] = ()  # ``inputs.files_now``, before they were read
    resumed: Resumed | None = None
    over: str | None = None  # the line of a run of which only further exports are missing
    evaluating: evaluation.Taken | None = None  # of the rows that are held out
    recipes: Mapping[str, Any] = field(default_factory=dict)  # what each has announced, by its name
    source: RunConfig | None = None  # names the model whose weights are loaded, if it is not the one of ``config``
    applied: list[str] = field(default_factory=list)  # what strategies do to the model, a line each, on the first rank

    @property
    def folder(self) -> Path:
        """Where all of the run is."""
        return Path(self.config.training.output_dir)

    def say(self, line: str) -> None:
        """Print a line on the first rank."""
        if self.ranks.is_first:
            write_line(line)


def run(config: RunConfig, ranks: Ranks, stop: Stop) -> int:
    """Train as ``config`` says, on this rank. Returns an exit code; all process groups are closed, whatever happens.
    Raise UserError for what is refused before the ranks meet.
    """
    check(Before.MEETING, config=config, ranks=ranks)
    quiet_libraries()
    on_cpu = bool(config.training.use_cpu)
    single = Requirement.DEEPSPEED in requirements_of(config.strategies)
    warned = shown_by(lambda line: write_line(warning(line)), logging.WARNING) if ranks.is_first else nullcontext()
    try:
        with warned, process_group(ranks, timeout_s(config), single=single, on_cpu=on_cpu) as watchdog:
            if watchdog is not None:
                watchdog.ended = stop.ended
            if not on_cpu and (device := accelerator.current()) is not None:
                accelerator.row_of(device).expand_segments(device)
            return in_group(config, ranks, stop, watchdog)
    except DistError as error:
        return failures.while_meeting(error, ranks)
    finally:
        loading.end_all()


def in_group(config: RunConfig, ranks: Ranks, stop: Stop, watchdog: Watchdog | None = None) -> int:
    """The run from the lock on its folder to its upload. A run that is over already is only uploaded."""
    session: Session | None = None
    try:
        with (
            config.placing(),
            repeated_sums(wanted=bool(config.training.full_determinism)),
            agreement(ranks, timeout_s(config)) as together,
            ExitStack() as held,
        ):
            together.refuse_different({".".join(key): value for key, value in leaves((), config.tree())})
            if ranks.is_first and (line := loading.shortage(config, ranks.local_world_size)):
                write_line(line)
            stop.ended.lock = together.on_first(partial(_locked, config, stop, held))
            resumed = resuming.decide(config, ranks)
            with agreement(ranks, DAY_S) as patient:  # exports are read as a whole
                over = patient.on_first(
                    lambda: finished.before(config, resumed.found, resumed.changed) if resumed else None
                )
                incomplete = over is not None and bool(patient.on_first(lambda: results.missing(config)))
            if over is None or incomplete:
                session = prepare(config, ranks, resumed, over)
                train(session, stop, together, watchdog)
            else:
                stop.phase = Phase.ENDING
                together.be_patient()
                if resumed is not None and resumed.places:  # what is there may be another run's
                    opened(config, ranks, resumed)
                if ranks.is_first:
                    write_line(over)
            together.on_first(lambda: upload.upload(config))  # all ranks meet, before any says it is over
            if ranks.is_first:
                write_line(results.following(config))
        failures.say_end(ExitCode.FINISHED, stop)
        return ExitCode.FINISHED
    except (Exception, Stopped) as error:
        return failures.ended(error, config, session.plan if session else None, ranks, stop, watchdog)


def _locked(config: RunConfig, stop: Stop, held: ExitStack) -> str:
    """Lock the run's folder for as long as ``held`` is open. Returns who has it."""
    check(Before.LOCK, config=config)
    holder = held.enter_context(lock.held(config, partial(stop.end, code=ExitCode.DISK)))
    stop.ended.clear()
    return holder


def prepare(config: RunConfig, ranks: Ranks, resumed: Resumed | None = None, over: str | None = None) -> Session:
    """Prepare the data and plan, without a weight. ``resumed``: the checkpoint; ``over``: the line of a run that is."""
    check(Before.DATA, config=config, ranks=ranks)
    weights = inputs.files_now(config, resumed)
    tokenizer, prepared = opened(config, ranks, resumed)
    machine = machines.agreed(ranks, probe())
    batches = collated(config, prepared.train)
    with explained(config, ranks, machine):
        plans = plans_of(batches.config, ranks, machine, resumes=resumed is not None, masked=batches.masked)
    plan = plans[plans[0].facts.run.grid.cell(ranks.rank).stage]
    check(Before.SHOWING, config=config, ranks=ranks, rows=prepared.train, plans=plans, plan=plan)
    lines = [line for recipe in config.switched_on for line in recipe.plan_lines(config, plan, machine)]
    evaluating = None
    if prepared.eval is not None:
        evaluated = collated(config, prepared.eval)
        evaluating = evaluation.rows(evaluated.config, plan, masked=evaluated.masked)
        lines += filter(None, [evaluating.line])
    if resumed is None:
        lines += filter(None, [block_timing.unused(Path(config.training.output_dir), plan.facts)])
    longest = batches.config.data.max_length
    files = show_plan(config, machine, plans, plan, longest, lines) if ranks.is_first else {}
    with explained(config, ranks, machine):
        say = write_line if ranks.is_first else write_nothing
        check(Before.SPENDING, config=config, ranks=ranks, plans=plans, plan=plan, say=say)
    if ranks.is_first:
        ends = endings.ends_of(tokenizer, config_of(config), config.model.name_or_path)
        for line in filter(None, (other_base(config), endings.never_ends(prepared, tokenizer, ends))):
            write_line(warning(line))
    session = Session(
        config, ranks, tokenizer, prepared, machine, plan, UserCallbacks(config), files, weights, resumed, over,
        evaluating,
    )  # fmt: skip
    session = replace(session, recipes={recipe.name: recipe.announce(session) for recipe in config.switched_on})
    for line in resumed.said if resumed else ():
        session.say(line)
    return session


def train(session: Session, stop: Stop, together: Agreement, watchdog: Watchdog | None) -> None:
    """Train, and make all exports."""
    together.on_first(partial(check, Before.WEIGHTS, config=session.config))
    with shown_by(session.applied.append) if session.ranks.is_first else nullcontext():
        session = before_training(session)
        _train(session, stop, together, watchdog)
    results.export_further(session, together)


def before_training(session: Session) -> Session:
    """The run once recipes have done what comes first: before the arguments, or Hugging Face would split other models
    than the trained one under ZeRO stage 3.
    """
    for recipe in session.config.switched_on:
        session = recipe.before_training(session)
    return session


def _train(session: Session, stop: Stop, together: Agreement, watchdog: Watchdog | None) -> None:
    """The trainer is a local variable, so that it is freed with this frame."""
    config = session.config
    trainer = building.make_trainer(session)
    trainer.add_callback(SaveAndStop(stop, trainer, together))
    # After the checkpoint is loaded, which may refuse the run; before TensorBoard's, which makes files.
    trainer.callback_handler.callbacks.insert(1, Begin(session, together))
    if watchdog is not None:
        trainer.add_callback(Watched(watchdog))
    checkpoint = str(session.resumed.path) if session.resumed is not None else None
    if checkpoint is not None:
        session.say(f"resuming from {checkpoint}")
    if config.training.save_strategy != "no":
        estimate = saving.estimated_bytes(session.plan, adapters=config.model.lora is not None)
        if shortage := saving.shortage(session.folder, estimate):
            session.say(f"{shortage}: training goes on without a checkpoint until there is space")
    try:
        with loading.watched(config, timeout_s(config), partial(stop.end, code=ExitCode.WATCHDOG)):
            with keeping(session.folder, alone=session.ranks.world_size == 1):
                trainer.train(resume_from_checkpoint=checkpoint)
            stop.phase = Phase.ENDING
            together.be_patient()
            results.finish(session, trainer, together)
    finally:
        trainer.accelerator.free_memory()  # ends DeepSpeed's engine
        del trainer
        gc.collect()

"""A whole run: prepare, train, finish. Returns an exit code and closes every process group.

A run that was asked to stop saves at the end of the step, on all ranks together, and ends with exit code 10, or 130 if
it was Ctrl-C. A signal reaches one rank, or several at different moments, and a rank that saved on its own would wait
for the others in the collectives of saving. So the ranks agree at the end of every step, and after what takes long, an
evaluation or a save.

Invariant. ``Stopped`` is raised on all ranks or on none, after every rank has left the save. The checkpoint is an
ordinary one, so the resumed run ends with the bits of one that nobody stopped; an evaluation that is due at this step
is made before.

Exit code 0 is for a run whose exports are there, under their names and uploaded where the config says so. The first
rank makes them, and the others wait for it with their watchdogs, in a group that is open since the beginning: of a rank
that dies, or ends with an error, they know at once.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch.distributed
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from deepstow.strategies.core.applied import shown_by
from deepstow.strategies.core.compose import requirements_of
from deepstow.strategies.core.protocol import Requirement
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.layers_first import LayersRefusedError
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.memory.scratch_file import DiskError
from deepstow.trainer.config.yaml_file import leaves
from deepstow.trainer.data import report as data_report
from deepstow.trainer.data import sample
from deepstow.trainer.distributed import deepspeed_ops
from deepstow.trainer.distributed.agreement import Agreement, agreement
from deepstow.trainer.distributed.ranks import GRACE_S, Ranks, collectives_of, process_group, quiet_libraries
from deepstow.trainer.distributed.stopping import KEYBOARD, Phase, Stop, Stopped, code_of
from deepstow.trainer.distributed.watchdog import Watchdog
from deepstow.trainer.errors import ConfigError, ExitCode, UserError, first_line, report, warning, write_line
from deepstow.trainer.machine.repeated_sums import repeated_sums
from deepstow.trainer.model import attention
from deepstow.trainer.planning import picture
from deepstow.trainer.planning.from_config import budget_of, check_options, refuse_folder
from deepstow.trainer.registry import Raised
from deepstow.trainer.run import checkpoint as checkpoints
from deepstow.trainer.run import (
    disk,
    earlier,
    export,
    finished,
    further,
    loading,
    lock,
    metrics,
    oom,
    order,
    resuming,
    saving,
    schedule,
    trackers,
    upload,
)
from deepstow.trainer.run.begin import Begin
from deepstow.trainer.run.callbacks import SAID, Watched, of_best, perplexity
from deepstow.trainer.run.order import Run
from deepstow.trainer.run.quantized import exact_again
from deepstow.trainer.run.trainer import Trainer
from deepstow.trainer.run.user_callbacks import KEY, UserCallbacks
from deepstow.trainer.tasks.task import only_language

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig

TIMEOUT_SAYS = ("Timed out waiting", "Application timeout")  # gloo
GLOO_SAYS = ("gloo/transport", *TIMEOUT_SAYS)
REPORT_S = 120.0  # how long the first rank may take to say what would fit, before the others end by themselves


class StoppedUnsaved(UserError):
    """The run was asked to stop, and the checkpoint could not be written."""

    code = ExitCode.DISK


class SaveAndStop(TrainerCallback):
    """Asks for a save when a rank was asked to stop, and ends the run after it."""

    def __init__(self, stop: Stop, trainer: Trainer, together: Agreement) -> None:
        self._stop, self._trainer, self._together = stop, trainer, together
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
        asked = [rank for rank, reason in enumerate(reasons) if reason is not None]
        rank = next((each for each in asked if reasons[each] == KEYBOARD), asked[0])
        why = f"{reasons[rank]}{f' on rank {rank}' if len(set(reasons)) > 1 else ''}"
        self._trainer.settle()
        if self._trainer.newest != f"checkpoint-{step}":
            raise StoppedUnsaved(f"{why}: ended at step {step}, which could not be saved")
        line = f"{why}: step {step} is saved, the run ends; training.resume_from_checkpoint=auto goes on from there"
        raise Stopped(line, code_of(reasons[rank]))


def refuse_unbuildable(config: RunConfig, ranks: Ranks) -> None:
    """Raise ConfigError, before anything is prepared, for options of strategies that cannot work in this run, or if
    torch has no collectives for the device, or DeepSpeed an extension that cannot be compiled.
    """
    has_engine = Requirement.DEEPSPEED in requirements_of(config.strategies)
    if (has_engine or ranks.world_size > 1) and not config.training.use_cpu:
        collectives_of(accelerator.kind() or "cpu")
    trackers.refuse(config)
    schedule.refuse(config)
    if config.training.save_on_each_node and not ranks.is_local:
        what = (
            "a checkpoint is one folder, into which the ranks of all machines write what they hold; leave it out, and"
        )
        raise config.error("training.save_on_each_node", True, f"{what} put output_dir where all machines see it")
    if has_engine:
        deepspeed_ops.refuse_what_cannot_be_built()
    check_options(config, ranks.world_size)  # from here on code that the config names runs
    metrics.refuse(config)
    UserCallbacks(config)


def run(config: RunConfig, ranks: Ranks, stop: Stop) -> int:
    """Train as ``config`` says, on this rank. All process groups are closed, whatever happens."""
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
            return _guarded(config, ranks, stop, watchdog)
    except torch.distributed.DistError as error:
        write_line(f"rank {ranks.rank}: another rank has ended while the ranks met: {first_line(error)}", sys.stderr)
        return ExitCode.PEER_DIED
    finally:
        loading.end_all()


def timeout_s(config: RunConfig) -> int:
    """How long a collective, or a sign of life, may be waited for."""
    return config.training.ddp_timeout or 1800


def _guarded(config: RunConfig, ranks: Ranks, stop: Stop, watchdog: Watchdog | None = None) -> int:
    """Run, and turn every error into lines and an exit code while the process group is open.

    A traceback refers to its frames, the frames to the engine, and the engine to its groups, so the frames are cleared
    before the groups are closed (see [Note: closing gloo] in ``trainer/distributed/ranks.py``).
    """
    seen: list[Run] = []
    try:
        with config.placing(), repeated_sums(wanted=bool(config.training.full_determinism)):
            _whole(config, ranks, stop, watchdog, seen)
        _say_end(ExitCode.FINISHED, stop)
        return ExitCode.FINISHED
    except (UserError, Stopped) as error:
        _say_end(error.code, stop)
        stop.leave()
        code = _ended(error, ranks, stop)
        traceback.clear_frames(error.__traceback__)
        return code
    except Exception as error:
        return _failed(config, seen, stop, watchdog, error)


def _say_end(code: int, stop: Stop) -> None:
    """Tell those who wait for it how the run has ended, at once: a launcher may kill while the groups are closed."""
    stop.ended.write(code)
    trackers.end(code)


def _ended(error: UserError | Stopped, ranks: Ranks, stop: Stop) -> ExitCode:
    """The exit code of an end that somebody has asked for or can mend, after it was said."""
    if isinstance(error, Raised) and ranks.world_size > 1:  # on this rank; others may not have
        write_line(f"rank {ranks.rank}: {error}", sys.stderr)
    elif isinstance(error, UserError):
        if ranks.is_first:
            report(error)
        elif error.says_more:  # a launcher ends all ranks when one has ended, and the first one still reports
            time.sleep(REPORT_S)
    elif ranks.is_first or (stop.phase is not Phase.TRAINING and error.code is not ExitCode.INTERRUPTED):
        write_line(error.line, sys.stderr)  # Ctrl-C comes to all of a terminal
    return error.code


def _failed(config: RunConfig, seen: list[Run], stop: Stop, watchdog: Watchdog | None, error: Exception) -> ExitCode:
    """The exit code of an error that is not the user's, after it was printed."""
    code, shown, asked_before = ExitCode.FAILED, True, stop.is_asked
    if (loads := loading.explained(error)) is not None:
        code, shown = loads[0], False
        write_line(loads[1], sys.stderr)
    elif isinstance(error, LayersRefusedError):
        write_line(str(error), sys.stderr)
        code, shown = ExitCode.CONFIG, False
    elif isinstance(error, DiskError):
        write_line(f"{error}; training.resume_from_checkpoint=auto goes on from the last checkpoint", sys.stderr)
        code, shown = ExitCode.DISK, False
    elif fails := disk.found(error, *disk.folders_of(config)):
        write_line(disk.line(fails, config), sys.stderr)
        code, shown = ExitCode.DISK, False
    if seen and oom.is_shortage(error):
        write_line("\n".join(oom.explain(config, seen[0].plan, error)), sys.stderr)
        code = ExitCode.OUT_OF_MEMORY
    if isinstance(error, torch.distributed.DistError) or any(said in str(error) for said in GLOO_SAYS):
        if watchdog is not None and any(said in str(error) for said in TIMEOUT_SAYS):
            where = "".join(traceback.format_exception(error))
            watchdog.tell(f"a collective has waited for {timeout_s(config)} s (training.ddp_timeout)", where)
        # The rank that failed first reports why, and the launcher ends this one, unless that rank was killed.
        stop.wait(GRACE_S)
        code, shown = ExitCode.PEER_DIED, asked_before or not stop.is_asked
        if shown and stop.phase is Phase.ENDING:
            line = f"rank {stop.ended.rank}: another rank has ended before the run was over; start it again"
            write_line(line, sys.stderr)
            shown = False
    _say_end(code, stop)
    stop.leave()
    if shown:
        traceback.print_exception(error)
    traceback.clear_frames(error.__traceback__)
    return code


def _whole(config: RunConfig, ranks: Ranks, stop: Stop, watchdog: Watchdog | None, seen: list[Run]) -> None:
    """The run from the lock on its folder to its export; nothing if it is over already. ``seen`` takes the prepared
    run, for errors that come later.
    """
    with agreement(ranks, timeout_s(config)) as together, ExitStack() as held:
        together.refuse_different({".".join(key): value for key, value in leaves((), config.tree())})
        if ranks.is_first and (line := loading.shortage(config, ranks.local_world_size)):
            write_line(line)

        def take_lock() -> str:
            refuse_folder(config)
            upload.refuse(config)
            holder = held.enter_context(lock.held(config, partial(stop.end, code=ExitCode.DISK)))
            stop.ended.clear()
            return holder

        stop.ended.lock = together.on_first(ranks.rank, take_lock)
        resumed = resuming.decide(config, ranks)
        over = together.on_first(
            ranks.rank, lambda: finished.before(config, resumed.found, resumed.changed) if resumed else None
        )
        left = over is not None and together.on_first(ranks.rank, lambda: further.missing(config))
        if over is not None and not left:
            together.be_patient()
            if resumed is not None and resumed.places:  # what is there may be another run's
                order.opened(config, ranks, resumed)
            if ranks.is_first:
                write_line(over)
        else:
            seen.append(order.prepare(config, ranks, resumed))
            seen[0].over = over
            train(seen[0], stop, together, watchdog)
            export_further(seen[0], together)
        together.on_first(ranks.rank, lambda: publish(config))  # where all ranks meet, before any says that it is over
        if ranks.is_first:
            write_line(following(config))


def show_sample(config: RunConfig) -> None:
    """Print one tokenised row of the training data, with its trained and its masked tokens."""
    only_language(config, "--show-sample")
    words, prepared = order.read_data(config, Ranks(), quiet=True)
    print(sample.render(prepared, words, colour=sys.stdout.isatty()))


def show_data(config: RunConfig, path: Path | None) -> None:
    """Print what became of the rows, with a histogram of their lengths; draw it into ``path``."""
    only_language(config, "--data-report")
    _, prepared = order.read_data(config, Ranks(), quiet=True)
    found = prepared.report
    if found is None:
        why = "data.streaming: nothing is read ahead of training, so there is no report"
        raise ConfigError(f"{why}; data.streaming=false writes one")
    write_line(data_report.text(found))
    if path is not None:
        try:
            picture.save(data_report.draw(found), path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plot {path}: {error}") from None


def train(run: Run, stop: Stop, together: Agreement, watchdog: Watchdog | None) -> None:
    """Train and finish."""
    together.on_first(run.ranks.rank, lambda: trackers.start(run.config))
    together.on_first(run.ranks.rank, lambda: upload.repository(run.config))
    with shown_by(run.applied.append) if run.ranks.is_first else nullcontext():
        _train(run, stop, together, watchdog)


def _train(run: Run, stop: Stop, together: Agreement, watchdog: Watchdog | None) -> None:
    """The trainer is a local variable, so that it is freed with this frame."""
    trainer = order.make_trainer(run)
    trainer.add_callback(SaveAndStop(stop, trainer, together))
    trainer.callback_handler.callbacks.insert(0, Begin(run, together))  # before TensorBoard's, which makes files
    if watchdog is not None:
        trainer.add_callback(Watched(watchdog))
    checkpoint = str(run.resumed.path) if run.resumed is not None else None
    if checkpoint is not None:
        run.say(f"resuming from {checkpoint}")
    if run.config.training.save_strategy != "no":
        estimate = saving.estimated_bytes(run.plan, adapters=run.config.model.lora is not None)
        if shortage := saving.shortage(run.folder, estimate):
            run.say(f"{shortage}: training goes on without a checkpoint until there is space")
    try:
        with loading.watched(run.config, timeout_s(run.config), partial(stop.end, code=ExitCode.WATCHDOG)):
            with keeping(run):
                trainer.train(resume_from_checkpoint=checkpoint)
            stop.phase = Phase.ENDING
            together.be_patient()
            finish(run, trainer, together)
    finally:
        trainer.accelerator.free_memory()  # ends DeepSpeed's engine
        del trainer
        gc.collect()


@contextmanager
def keeping(run: Run) -> Iterator[None]:
    """Inside, a callback of the config that raises is told with the checkpoint that stands."""
    try:
        yield
    except Raised as error:
        kept = "training.resume_from_checkpoint=auto goes on from the last checkpoint"
        if run.ranks.world_size == 1:  # else the first rank may still be sealing one
            found = checkpoints.complete(run.folder) if run.folder.is_dir() else []
            kept = f"{found[-1].path} is the last checkpoint" if found else "there is no checkpoint yet"
        error.rewrite(lambda line: f"{KEY} = {line}; {kept}")
        raise


class CannotExport(UserError):
    """The disk does not take the export."""

    code = ExitCode.DISK


@contextmanager
def exporting(run: Run) -> Iterator[None]:
    """Inside, an error of the disk is a CannotExport."""
    try:
        yield
    except Exception as error:
        if (fails := disk.found(error, run.folder)) is None:
            raise
        raise CannotExport(disk.line(fails, run.config, doing="export: ", lost="no export was made: ")) from error


def finish(run: Run, trainer: Trainer, together: Agreement) -> None:
    """Evaluate if the last step was not evaluated, export, check the export, and print where everything is."""
    step, log = trainer.state.global_step, trainer.state.log_history
    if run.prepared.eval is not None and not any("eval_loss" in record and record["step"] == step for record in log):
        trainer.evaluate()
    with_exchange = trainer.loss_as_trained() if run.prepared.eval is not None else None
    folder = run.folder
    if run.over is not None:
        run.say(run.over)
        return

    def make_way() -> dict[str, Any]:
        with exporting(run):
            if trainer.mounted is not None:
                trainer.mounted.refuse_other()
            about = finished.about(run.config, step, *trainer.origin())
            make_room(run.config)
            return about

    about = together.on_first(run.ranks.rank, make_way)
    exact_again(trainer.model, run.config)
    smaller = run.smaller.folder if run.smaller is not None else None
    with exporting(run):
        callbacks = run.user_callbacks.sentence() if run.user_callbacks else ""
        receipt = export.export(trainer, run.tokenizer, run.config, about, smaller, callbacks)
    if not run.ranks.is_first:
        return
    if len(history := [record for record in log if "eval_loss" in record]) > 1:
        key = next((name for name in SAID if f"eval_{name}" in history[0]), "loss")
        ends, digits = (history[0], history[-1]), 1 if key == SAID[0] else 3
        first, last = (f"{each[f'eval_{key}']:.{digits}f} at step {each['step']}" for each in ends)
        write_line(f"{key} {first} -> {last}")
    if with_exchange is not None:
        exact = next(record["eval_loss"] for record in reversed(log) if "eval_loss" in record)
        pairs = [f"{each:.4f} (perplexity {perplexity(each):.1f})" for each in (exact, with_exchange)]
        write_line(f"held-out loss {pairs[0]} with exact sums, {pairs[1]} with strategies.tensor.exchange")
    assert receipt is not None
    write_line(
        f"export: {folder / 'export'} ({human(receipt.num_bytes)}), {of_best(run.config, trainer.state, '{}, ')}"
        f"reloaded: {receipt.num_tensors} tensors, names and shapes equal, largest difference of a logit "
        f"{receipt.largest_difference:.1e}"
    )
    if said := attention.sentence(run.config.model):
        write_line(f"export: {said}")
    write_line(f"run folder: {folder} (plan.txt, metrics.jsonl, config.yaml, checkpoints)")
    if "tensorboard" in run.config.training.report_to:
        write_line(f"curves:     tensorboard --logdir {folder}")


def following(config: RunConfig) -> str:
    """What to type next: to talk to the export, or to read how else it is used."""
    folder = Path(config.training.output_dir)
    talks = config.chosen_task.generates and not config.model.trust_remote_code and not config.model.attention_mask
    command = f"deepstow chat {quote(str(folder))}" if talks else "deepstow docs use"
    return f"next:       {command}{', or deepstow train --config finetune' * (folder == Path('runs/quickstart'))}"


def make_room(config: RunConfig) -> None:
    """Move an export that is there aside, with all that was made of it. May raise OSError."""
    folder = Path(config.training.output_dir)
    aside = earlier.move_aside(earlier.exports(folder), folder, overwrite=config.training.overwrite)
    if aside is not None:
        write_line(f"the export of before is now in {aside}")


def export_further(run: Run, together: Agreement) -> None:
    """Make what else the config exports, on the first rank, once training has left the device."""
    if run.config.quantize is None and run.config.export is None:
        return
    budget = budget_of(run.config, run.plan)
    work = partial(further.make, run.config, run.tokenizer, run.prepared.eval, budget)
    together.on_first(run.ranks.rank, work)


def publish(config: RunConfig) -> None:
    """Upload the export if the config says so; on the first rank."""
    if line := upload.upload(config):
        write_line(line)

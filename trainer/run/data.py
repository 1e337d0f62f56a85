"""The tokenizer and the rows of a run: opened by all ranks, or shown without a run."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data import prepare as preparing
from deepstow.trainer.data import report, sample
from deepstow.trainer.data import rows as task_rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.data.prepare import Prepared
from deepstow.trainer.distributed.agreement import first_then_all
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, write_line, write_nothing
from deepstow.trainer.formats.format import FORMATS
from deepstow.trainer.model import contents
from deepstow.trainer.model.build import config_of
from deepstow.trainer.planning import picture
from deepstow.trainer.run import inputs
from deepstow.trainer.run.checkpoints.resuming import Resumed
from deepstow.trainer.run.checks import Before, check
from deepstow.trainer.tasks.task import only_language


def opened(config: RunConfig, ranks: Ranks, resumed: Resumed | None) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """Tokenizer and data. A run that is resumed is refused here, with ConfigError, if it would read other contents than
    the checkpoint's. A collective.
    """
    tokenizer_and_data = first_then_all(ranks, lambda: read_data(config, ranks, resumed, quiet=not ranks.is_first))
    if resumed is not None:
        inputs.compare(config, ranks, resumed)
    return tokenizer_and_data


def read_data(
    config: RunConfig, ranks: Ranks, resumed: Resumed | None = None, *, quiet: bool
) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """The tokenizer and the tokenised data, made now or found in the run's folder. Raise DataError if it cannot be
    trained on, and ConfigError if the tokenizer cannot be used, or the run resumes one with other contents.
    """
    section, folder = config.model, Path(config.training.output_dir)
    hf_config = config_of(config)
    check(Before.ROWS, config=config, model=hf_config)
    task = config.chosen_task
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
    seed = config.training.seed
    home = preparing.cache(folder / "data")
    compares = ranks.is_first_local
    if not task.language:
        return words, task_rows.prepare(task, config, words, hf_config, home, say, opened, compares=compares)
    prepared = preparing.prepare(config.data, words, rows, seed, home, say, opened, compares=compares)
    if task.plain and not prepared.plain:
        plain_formats = " and ".join(form.name for form in FORMATS.values() if form.plain)
        what = f"the rows are {prepared.format}, and {task.name} takes {plain_formats}; write sft"
        raise config.error("task", config.task, what)
    if prepared.chat_template is not None:
        words.chat_template = prepared.chat_template  # the exported model is talked to as it was trained
    return words, prepared


def show_sample(config: RunConfig) -> None:
    """Print one tokenised row of the training data, with its trained and its masked tokens."""
    only_language(config, "--show-sample")
    words, prepared = read_data(config, Ranks(), quiet=True)
    print(sample.render(prepared, words, colour=sys.stdout.isatty()))


def show_data(config: RunConfig, path: Path | None) -> None:
    """Print what became of the rows, with a histogram of their lengths; draw it into ``path``."""
    only_language(config, "--data-report")
    _, prepared = read_data(config, Ranks(), quiet=True)
    data_report = prepared.report
    if data_report is None:
        why = "data.streaming: nothing is read ahead of training, so there is no report"
        raise ConfigError(f"{why}; data.streaming=false writes one")
    write_line(report.text(data_report))
    if path is not None:
        try:
            picture.save(report.draw(data_report), path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plot {path}: {error}") from None

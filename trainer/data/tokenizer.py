"""The tokenizer: loaded, or trained on the run's own texts.

A trained one is byte-level BPE, so every text can be encoded; training is deterministic. It is saved in the run's
folder and opened from there, so a resumed run and every other rank read the same file; a damaged one is trained again.
Its manifest names the texts: a fresh run on other ones trains another, beside it. A run that is resumed keeps the one
that its model has learned, which is compared with the checkpoint's where rows are made.
Its chat template ends every turn with eos, so that generation stops there, and marks the assistant's turns for
``data.assistant_only_loss``. A tokenizer without a pad token gets eos; the collator masks padding, and not eos.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deepstow.strategies.state.commit import added_folder
from deepstow.strategies.state.sealed import Damaged, digest_of, intact, read, seal
from deepstow.trainer.data.templates import CHATML
from deepstow.trainer.errors import ConfigError, DataError, first_line
from deepstow.trainer.model import folder as folder_of_model
from deepstow.trainer.model import hub

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import TrainTokenizer

KIND = "tokenizer"  # in its manifest
FILES = ("tokenizer*", "vocab*", "*.model")  # one of them is there where a tokenizer was saved
PAD = "<|pad|>"
EOS = "<|eos|>"
TURN = "<|im_start|>"


def load(
    spec: str | TrainTokenizer | None,
    name_or_path: str | None,
    trust_remote_code: bool,
    folder: Path,
    texts: Iterable[str],
    mark: Callable[[], str] = str,
    *,
    resumes: bool = False,
) -> PreTrainedTokenizerBase:
    """The run's tokenizer, with a pad token: that of the model, of ``spec``, or one trained on ``texts``, which
    ``mark`` identifies. ConfigError if there is no such tokenizer, DataError if there is no text to train on.
    """
    if spec is not None and not isinstance(spec, str):
        return trained(spec.vocab_size, folder, texts, mark(), resumes=resumes)
    name = spec or name_or_path
    if name is None:
        raise ConfigError("model.tokenizer: missing; name a tokenizer, or train one with a vocab_size")
    if Path(name).is_dir():
        folder_of_model.refuse_files(Path(name), f"model.tokenizer = {name!r}")
    try:
        options = {"trust_remote_code": trust_remote_code, **hub.options(name)}
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # hub, file, format and remote-code errors have no common type
        if Path(name).is_dir() and not any(any(Path(name).glob(files)) for files in FILES):
            what = "write the name or folder of one in model.tokenizer, or save it there with save_pretrained"
            raise ConfigError(f"model.tokenizer: the folder {name} holds no tokenizer; {what}") from None
        raise ConfigError(f"model.tokenizer: {name} cannot be loaded: {first_line(error)}") from None
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(f"model.tokenizer: {name} has neither a pad nor an eos token; padding needs one")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def trained(
    vocab_size: int, folder: Path, texts: Iterable[str], mark: str = "", *, resumes: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder/tokenizer``; trained first if there is none of this size, or smaller on small data, of
    the texts with this ``mark``. Another one is an earlier run's, and stays.
    """
    about = {"vocab_size": vocab_size, "texts": mark}
    home, about = _home(folder, about, resumes=resumes)
    if not intact(home, KIND, about):
        fresh = _train(vocab_size, texts)
        if home.exists() and not intact(home, KIND, about):  # another rank may have finished meanwhile
            shutil.rmtree(home)
        with added_folder(home) as draft:
            fresh.save_pretrained(draft)
            seal(draft, KIND, about)
    try:
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(home)
    except Exception as error:  # they have no common type; the files were whole just now
        raise OSError(f"{home} cannot be read: {first_line(error)}") from error
    return tokenizer


def _home(folder: Path, request: dict[str, Any], *, resumes: bool) -> tuple[Path, dict[str, Any]]:
    """Where the tokenizer that is asked for is, or will be, and what its manifest says; that of a run which is resumed
    may be of other texts, or of a release that named none.
    """
    manifests = {}
    for home in (folder / "tokenizer", *sorted(folder.glob("tokenizer-*"))):
        with suppress(Damaged):
            manifests[home] = dict(read(home, KIND).about)
    for home, about in manifests.items():
        if about == request:
            return home, request
    for home, about in manifests.items():
        if resumes and about.get("vocab_size") == request["vocab_size"]:
            return home, about
    usual = folder / "tokenizer"
    return (folder / f"tokenizer-{digest_of(request)[:8]}" if usual in manifests else usual), request


def _train(vocab_size: int, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    remaining = iter(texts)
    first = next(remaining, None)
    if first is None:
        raise DataError("model.tokenizer: the data holds no text to train a tokenizer on; name a tokenizer")
    bpe.train_from_iterator(itertools.chain([first], remaining), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=EOS)
    tokenizer.chat_template = CHATML
    return tokenizer

"""Talk to what a run has exported: a causal language model, or adapters on their base.

Nothing of a folder is believed, as where a run loads one (``trainer/model/folder.py``): no code that comes with a model
runs, no pickle is opened, its template renders within bounds, and what it writes moves no cursor. Everything that can
be known from small files is refused before any weight is read: what is no language model, or does not fit the device.

Without a template the model continues what is typed, each time anew.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS
from transformers.utils import logging as transformers_logging

from deepstow.strategies.core.install import needs
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.config.sections import QuantizationSection
from deepstow.trainer.data import bounds
from deepstow.trainer.distributed.exit_file import NAME as EXIT
from deepstow.trainer.distributed.exit_file import code_in
from deepstow.trainer.errors import MEANINGS, ConfigError, UserError, first_line, let_go, printable_lines
from deepstow.trainer.machine.probe import host_memory
from deepstow.trainer.model import folder as files
from deepstow.trainer.model import hub, quantise
from deepstow.trainer.planning.positions import declared
from deepstow.trainer.run.checkpoints.finished import NAME

ELSE = "deepstow docs use says how else to use a model"
OF_RUNS = ("config.yaml", "plan.txt", "metrics.jsonl")  # one of them is in the folder of a run
OF_CHECKPOINTS = "manifest.json"
BESIDE = 1.1  # memory that answering takes, over that of the weights
Message = dict[str, Any]


class Place(NamedTuple):
    """The folder of a model, or of adapters, and then the name or folder of their ``base``."""

    folder: Path
    base: str | None = None

    @property
    def model(self) -> str:
        """What has the weights of the model."""
        return self.base or str(self.folder)

    @property
    def quantized(self) -> dict[str, Any]:
        """How the run has quantised the base of its adapters, by its config; empty if it did not."""
        config = self.folder.parent / OF_RUNS[0]
        if self.base is None or self.folder.name != NAME or not config.exists():
            return {}
        try:
            section = yaml.safe_load(config.read_bytes())["model"].get("quantization_config")
        except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{config}: cannot be read: {first_line(error)}") from None
        return dict(section) if isinstance(section, dict) else {}


def place_of(path: Path) -> Place:
    """What can be talked to in ``path``: a run, its export, or any saved model. Raise ConfigError if nothing can."""
    if not path.is_dir():
        raise ConfigError(f"{path}: is a file; name the folder of a run, or of its export")
    if (path / files.CONFIG).exists():
        return Place(path)
    if (path / files.OF_ADAPTERS).exists():
        return Place(path, _base_of(path))
    if (path / NAME).is_dir():
        return place_of(path / NAME)
    if any((path / name).exists() for name in OF_RUNS):
        raise ConfigError(f"{path}: {_unfinished(path)}")
    if (path / OF_CHECKPOINTS).exists():
        raise ConfigError(f"{path}: is a checkpoint, from which training goes on; its run exports a model at its end")
    raise ConfigError(f"{path}: holds no run and no model ({files.CONFIG}, or {files.OF_ADAPTERS})")


def _unfinished(run: Path) -> str:
    """Why a run has no export, and how it gets one."""
    code, ranks = code_in(run), 1
    if code is None:
        ended = "it has not ended, or was killed"
    else:
        ended = MEANINGS.get(code, f"it ended with exit code {code}")
        ranks = json.loads((run / EXIT).read_bytes()).get("ranks")
    several = f" --ranks {ranks}" if isinstance(ranks, int) and ranks > 1 else ""
    command = f"deepstow train{several} --config {run / OF_RUNS[0]}"
    how = f"{command} training.resume_from_checkpoint=auto goes on with it"
    return f"the run has no export, which it makes at its end: {ended}; {how}"


def _base_of(folder: Path) -> str:
    """The base that adapters name. Raise ConfigError for what is not LoRA's, or names code."""
    file = f"{folder}: {files.OF_ADAPTERS}"
    files.refuse_files(folder, str(folder))
    try:
        adapter_config = json.loads((folder / files.OF_ADAPTERS).read_bytes())
        base, kind = adapter_config["base_model_name_or_path"], adapter_config["peft_type"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: describes no adapters: {first_line(error)}") from None
    if kind != "LORA" or adapter_config.get("megatron_config"):  # peft would import a module that it names
        raise ConfigError(f"{file}: deepstow chat opens plain LoRA adapters (peft_type LORA); {ELSE}")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{file}: base_model_name_or_path must name the model that the adapters are for")
    if not (folder / "adapter_model.safetensors").exists():
        raise ConfigError(f"{folder}: holds no adapter_model.safetensors; pickles are not opened")
    return base


@contextmanager
def _saying(place: object) -> Iterator[None]:
    """Inside, errors about the key of a config are about what was named on the command line."""
    try:
        yield
    except ConfigError as error:
        error.rewrite(lambda line: line.replace(f"model.name_or_path = {str(place)!r}", str(place)))
        raise


def model_in(place: Place) -> PretrainedConfig:
    """The configuration of the model. Raise ConfigError for one that is damaged, brings code, or continues no text."""
    name = place.model
    with _saying(name):
        files.refuse_weights(name)
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in (files.WHOLE, files.INDEX)):
        raise ConfigError(f"{name}: its weights are pickles, which are not opened; save them as safetensors; {ELSE}")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name, **_options(name))
    except Exception as error:  # of files, formats, the hub and code, which have no common type
        if "trust_remote_code" in str(error):
            raise ConfigError(f"{name}: the model brings its own Python code, which is not run here; {ELSE}") from None
        raise ConfigError(f"{name}: {_unreadable(name, error)}") from None
    kinds = config.architectures or []
    if config.model_type not in LANGUAGE_MODELS or not set(kinds) <= {*LANGUAGE_MODELS.values()}:
        raise ConfigError(f"{name}: {', '.join(kinds) or config.model_type} continues no text; {ELSE}")
    if getattr(config, "trained_attention_mask", None):
        raise ConfigError(f"{name}: was trained with model.attention_mask, without which it is another model; {ELSE}")
    return config


def _unreadable(name: str, error: Exception) -> str:
    if Path(name).exists():
        return f"cannot be loaded: {first_line(error)}"
    return f"the base is neither a folder here nor in reach on the Hugging Face hub: {first_line(error)}"


def _options(name: str) -> dict[str, bool]:
    return {"trust_remote_code": False, **hub.options(name)}  # not set, Transformers asks on the terminal


def device_for(place: Place, name: str | None) -> torch.device:
    """The device to answer on. Raise ConfigError if there is no such one, or it has too little memory."""
    try:
        device = accelerator.device_of(name)
    except ValueError as error:  # which says what there is
        raise ConfigError(f"--device {name}: {str(error).partition(': ')[2]}") from None
    except RuntimeError:
        raise ConfigError(f"--device {name}: is no device that torch knows, as cpu, cuda or cuda:1") from None
    folders = [Path(place.model), place.folder]
    size = sum(path.stat().st_size for folder in {*folders} if folder.is_dir() for path in folder.glob("*.safetensors"))
    size //= 3 if place.quantized.get("load_in_4bit") else 1  # of 16 bits a quarter, but embedding and head are whole
    free = host_memory().available_bytes if device.type == "cpu" else torch.accelerator.get_memory_info(device)[0]
    if size * BESIDE > free:
        what = f"{place.model}: takes {human(int(size * BESIDE))} on {device}, of which {human(free)} are free"
        raise ConfigError(f"{what}; {'another --device, or ' if device.type != 'cpu' else ''}{ELSE}")
    return device


class Streamed(TextStreamer):
    """Prints an answer as it is made, without what could move the cursor, and keeps it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """A part of the answer."""
        self.text += text
        try:
            print(printable_lines(text), end="\n" if stream_end else "", flush=True)
        except OSError:
            let_go()


@dataclass
class Talk:
    """A model that answers, and what was said so far. ``temperature`` 0: the likeliest token each time."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int = 512
    temperature: float = 0.0
    messages: list[Message] = field(default_factory=list)

    @property
    def template(self) -> str | None:
        """The chat template; None if there is none."""
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError:
            return None

    def answer(self, text: str) -> None:
        """Print the answer, and keep both. Raise UserError for what cannot be answered; nothing is kept then."""
        text = text.encode("utf-8", "replace").decode()
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(messages)
        longest = declared(self.model.config) or math.inf
        room = int(min(self.max_new_tokens, longest - len(ids)))
        if not ids or room < 1:
            what = f"has {len(ids)} tokens, and the model {longest} positions" if ids else "has no tokens"
            raise ConfigError(f"what was said {what}; begin again, with less")
        streamed = Streamed(self.tokenizer)
        tokens = torch.tensor([ids], device=self.model.device)
        how = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        try:
            with torch.inference_mode():
                self.model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    generation_config=GenerationConfig(max_new_tokens=room, **self._ends, **how),
                    streamer=streamed,
                )
        except torch.OutOfMemoryError:
            raise ConfigError(f"{tokens.device} has too little memory for {len(ids)} tokens; {ELSE}") from None
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"the model cannot answer this: {first_line(error)}") from None
        if self.template is not None:
            self.messages = [*messages, {"role": "assistant", "content": streamed.text}]

    def _ids(self, messages: list[Message]) -> list[int]:
        template = self.template
        if template is None:
            return list(self.tokenizer(messages[-1]["content"])["input_ids"])
        name = "the chat template"
        bounds.refuse(name, template)
        try:
            with bounds.bounded(name):
                text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except UserError:
            raise
        except Exception as error:  # a template can raise anything
            raise ConfigError(f"{name} cannot write this: {first_line(error)}") from None
        return list(self.tokenizer(str(text), add_special_tokens=False)["input_ids"])

    def __post_init__(self) -> None:
        """Of what a folder says of generation only the tokens that end an answer count, and the tokenizer's."""
        of_model = self.model.generation_config.eos_token_id
        candidates = (*(of_model if isinstance(of_model, list) else [of_model]), self.tokenizer.eos_token_id)
        ends = sorted({token for token in candidates if isinstance(token, int)})
        padding = self.tokenizer.pad_token_id
        self._ends = {"eos_token_id": ends or None, "pad_token_id": min(ends) if padding is None and ends else padding}
        self.model.generation_config = GenerationConfig()


def opened(place: Place, device: torch.device) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model on its device, and its tokenizer. Raise ConfigError for what cannot be loaded as it should."""
    tokens = place.folder if (place.folder / "tokenizer_config.json").exists() else Path(place.model)
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # libraries speak of themselves while they are imported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _opened(place, tokens, device)
    finally:
        logging.disable(logging.NOTSET)


def _opened(place: Place, tokens: Path, device: torch.device) -> tuple[Any, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(tokens), **_options(str(tokens)))
    except Exception as error:
        raise ConfigError(f"{tokens}: holds no tokenizer that can be loaded: {first_line(error)}") from None
    try:
        kind: Any = AutoModelForCausalLM
        how: dict[str, Any] = {"dtype": "auto"}
        if place.quantized:  # as it was trained
            section = QuantizationSection.model_validate(place.quantized)
            how = {"quantization_config": quantise.config_of(section), "device_map": {"": device}}
        model, loading_info = kind.from_pretrained(
            place.model, use_safetensors=True, output_loading_info=True, **how, **_options(place.model)
        )
        if missing := sorted(loading_info["missing_keys"]):
            raise ConfigError(f"{place.model}: has no weights for {len(missing)} tensors of the model: {missing[0]}")
        if place.base is not None:
            model = _adapted(model, place)
        return (model if place.quantized else model.to(device)).eval(), tokenizer
    except ConfigError:
        raise
    except torch.OutOfMemoryError:
        raise ConfigError(f"{place.model}: {device} has too little memory; {ELSE}") from None
    except Exception as error:
        raise ConfigError(f"{place.model}: cannot be loaded: {first_line(error)}") from None


def _adapted(model: Any, place: Place) -> Any:
    """``model`` with the adapters of ``place``."""
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError:
        raise ConfigError(f"{place.folder}: {needs('peft', 'lora')}") from None
    try:
        adapted = PeftModel.from_pretrained(model, str(place.folder))
        with safe_open(place.folder / "adapter_model.safetensors", "pt") as file:
            absent = sorted(get_peft_model_state_dict(adapted).keys() - set(file.keys()))
    except Exception as error:
        raise ConfigError(f"{place.folder}: cannot be loaded: {first_line(error)}") from None
    if absent:
        raise ConfigError(f"{place.folder}: has no weights for {len(absent)} tensors of its adapters: {absent[0]}")
    return adapted

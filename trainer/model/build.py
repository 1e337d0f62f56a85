"""Build the model: from the hub or a folder, or from a config with random weights.

Weights exist once: a model with random weights is built on the meta device and filled in place, and Transformers
streams a saved one's safetensors into it. With ZeRO stage 3 each parameter is split over the ranks as soon as its
module exists, and filled while it is gathered.

Random weights depend on the seed alone, not on the strategy: construction draws no random numbers, and the one place
that does (``initialize_weights``) starts from the seed under every stage.

A key-value cache is useless in training, so ``config.use_cache`` is False on every config and model from here. Its
original value is kept in the model as ``own_use_cache`` and written into the export.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deepstow.strategies.core.install import needs
from deepstow.trainer.errors import ConfigError, first_line, nearest, nearest_file
from deepstow.trainer.model import adapters, attention, folder, hub, quantise
from deepstow.trainer.model.adapters import OURS
from deepstow.trainer.tasks.task import LANGUAGE, WITH_HEAD, Task, loaded

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from deepstow.trainer.config.sections import LoraSection, ModelSection, RunConfig

logger = logging.getLogger(__name__)
HEADS = re.compile("For(Sequence|Token)Classification")
REMOTE_CODE = (
    "model.trust_remote_code = true: Python files that come with the model will be executed on this machine, with "
    "your rights; set it only for repositories you have read"
)


def load_config(section: ModelSection, vocab_size: int | None = None) -> PretrainedConfig:
    """The Hugging Face config of the model, for training; ``vocab_size`` is used if the config has none. ConfigError:
    unknown ``model_type``, a folder or name that holds no config, remote code that is not allowed.
    """
    config = _own_config(section, vocab_size)
    config.use_cache = False
    return config


def config_of(config: RunConfig) -> PretrainedConfig:
    """The configuration of the model that is trained. ConfigError: there is none, or a recipe cannot change it so."""
    tokenizer = config.model.tokenizer
    trained = None if tokenizer is None or isinstance(tokenizer, str) else tokenizer  # which is yet to be
    hf_config = load_config(config.model, None if trained is None else trained.vocab_size)
    for recipe in config.switched_on:
        hf_config = recipe.model_config(hf_config, config)
    return hf_config


def _own_config(section: ModelSection, vocab_size: int | None) -> PretrainedConfig:
    """The config as the user, the architecture or the saved model define it."""
    from transformers import AutoConfig

    refuse_missing_folder(section)
    try:
        if section.config is not None:
            folder.refuse_config(section.config, "model.config.")
            options = dict(section.config)
            if vocab_size is not None:
                options.setdefault("vocab_size", vocab_size)
            config = AutoConfig.for_model(options.pop("model_type"), **options)
        else:
            assert section.name_or_path is not None, "exactly one of config and name_or_path is set"
            name, trusted = section.name_or_path, section.trust_remote_code
            folder.refuse(name)
            config = AutoConfig.from_pretrained(name, trust_remote_code=trusted, **hub.options(name))
        config.get_text_config().to_dict()  # a key may have taken the place of what a class has
    except ConfigError:
        raise
    except Exception as error:  # a class may do anything with values that it does not expect
        raise ConfigError(_refused(section, error)) from None
    saved = bool(section.name_or_path and HEADS.search("".join(config.architectures or ())))
    labels = section.labels
    if section.problem_type is not None:
        config.problem_type = section.problem_type
        if labels is None and section.problem_type == "regression" and not (saved or _names_labels(section)):
            labels = ["score"]
    if labels is not None:
        if saved and len(labels) != config.num_labels:
            names = ", ".join(map(str, (config.id2label or {}).values()))
            what = f"{section.name_or_path} has {config.num_labels}: {names}"
            raise ConfigError(f"model.labels = {labels}: {what}")
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in config.id2label.items()}
    return config


def _names_labels(section: ModelSection) -> bool:
    return bool({"id2label", "num_labels"} & {*(section.config or ())})


def of_head(section: ModelSection, config: PretrainedConfig) -> dict[str, Any]:
    """What a saved model has to be told to have the head of ``config``, if the section says anything about it."""
    if section.labels is None and section.problem_type is None:
        return {}
    return {name: getattr(config, name) for name in ("id2label", "label2id", "problem_type")}


def set_use_cache(config: PretrainedConfig, value: bool | None) -> None:
    """Set ``use_cache``; None removes the key, for architectures that do not have it."""
    if value is None:
        vars(config).pop("use_cache", None)
    else:
        config.use_cache = value


def refuse_missing_folder(section: ModelSection) -> None:
    """Refuse a name that can only be a folder and does not exist, instead of asking the hub for it, with six retries.

    Hub names are ``owner/name`` or ``name``. A name with more parts, with a leading dot, slash or tilde, or whose first
    part is a folder here, is a path.
    """
    name = section.name_or_path
    if name is None or Path(name).exists():
        return
    parts = Path(name).parts
    if len(parts) > 2 or name[0] in "./~" or (len(parts) == 2 and Path(parts[0]).is_dir()):
        made_by = "; deepstow train --config quickstart makes it" if name == "runs/quickstart/export" else ""
        raise ConfigError(
            f"model.name_or_path = {name!r}: there is no such folder{made_by or nearest_file(Path(name))}"
        )


def _refused(section: ModelSection, error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if section.config is not None:
        from transformers import CONFIG_MAPPING

        name = section.config["model_type"]
        if name not in CONFIG_MAPPING:
            hint = nearest(name, CONFIG_MAPPING.keys())
            return f"model.config.model_type = {name!r}: not a model type that Transformers knows{hint}"
        return f"model.config = {section.config!r}: {' '.join(lines)}"
    if "trust_remote_code" in str(error):
        return (
            f"model.name_or_path = {section.name_or_path!r}: this model brings its own Python code, which is not run "
            f"unless you set model.trust_remote_code: true"
        )
    if Path(str(section.name_or_path)).exists():
        return f"model.name_or_path = {section.name_or_path!r}: the folder holds no model ({lines[0]})"
    lead = f"model.name_or_path = {section.name_or_path!r}: there is no such folder here"
    if why := hub.unreachable():
        return f"{lead}, the cache of the Hugging Face hub has no such model, and the hub cannot be reached ({why})"
    return f"{lead}, and no such model on the Hugging Face hub can be reached ({lines[0]})"


def build(
    section: ModelSection,
    config: PretrainedConfig,
    *,
    seed: int,
    partitioned: bool,
    task: Task = LANGUAGE,
    on_meta: bool = False,
    untied: Sequence[str] = (),
) -> PreTrainedModel:
    """The model with its weights, in ``section.dtype``, on the CPU (or partitioned over the ranks).

    Args:
        seed: for random weights, which are the same bits under every strategy.
        partitioned: ZeRO stage 3 is on, and Transformers builds under ``deepspeed.zero.Init``.
        on_meta: without values, for ``parts.fill``.
        untied: of the plan's facts, see ``tying.py``.
    """
    import torch

    from deepstow.strategies.engine.tensors.quantised import keep_packing
    from deepstow.trainer.model import tying

    auto = loaded(task.model_class)
    dtype = getattr(torch, section.dtype)
    chosen = attention.options(section)
    torch.manual_seed(seed)
    model: Any
    if section.name_or_path is not None:
        if section.trust_remote_code:
            logger.warning(REMOTE_CODE)
        options: dict[str, Any] = {"dtype": dtype, **chosen, **hub.options(section.name_or_path)}
        options |= quantise.loading(section.quantization_config, section.dtype)
        options |= of_head(section, config)
        if on_meta:
            options["device_map"] = "meta"
        if untied and tying.config_says(config, task, untied):
            options[tying.KEY] = False
        model, loading = _loaded(section, auto, options, partitioned=partitioned)
        if on_meta:
            tying.untie(model, untied)
        refuse_unsaved(section, loading["missing_keys"], task)
    else:
        own_config = deepcopy(config)  # Transformers derives the model's generation config from this one
        as_given = _own_config(section, config.get_text_config().vocab_size)
        set_use_cache(own_config, getattr(as_given, "use_cache", None))
        make = partial(auto.from_config, own_config, dtype=dtype, **chosen)
        model = make() if partitioned else _without_values(make) if on_meta else _random_weights(make, seed)
        if section.quantization_config is not None:
            quantise.quantise(model, section.quantization_config)
    keep_packing(model)
    attention.write_down(section, model.config)
    attention.prepare(section, model)
    model.own_use_cache = getattr(model.config, "use_cache", None)
    model.config.use_cache = False
    if model.config.is_encoder_decoder:  # T5's decoder has a config of its own, which would keep a cache in training
        model.get_decoder().config.use_cache = False
    if section.lora is None or (task.adds_adapters and section.adapter is None):
        return cast("PreTrainedModel", model)
    return with_lora(model, section.lora, task, section.adapter)


def _loaded(section: ModelSection, auto: Any, options: dict[str, Any], *, partitioned: bool) -> tuple[Any, Any]:
    """The saved model, and what Transformers says of its loading. ConfigError: its files do not make such a model."""
    from pickle import UnpicklingError

    from safetensors import SafetensorError

    option = f"model.name_or_path = {section.name_or_path!r}"
    of_files = (
        UnpicklingError,
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ImportError,
        OSError,
    )
    try:
        model, loading = auto.from_pretrained(
            section.name_or_path,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=not partitioned,  # refused below
            **options,
        )
    except of_files as error:
        if getattr(error, "errno", None) is not None:  # of the disk
            raise
        raise ConfigError(f"{option}: its weights cannot be loaded: {first_line(error)}") from None
    if mismatched := sorted(loading["mismatched_keys"]):
        name, saved, expected = mismatched[0]
        what = f"is {tuple(saved)} in its files, and {tuple(expected)} by its config.json"
        raise ConfigError(f"{option}: {name} {what}; bring back the config that it was saved with")
    if lost := sorted(name for name in loading["missing_keys"] if re.match(r"(\w+\.)*(layers|h|blocks?)\.\d+\.", name)):
        what = f"its files have no {lost[0]}, and {len(lost)} weights of its layers would be random"
        raise ConfigError(f"{option}: {what}; bring back the config that it was saved with, or the files")
    return model, loading


def _random_weights(make: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """Build on the meta device, then allocate and initialise in place: one copy, one stream of random numbers."""
    import torch

    model = _without_values(make)
    model.to_empty(device="cpu")
    versions = {name: tensor._version for name, tensor in tensors_of(model)}
    torch.manual_seed(seed)
    forget_marks(model)
    # to_empty gave tied parameters storage of their own. They are tied after initialisation, as Transformers does it,
    # so that the embedding keeps its own draw (with a zero row for padding) and not the head's.
    model.initialize_weights()
    refuse_uninitialised(model, versions)
    model.tie_weights()
    return model


def _without_values(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    import torch

    with torch.device("meta"):
        return make()


def forget_marks(model: PreTrainedModel) -> None:
    """Let Transformers initialise what it has marked as initialised on the meta device, where nothing was drawn."""
    for marked in (*model.modules(), *model.parameters(), *model.buffers()):
        vars(marked).pop("_is_hf_initialized", None)


def refuse_uninitialised(model: PreTrainedModel, versions: Mapping[str, int]) -> None:
    """Raise ConfigError if a tensor was not written since its version was looked at."""
    unset = [name for name, tensor in tensors_of(model) if tensor._version == versions[name]]
    if unset:
        raise ConfigError(
            f"model.config.model_type = {model.config.model_type!r}: Transformers gives {len(unset)} of its tensors no "
            f"initial values ({unset[0]}, ...); start from saved weights with model.name_or_path"
        )


def refuse_lost_buffers(section: ModelSection, config: PretrainedConfig, task: Task = LANGUAGE) -> None:
    """Raise ConfigError for a saved model whose own code gives a buffer that is not saved its values in ``__init__``
    alone: Transformers builds models without values when it loads them, and such a buffer would have any.
    """
    if section.name_or_path is None or not section.trust_remote_code:
        return
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: Any = loaded(task.model_class).from_config(deepcopy(config), trust_remote_code=True)
    before = {name: (buffer, buffer._version) for name, buffer in model.named_non_persistent_buffers()}
    forget_marks(model)
    for name, tensor in tensors_of(model):  # as after loading
        tensor._is_hf_initialized = name not in before
    try:
        model.initialize_weights()
    except RuntimeError:  # it needs values of weights, so what it fills is not known
        return
    after = {name: (buffer, buffer._version) for name, buffer in model.named_non_persistent_buffers()}
    if lost := [name for name, was in before.items() if was[0] is after[name][0] and was[1] == after[name][1]]:
        raise ConfigError(
            f"model.name_or_path = {section.name_or_path!r}: its code fills {len(lost)} buffers that are not saved "
            f"({lost[0]}, ...) in __init__ alone, where Transformers has no values yet; fill them in _init_weights, too"
        )


def refuse_unsaved(section: ModelSection, missing: Collection[str], task: Task) -> None:
    """Raise ConfigError for weights that the saved model does not have, so that they are random, and that would be
    neither trained nor exported, beside adapters.
    """
    if section.lora is None or section.merges:
        return
    # peft trains these of a task with labels by itself.
    exported = {*(section.lora.modules_to_save or ()), *(("classifier", "score") if task.adapters in WITH_HEAD else ())}
    if lost := sorted({name.rpartition(".")[0] for name in missing if not exported & {*name.split(".")}}):
        raise ConfigError(
            f"model.lora: {section.name_or_path} has no weights for {', '.join(lost)}, and adapters hold none, so that "
            f"random ones would be lost; write model.lora.export: merged"
        )


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def lora_config(section: LoraSection, task: Task, adapter: str | None = None) -> LoraConfig:
    """peft's config of new adapters, or of a saved ``adapter``. ConfigError: ``peft`` is not installed."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError(f"model.lora: {needs('peft', 'lora')}") from None
    if adapter is not None:
        saved: LoraConfig = adapters.config_of(adapter, task.adapters, section.lora_dropout)
        return saved
    return LoraConfig(task_type=task.adapters, **section.model_dump(exclude_none=True, exclude=OURS))


def with_lora(
    model: PreTrainedModel, section: LoraSection, task: Task = LANGUAGE, adapter: str | None = None
) -> PreTrainedModel:
    """Add low-rank adapters to ``model``, or a saved ``adapter``, and freeze its own weights. ConfigError: ``peft`` is
    not installed, or no module matches ``target_modules``, or a quantised one is to be trained in full, or the adapter
    is not one of this model.
    """
    peft_config = lora_config(section, task, adapter)
    from peft import get_peft_model

    from deepstow.strategies.engine.tensors.quantised import is_quantised

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in (section.modules_to_save or ()) and any(map(is_quantised, module.parameters())):
            raise ConfigError(
                f"model.lora.modules_to_save = {section.modules_to_save!r}: {name} is quantised, and cannot be trained "
                f"in full; name it in model.quantization_config.llm_int8_skip_modules as well"
            )
    kinds = ("Linear", "Linear4bit", "Linear8bitLt", "Conv1D")
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if type(module).__name__ in kinds}
    try:
        with warnings.catch_warnings():  # peft reads a name that Transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", ".*base_model_name_or_path", UserWarning)  # of a base that has moved
            adapted: Any = get_peft_model(model, peft_config)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.target_modules = {section.target_modules!r}: {str(error).splitlines()[0]} "
            f"The model's linear layers are: {', '.join(sorted(linear))}"
        ) from None
    if adapter is not None:
        adapters.load(adapted, adapter)
    return cast("PreTrainedModel", adapted)  # peft's wrapper forwards all attributes to the model

"""``model.adapter``: the folder of a saved adapter that training goes on with. What it is stands in the folder, so a
config need not say it again: ``model.lora``, the base and the tokenizer are filled in from there.

Refused: what is no LoRA adapter, other values in ``model.lora`` than the saved ones, a base that is nowhere. What only
the weights show is refused where they are loaded, in ``trainer/model/adapters.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepstow.trainer.config.sections import LoraSection, RunConfig
from deepstow.trainer.config.yaml_file import Fault
from deepstow.trainer.errors import nearest_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
OPEN = ("lora_dropout", "loraplus_lr_ratio", "export")  # keys of model.lora that may differ: no weight depends on them
KEY = ("model", "adapter")


def filled(tree: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The tree with what its ``model.adapter`` says, and what is wrong with that."""
    section = tree.get("model")
    if not isinstance(section, dict) or not isinstance(section.get("adapter"), str) or not section["adapter"]:
        return tree, []
    folder, written = Path(section["adapter"]), section.get("lora")
    saved = _read(folder)
    if isinstance(saved, str):
        return tree, [Fault(KEY, section["adapter"], saved)]
    saved_lora = {name: saved[name] for name in LoraSection.model_fields if saved.get(name) is not None}
    if isinstance(saved_lora.get("target_modules"), list):
        saved_lora["target_modules"] = sorted(saved_lora["target_modules"])
    if not isinstance(written, dict):  # what else it may be is said by those who check types
        model = section if written is not None else {**section, "lora": saved_lora}
        faults = []
    else:
        changed = [name for name, value in written.items() if name not in OPEN and not _same(saved_lora, name, value)]
        faults = [Fault(("model", "lora", name), written[name], _differs(saved_lora, name, folder)) for name in changed]
        model = {**section, "lora": {**saved_lora, **written}}
    base = saved.get("base_model_name_or_path")
    if model.get("name_or_path") is None and model.get("config") is None:
        if not isinstance(base, str) or not base:
            return tree, [Fault(KEY, str(folder), f"its {CONFIG} names no base; write model.name_or_path")]
        if not Path(base).exists() and (base[0] in "./~" or base.count("/") > 1):
            return tree, [Fault(KEY, str(folder), f"its base {base} is not there; write model.name_or_path")]
        model["name_or_path"] = base
    if model.get("tokenizer") is None and (folder / "tokenizer_config.json").is_file():
        model["tokenizer"] = str(folder)
    return {**tree, "model": model}, faults


def base_of(folder: str) -> str | None:
    """The base that a saved adapter names."""
    saved = _read(Path(folder))
    return None if isinstance(saved, str) else saved.get("base_model_name_or_path")


def other_base(config: RunConfig) -> str:
    """A line if the adapter that training goes on with names another base; empty if not. Its weights fit both."""
    section = config.model
    base = base_of(section.adapter) if section.adapter is not None else None
    if base is None or section.name_or_path is None or Path(base).resolve() == Path(section.name_or_path).resolve():
        return ""
    what = f"the adapter was trained on {base}, and model.name_or_path is {section.name_or_path}"
    return f"model.adapter: {what}: on other weights it means nothing"


def _read(folder: Path) -> dict[str, Any] | str:
    """What a saved adapter says of itself, or what is wrong with it."""
    if not folder.is_dir():
        if folder.exists():
            return "is a file; name the folder that it is in"
        if str(folder) in ("lora", "qlora"):  # Axolotl's
            return (
                "is for a saved adapter; a new one is model.lora: {}, on a base in few bits model.quantization_config"
            )
        hint = (
            nearest_file(folder) or "; one on the hub has to be downloaded first (hf download NAME --local-dir FOLDER)"
        )
        return f"there is no such folder{hint}"
    try:
        saved = json.loads((folder / CONFIG).read_bytes())
    except FileNotFoundError:
        return f"the folder holds no adapter (no {CONFIG}); a whole model belongs into model.name_or_path"
    except (OSError, ValueError, RecursionError) as error:
        return f"{CONFIG} cannot be read: {str(error).partition(chr(10))[0]}"
    if not isinstance(saved, dict):
        return f"{CONFIG} must be a JSON object"
    if (peft_type := saved.get("peft_type")) != "LORA":
        return f"it is an adapter of type {peft_type}, and training goes on with LORA alone"
    if not (folder / WEIGHTS).is_file():
        what = f"the folder holds no {WEIGHTS}"
        return f"{what}, but a pickled {PICKLED}; save it once more with PEFT" if (folder / PICKLED).is_file() else what
    return saved


def _same(saved: Mapping[str, Any], name: str, wanted: Any) -> bool:
    default = LoraSection.model_fields[name].default if name in LoraSection.model_fields else wanted
    saved_value = saved.get(name, default)
    lists = isinstance(saved_value, list) and isinstance(wanted, list)
    return sorted(map(str, saved_value)) == sorted(map(str, wanted)) if lists else bool(saved_value == wanted)


def _differs(saved: Mapping[str, Any], name: str, folder: Path) -> str:
    saved_value = saved.get(name, LoraSection.model_fields[name].default)
    return f"the adapter in {folder} has {json.dumps(saved_value)}; leave it out"

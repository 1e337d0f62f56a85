"""One tiny training in a process of its own, for ``incumbent_faults.py``: started, killed at a moment, or restarted.

    python -m benchmarks.incumbents trainer|deepspeed|dcp|deepstow FOLDER DEATH

Training goes on where there is a checkpoint in FOLDER. The last line says how many steps it trained, by its forwards,
and what the weights are. DEATH is one of

- ``none``;
- ``after step 5``: SIGKILL;
- ``in the largest file``: while the checkpoint of step 4 is written, the kernel ends the process (``RLIMIT_FSIZE``,
  SIGXFSZ) at the first byte beyond three quarters of the largest file of the checkpoint before;
- ``before the last file``: SIGKILL when, for that checkpoint, the file that the system writes last is opened.

With `` over the last`` behind it, DCP saves into one folder throughout.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

TRAIN = Path(__file__).resolve().parents[1] / "launch/train.py"
STEPS, SAVE = 6, 2
NEWEST = STEPS - SAVE
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64, **SIZES}
LAST = {"trainer": "trainer_state.json", "deepspeed": "latest", "dcp": ".metadata", "deepstow": "manifest.json"}


def checkpointed(folder: Path) -> list[Path]:
    """All files of checkpoints, unfinished ones included."""
    found = (path for pattern in ("*checkpoint*", "global_step*", "latest") for path in folder.glob(pattern))
    return sorted(path for top in found for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file())


def main(what: str, folder: Path, death: str) -> None:
    """Train, or go on, in ``folder``, and print what became of it."""
    found: dict[str, Any] = {"error": None, "code": 0, "weights": None}
    trained = counted(what, folder, death)
    train: dict[str, Callable[..., Mapping[str, torch.Tensor] | int]] = {
        "trainer": with_trainer, "deepspeed": with_deepspeed, "deepstow": with_deepstow,
        "dcp": partial(with_dcp, over=death.endswith("over the last") or (folder / "checkpoint").exists()),
    }  # fmt: skip
    try:
        result = train[what](folder)
        if isinstance(result, int):
            found["code"] = result
        else:
            content = b"".join(result[name].contiguous().numpy().tobytes() for name in sorted(result))
            found["weights"] = hashlib.sha256(content).hexdigest()
    except (Exception, CheckpointException) as error:  # DCP's is no Exception
        traceback.print_exc()
        cause = [line for line in str(error).splitlines() if re.match(r"\w+Error: ", line)]  # DCP's, in its second line
        first = next((line for line in [*cause, *str(error).splitlines()] if line.strip()), "")
        found["error"] = f"{type(error).__name__}: {first.replace(str(folder), 'RUN')}"
    print("REPORT " + json.dumps({**found, "trained": len(trained)}), flush=True)


def counted(what: str, folder: Path, death: str) -> list[int]:
    """Count the forwards of training, and arrange this process's death at one of them."""
    forwards: list[int] = []

    def opened(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and LAST[what] in Path(str(details[0])).name and details[2] & os.O_ACCMODE:
            os.kill(os.getpid(), signal.SIGKILL)

    def look(module: torch.nn.Module, inputs: object) -> None:
        if type(module).__name__ != "LlamaForCausalLM" or not (module.training and torch.is_grad_enabled()):
            return
        forwards.append(len(forwards))
        if len(forwards) == (NEWEST + 2 if death == "after step 5" else NEWEST) and death != "none":
            time.sleep(1)  # a save that goes on beside training has ended then
            if death == "after step 5":
                os.kill(os.getpid(), signal.SIGKILL)
            elif death.startswith("in"):
                largest = max(path.stat().st_size for path in checkpointed(folder))
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends the process at the first byte beyond
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest * 3 // 4, largest * 3 // 4))
            else:
                sys.addaudithook(opened)

    torch.nn.modules.module.register_module_forward_pre_hook(look)
    return forwards


def load_libraries() -> None:
    """Import what takes long, once for all trainings that are forked from this process."""
    import deepspeed  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    from trainer.run import order  # noqa: F401


def model_and_tokens() -> tuple[Any, torch.Tensor]:
    """A new model, and random rows: two for each step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = {name: value for name, value in MODEL.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=300, **config))
    return model.train(), torch.randint(0, 300, (2 * STEPS, 32))


def with_trainer(folder: Path) -> Mapping[str, torch.Tensor]:
    """As in the documentation of ``resume_from_checkpoint``; exports at the end as its examples do."""
    from transformers import Trainer, TrainingArguments

    again = folder.exists()
    model, tokens = model_and_tokens()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=SAVE, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train(resume_from_checkpoint=True if again else None)
    trainer.save_model(str(folder / "export"))
    weights: Mapping[str, torch.Tensor] = model.state_dict()
    return weights


def with_deepspeed(folder: Path) -> Mapping[str, torch.Tensor]:
    """As in DeepSpeed's getting started: ``load_checkpoint`` reads ``latest``; nothing there means step 0."""
    with tempfile.NamedTemporaryFile() as meeting:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1)
        import deepspeed

        model, tokens = model_and_tokens()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        path, state = engine.load_checkpoint(str(folder))
        for step in range(state["step"] if path else 0, STEPS):
            batch = tokens[2 * step : 2 * step + 2]
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
            if (step + 1) % SAVE == 0:
                engine.save_checkpoint(str(folder), client_state={"step": step + 1})
        weights = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
        torch.distributed.destroy_process_group()
    return weights


def with_dcp(folder: Path, over: bool) -> Mapping[str, torch.Tensor]:
    """As in PyTorch's recipe, in a folder for each step; or, as the recipe has it, always in one folder."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    model, tokens = model_and_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if places := sorted(folder.glob("checkpoint*")):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        load(state, checkpoint_id=places[-1])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])  # type: ignore[arg-type]
        first = int(state["step"])  # type: ignore[call-overload]
    for step in range(first, STEPS):
        batch = tokens[2 * step : 2 * step + 2]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE == 0:
            weights, moments = get_state_dict(model, optimizer)
            place = folder / ("checkpoint" if over else f"checkpoint-{step + 1}")
            save({"model": weights, "optimizer": moments, "step": step + 1}, checkpoint_id=place)
    trained: Mapping[str, torch.Tensor] = model.state_dict()
    return trained


def with_deepstow(folder: Path) -> Mapping[str, torch.Tensor] | int:
    """As a user does, by a config file and ``launch/train.py``."""
    from safetensors.torch import load_file

    config = {
        "model": {"config": MODEL, "tokenizer": {"train": "bpe", "vocab_size": 300}},
        "data": {"path": "pydoc", "max_length": 32, "packing": True},
        "training": {
            "output_dir": str(folder), "max_steps": STEPS, "save_steps": SAVE, "per_device_train_batch_size": 2,
            "report_to": ["none"], "use_cpu": True, "resume_from_checkpoint": "auto",
        },
    }  # fmt: skip
    path = folder.parent / "config.yaml"
    path.write_text(json.dumps(config, indent=1))
    sys.argv[1:] = ["--config", str(path)]
    code = 0
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code if code else load_file(folder / "export/model.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

"""A small Llama in a folder, trained by a run of ours and by Hugging Face's Trainer, whose weights are compared."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from deepstow.trainer.config.load import load_tree
from deepstow.trainer.data import pydoc_rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.data import read_data
from tests.e2e.commands import write_jsonl

LENGTH, WORDS, STEPS = 24, 300, 6
TRAVEL = {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}, "recompute": {"policy": "full"}}
SAID: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 1e-2,
    "use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no",
}  # fmt: skip


def make_rows_and_model(home: Path) -> None:
    texts = [{"text": row["text"]} for _, row in islice(pydoc_rows.rows("labels"), 16)]
    write_jsonl(home / "rows.jsonl", texts)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1, max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(home / "model")
    tokenizers.trained(WORDS, home, (row["text"] for row in texts)).save_pretrained(home / "model")


def tree_of(home: Path, run: Path, sections: dict[str, Any], strategies: Any = None, **training: Any) -> dict[str, Any]:
    """The config of a run; ``sections`` besides those that all have, or more of ``data``."""
    return {
        "model": {"name_or_path": str(home / "model")},
        "training": {**SAID, "output_dir": str(run), **training},
        "strategies": strategies or {},
        **sections,
        "data": {"path": str(home / "rows.jsonl"), "max_length": LENGTH, **sections.get("data", {})},
    }


def ran(tree: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that a run exports."""
    assert runs.run(load_tree(tree), Ranks(), Stop()) == 0
    return load_file(Path(tree["training"]["output_dir"]) / "export" / "model.safetensors")


def rows_of(tree: dict[str, Any]) -> Any:
    """The rows that the run trains on."""
    prepared: Any = read_data(load_tree(tree), Ranks(), quiet=True)[1]
    return prepared.train


def by_the_trainer(
    model: nn.Module, folder: Path, rows: Any, callbacks: Sequence[Any] = (), **training: Any
) -> dict[str, Tensor]:
    """The weights after Hugging Face's Trainer has trained ``model`` on these rows as a run of ours does."""
    arguments = transformers.TrainingArguments(
        str(folder), **(SAID | training), remove_unused_columns=False, optim="adamw_torch_fused"
    )
    collate = Collator(0, packing=False)
    transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[*callbacks]
    ).train()
    return {name: each.detach() for name, each in model.named_parameters()}

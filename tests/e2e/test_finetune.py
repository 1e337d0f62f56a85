"""What a pretraining run exports is fine-tuned: on completions, with adapters, on chats, packed or not, streamed."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import Server, digest, metrics, write_config, write_jsonl
from tests.helpers.releases import HIGHEST_STAGE

pytestmark = pytest.mark.ranks

CHATS = [
    [
        {"role": "user", "content": f"question {i} of a chat"}, {"role": "assistant", "content": f"answer {i}"},
        {"role": "user", "content": "and then?"}, {"role": "assistant", "content": "nothing more"},
    ]
    for i in range(24)
]  # fmt: skip


def finetuning(folder: Path, pretrained: Path, data: dict[str, Any], **model: Any) -> Path:
    """A config that starts from ``pretrained`` with the tokenizer in it."""
    return write_config(
        folder,
        model={"config": None, "tokenizer": None, "name_or_path": str(pretrained), **model},
        data={"max_length": 96, **data},
        training={"learning_rate": 1e-3},
    )


def opened(export: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    assert len(tokenizer) <= model.config.vocab_size == 512
    return model


def test_completions(server: Server, pretrained: Path, tmp_path: Path) -> None:
    config = finetuning(tmp_path, pretrained, {"path": "pydoc", "name": "pairs", "limit": 40, "eval_fraction": 0.1})
    found = server.run(2, config, f"strategies.zero={{stage: {HIGHEST_STAGE}}}").check().quiet()
    summary = next(line for line in found.lines("data: train: ") if "tokens trained on" in line)
    trained, everything = (int(word.replace(",", "")) for word in summary.split("; ")[1].split(" ")[:3:2])
    assert 0 < trained < everything  # prompts are masked
    assert "[transformers]" not in found.text and "Warning" not in found.text
    opened(tmp_path / "run" / "export")
    assert digest(tmp_path / "run" / "export") != digest(pretrained)


def test_adapters_on_an_export(server: Server, pretrained: Path, tmp_path: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    rows = [{"prompt": f"question {i} of a few", "completion": f"answer {i}"} for i in range(24)]
    config = finetuning(tmp_path, pretrained, {"path": str(write_jsonl(tmp_path / "few.jsonl", rows))}, lora=lora)
    found = server.run(1, config).check().quiet()
    assert "[transformers]" not in found.text and "Warning" not in found.text, found.text
    export = tmp_path / "run" / "export"
    assert (export / "adapter_model.safetensors").is_file() and not (export / "model.safetensors").exists()
    model = opened(export)
    moved = [tensor for name, tensor in model.state_dict().items() if "lora_B" in name]
    assert len(moved) == 4 and all(tensor.abs().max() > 0 for tensor in moved)


def test_chats(server: Server, pretrained: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    config = finetuning(tmp_path, pretrained, {"path": str(data), "assistant_only_loss": True})
    server.run(1, config, "data.packing=true").check().quiet()
    shown = server.run(1, config, "--show-sample").check().quiet()
    assert shown.err == "" and shown.out.startswith("row 0 (messages): ")
    row = "".join(shown.out.splitlines()[1:-1]).replace("|", "")  # without the marks between tokens
    trained = [part.split("]", 1)[-1].strip() for part in row.split("[masked: ")[1:]]
    assert trained == ["answer 0<eos>", "nothing more<eos>", ""]
    opened(tmp_path / "run" / "export")


def test_a_stream(server: Server, pretrained: Path, tmp_path: Path) -> None:
    data = write_jsonl(
        tmp_path / "rows.jsonl", [{"text": f"row {i} of a stream" + ", long" * (i % 7)} for i in range(30)]
    )
    config = finetuning(tmp_path, pretrained, {"path": str(data), "streaming": True})
    server.run(1, config).check().quiet()
    assert [record["step"] for record in metrics(tmp_path / "run") if "loss" in record] == [1, 2, 3, 4]

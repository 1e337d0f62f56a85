"""``deepstow chat``: answers are those of the model's own ``generate``, and what cannot be talked to is one line."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import LlamaForSequenceClassification as Classifier

from deepstow.launch import chat
from deepstow.trainer.data import bounds
from deepstow.trainer.data.tokenizer import trained
from deepstow.trainer.errors import ConfigError, printable_lines
from deepstow.trainer.machine.probe import Memory
from deepstow.trainer.run.exporting import talk

TEXTS = ["a list holds items in order", "what is a list and what is it for"] * 20
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an export, whose random model writes readable nonsense."""
    run = tmp_path_factory.mktemp("chat") / "run"
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(run / "export")
    trained(300, run, TEXTS).save_pretrained(run / "export")
    (run / "config.yaml").write_text("{}")
    return run


@pytest.fixture
def export(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be spoiled."""
    return Path(shutil.copytree(saved / "export", tmp_path / "export"))


def by_hand(folder: Path, messages: list[dict[str, str]], model: Any = None) -> str:
    """What Transformers makes of a conversation, greedily."""
    words: Any = AutoTokenizer.from_pretrained(folder)
    model = model or AutoModelForCausalLM.from_pretrained(folder)
    ids = words.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    return str(words.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_answers_are_those_of_generate_and_the_talk_goes_on(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "what is a list\n\nand for what\n/new\nwhat is a list\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert chat.main([str(saved), "--max-new-tokens", "12"]) == 0
    first = by_hand(saved / "export", [{"role": "user", "content": "what is a list"}])
    spoken = [("user", "what is a list"), ("assistant", first), ("user", "and for what")]
    second = by_hand(saved / "export", [{"role": role, "content": said} for role, said in spoken])
    found = capsys.readouterr()
    assert found.out == printable_lines(f"{first}\n{second}\n{first}\n") and first != second
    assert found.err == f"{saved}/export on cpu: {chat.HOW}\n"


def test_adapters_answer_on_their_base(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "export")
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    for name, each in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.5)
    adapted.save_pretrained(str(tmp_path))
    assert chat.main([str(tmp_path), "--prompt", "what is a list", "--max-new-tokens", "12"]) == 0
    asked = [{"role": "user", "content": "what is a list"}]
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved / "export"), tmp_path)
    wanted = by_hand(saved / "export", asked, reloaded.merge_and_unload())
    assert capsys.readouterr().out == printable_lines(f"{wanted}\n")
    assert wanted != by_hand(saved / "export", asked)


def test_adapters_of_a_run_answer_on_the_base_in_4_bits_that_they_were_trained_on(saved: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "export")
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    adapted.save_pretrained(str(tmp_path / "export"))
    (tmp_path / "config.yaml").write_text("model: {quantization_config: {load_in_4bit: true}}")
    place = talk.place_of(tmp_path)
    model, _ = talk.opened(place, torch.device("cpu"))
    weights = {type(each).__name__ for name, each in model.named_parameters() if "q_proj.base_layer" in name}
    assert weights == {"Params4bit"}


def test_adapters_that_lack_a_tensor_are_refused(saved: Path, tmp_path: Path) -> None:
    """They would answer as if that had not been trained."""
    base = AutoModelForCausalLM.from_pretrained(saved / "export")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"has no weights for 1 tensors of its adapters"):
        talk.opened(talk.place_of(tmp_path), torch.device("cpu"))


def test_without_a_template_the_text_is_continued(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (export / "chat_template.jinja").unlink()
    assert chat.main([str(export), "--prompt", "what is a list", "--max-new-tokens", "12"]) == 0
    words: Any = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    out = model.generate(**words("what is a list", return_tensors="pt"), max_new_tokens=12, do_sample=False)
    given = len(words("what is a list")["input_ids"])
    found = capsys.readouterr()
    assert found.out == printable_lines(words.decode(out[0, given:], skip_special_tokens=True)) + "\n"
    assert found.err == f"{chat.NO_TEMPLATE}\n"


def test_what_a_model_writes_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    talk.Streamed(None).on_finalized_text("a\x1b[2Jb\n", stream_end=True)
    assert capsys.readouterr().out == "a\\x1b[2Jb\n\n"


def config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def adapters(folder: Path, **changes: Any) -> None:
    (folder / "config.json").unlink()
    about = {"peft_type": "LORA", "base_model_name_or_path": "no/such-base"} | changes
    (folder / "adapter_config.json").write_text(json.dumps(about))


def unfinished(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    (folder / "exit.json").write_text('{"code": 10, "ranks": 2}')


def classifies(folder: Path) -> None:
    Classifier(LlamaConfig(**SIZES)).save_pretrained(folder)


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


CODE = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shutil.rmtree, ": there is no such folder"),
        (lambda folder: (folder / "config.json").unlink(), ": holds no run and no model (config.json, or adapter_con"),
        (unfinished, ": the run has no export, which it makes at its end: asked to stop, and saved wher"),
        (classifies, ": LlamaForSequenceClassification continues no text; deepstow docs use says how else to use a m"),
        (lambda folder: config(folder, **CODE), ": the model brings its own Python code, which is not run here; deep"),
        (pickled, ": its weights are pickles, which are not opened; save them as safetensors; deepstow docs use says"),
        (lambda folder: (folder / "config.json").write_text("{"), ": config.json is no JSON: Expecting property name"),
        (lambda folder: config(folder, num_hidden_layers=3), ": has no weights for 9 tensors of the model: model.la"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), ": holds no tokenizer that can be loaded: "),
        (lambda folder: adapters(folder, megatron_config={}), ": holds no adapter_model.safetensors; pickles are no"),
        (lambda folder: adapters(folder, megatron_config={"a": 1}), ": adapter_config.json: deepstow chat opens pla"),
        (lambda folder: adapters(folder, peft_type=None), ": adapter_config.json: deepstow chat opens plain LoRA ad"),
    ],
)  # fmt: skip
def test_what_cannot_be_talked_to_is_one_line(
    export: Path, spoil: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(export)
    assert chat.main([str(export), "--prompt", "hello"]) == 2
    found = capsys.readouterr()
    assert spoil is not unfinished or f"deepstow train --ranks 2 --config {export}/config.yaml training.re" in found.err
    assert found.err.startswith(f"{export}{said}") and found.err.count("\n") == 1 and not found.out


def test_too_large_too_long_and_no_such_device(
    saved: Path, export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert chat.main([str(export), "--prompt", "hello", *words]) in (2, 3)
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix(str(export))

    assert refused("--device", "cuda:7") == "--device cuda:7: this machine has cpu"
    assert refused("--device", "gpu").startswith("--device gpu: is no device that torch knows")
    assert refused("--prompt", "a list " * 99).startswith("what was said has ")
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    (export / "chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}"
    )
    assert refused().startswith("the chat template: one conversation takes over ")
    monkeypatch.setattr(talk, "host_memory", lambda: Memory(1000, 1000))
    assert refused().startswith(": takes ") and "on cpu, of which 1000 B are free" in refused()

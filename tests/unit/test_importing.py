"""Configs of other frameworks, with the keys of their own examples: what of ours they become, and what is named."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstow.launch import cli, import_config
from deepstow.trainer.config.check import check
from deepstow.trainer.config.importing import datasets
from deepstow.trainer.config.importing.draft import Draft, differs
from deepstow.trainer.config.importing.finish import imported
from deepstow.trainer.config.importing.read import NAMES, Source, read_all
from deepstow.trainer.config.importing.rules import ARGUMENTS, RULES
from deepstow.trainer.config.load import load
from deepstow.trainer.config.sections import DataSection
from deepstow.trainer.config.yaml_file import parse
from deepstow.trainer.data.chats import Fault, find_template
from deepstow.trainer.data.chats import read as read_chat
from deepstow.trainer.errors import ConfigError

ZERO_3 = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5}, "overlap_comm": True,
        "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
NATIVE = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "steps_per_print": 10,
    "optimizer": {"type": "Adam", "params": {"lr": 8e-4, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.005}},
    "gradient_clipping": 5.0, "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 15},
    "zero_optimization": {
        "stage": 2, "cpu_offload": True, "zero_quantized_weights": True, "allgather_bucket_size": 5e8,
    },
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    "tensorboard": {"enabled": False, "output_path": "logs"},
}  # fmt: skip
ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 2
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 2
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 8
tpu_env: []
use_cpu: false
"""
TRAIN_SH = r"""
#!/bin/bash
# the recipe, with: python train.py --learning_rate 1
export OUT="out"
MICRO=4
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 --nnodes=2 --master_port=29500 train.py \
    --model_name_or_path meta-llama/Llama-2-7b-hf \
    --data_path ./alpaca_data.json \
    --bf16 True \
    --output_dir $OUT --run_name $RUN \
    --per_device_train_batch_size ${MICRO} --gradient_accumulation_steps 8 \
    --evaluation_strategy "no" \
    --save_steps 2_000 \
    --learning_rate 2e-5 --weight_decay 0. --warmup_ratio 0.03 \
    --lr_scheduler_type "cosine" --adam_beta2=0.95 \
    --deepspeed configs/ds.json \
    --model_max_length 2048 --no_remove_unused_columns
"""
AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
model_type: AutoModelForCausalLM
load_in_8bit: true
load_in_4bit: false
strict: false
chat_template: tokenizer_default
datasets:
  - path: notes.jsonl
    type: completion
    field: body
  - path: org/chats
    type: chat_template
    field_messages: conversations
    split: train[:10%]
    roles_to_train: [assistant]
    message_property_mappings: {role: from, content: value}
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
adapter: lora
lora_r: 32
lora_dropout: 0.05
lora_target_linear: true
peft_use_rslora: true
wandb_project: mine
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
evals_per_epoch: 4
saves_per_epoch: 1
fsdp:
special_tokens:
  pad_token: <|end_of_text|>
  eos_token: <|eot_id|>
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity, alpaca_en_demo
template: llama3
quantization_bit: 4
quantization_method: bnb
max_samples: 1000
overwrite_cache: true
output_dir: saves/sft
plot_loss: true
learning_rate: 1.0e-4
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 500
flash_attn: fa2
"""
DATASET_INFO = {
    "identity": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "turns"}},
    "alpaca_en_demo": {"hf_hub_url": "org/alpaca", "ms_hub_url": "other/alpaca"},
}
SFT = (
    "accelerate launch --config_file acc.yaml --num_processes 4 sft.py --model_name_or_path Qwen/Qwen2-0.5B "
    "--dataset_name trl-lib/Capybara --use_peft --lora_r 32 --lora_target_modules q_proj v_proj --packing "
    "--eval_strategy steps --gradient_accumulation_steps 8 --report_to none"
)
CLM = (
    "python run_clm.py --model_name_or_path gpt2 --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 "
    "--do_train --do_eval --block_size 512 --output_dir /tmp/clm --lora_r_unknown 3 --fsdp hybrid_shard_zero2 auto_wrap"
)
LLAMA3 = datasets.LLAMA_FACTORY["llama3"].text()
# Name: files, and the command; the whole config; the keys that are named as lost, and a part of why.
CASES: dict[str, tuple[dict[str, Any], str, str, dict[str, str]]] = {
    "deepspeed alone": (
        {"ds.json": NATIVE},
        "",
        """
training: {learning_rate: 8e-4, per_device_train_batch_size: 4, gradient_accumulation_steps: 2, max_grad_norm: 5.0,
  optim: adamw_torch_fused, weight_decay: 0.005, adam_beta1: 0.9, adam_beta2: 0.99, adam_epsilon: 1e-7,
  lr_scheduler_type: constant, fp16: true, logging_steps: 10}
strategies: {zero: {stage: 2}, offload: {}}
""",
        {
            "zero_optimization.zero_quantized_weights": "is no key that is known",
            "optimizer.params.weight_decay": "of all weights there",
            "fp16.initial_scale_power": "write 16",
        },
    ),
    "a script and its ds_config": (
        {"train.sh": TRAIN_SH, "configs/ds.json": ZERO_3},
        "",
        """
model: {name_or_path: meta-llama/Llama-2-7b-hf}
data: {path: ./alpaca_data.json, max_length: 2048}
training: {output_dir: out, learning_rate: 2e-5, per_device_train_batch_size: 4, gradient_accumulation_steps: 8,
  optim: adamw_torch_fused, weight_decay: 0.0, adam_beta2: 0.95, lr_scheduler_type: linear, warmup_steps: 0.03,
  bf16: true, logging_steps: 500, eval_strategy: "no", save_steps: 2000}
strategies: {zero: {stage: 3}, offload: {}}
""",
        {
            "scheduler.type": "one step behind",
            "scheduler.params.warmup_type": "logarithm",
        },
    ),
    "trl through accelerate": (
        {"acc.yaml": ACCELERATE},
        SFT,
        """
model: {name_or_path: Qwen/Qwen2-0.5B, lora: {r: 32, lora_alpha: 32, lora_dropout: 0.05,
  target_modules: [q_proj, v_proj]}}
data: {path: trl-lib/Capybara, eval_split: test, packing: true, excess_length_strategy: truncate}
training: {output_dir: trainer_output, learning_rate: 2e-5, gradient_accumulation_steps: 8, bf16: true,
  gradient_checkpointing: true, report_to: none, eval_strategy: steps}
strategies: {zero: {stage: 2}, offload: {}}
""",
        {
            "gradient_accumulation_steps": "command line: gradient_accumulation_steps is 8, and that is written",
        },
    ),
    "run_clm": (
        {},
        CLM,
        """
model: {name_or_path: gpt2}
data: {path: wikitext, name: wikitext-2-raw-v1, max_length: 512, packing: true}
training: {output_dir: /tmp/clm, logging_steps: 500}
strategies: {zero: {stage: 3}}
""",
        {
            "block_size": "hold documents that do not",
            "lora_r_unknown": "is no key that is known",
        },
    ),
    "axolotl": (
        {"axolotl.yml": AXOLOTL},
        "",
        """
model: {name_or_path: NousResearch/Meta-Llama-3-8B, dtype: bfloat16, attn_implementation: flash_attention_2,
  lora: {r: 32, lora_alpha: 8, lora_dropout: 0.05, target_modules: all-linear, use_rslora: true},
  quantization_config: {load_in_8bit: true}}
data: {datasets: [{path: notes.jsonl, columns: {text: body}}, {path: org/chats, split: "train[:10%]",
  columns: {messages: conversations}, assistant_only_loss: true}], eval_fraction: 0.05,
  max_length: 4096, packing: true, excess_length_strategy: drop}
training: {output_dir: ./outputs/lora-out, learning_rate: 2e-4, per_device_train_batch_size: 2,
  gradient_accumulation_steps: 4, num_train_epochs: 4, optim: adamw_torch_fused, lr_scheduler_type: cosine,
  warmup_steps: 0.03, bf16: true, tf32: false, logging_steps: 1, report_to: wandb,
  project: mine, eval_strategy: steps, eval_steps: 0.0625, eval_on_start: true, save_strategy: steps, save_steps: 0.25,
  save_total_limit: 4, average_tokens_across_devices: false}
""",
        {
            "datasets": "train on one kind",
            "chat_template": "with {% generation %} around",
            "warmup_steps": "at most 100",
            "optimizer": "in 8 bits",
            "special_tokens.eos_token": "save one",
        },
    ),
    "llama-factory": (
        {"lf.yaml": LLAMA_FACTORY, "data/dataset_info.json": DATASET_INFO},
        "",
        """
model: {name_or_path: meta-llama/Meta-Llama-3-8B-Instruct, dtype: bfloat16, attn_implementation: flash_attention_2,
  lora: {r: 4, lora_alpha: 8, lora_dropout: 0.0, target_modules: [q_proj, v_proj]}, quantization_config: {
  load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true, bnb_4bit_compute_dtype: bfloat16}}
data: {datasets: [{path: data/chats.json, columns: {messages: turns}, assistant_only_loss: true, limit: 1000},
  {path: org/alpaca, limit: 1000}], eval_fraction: 0.1, max_length: 2048, excess_length_strategy: truncate,
  chat_template: LLAMA3}
training: {output_dir: saves/sft, learning_rate: 1e-4, bf16: true, gradient_checkpointing: true, logging_steps: 500,
  eval_strategy: steps, eval_steps: 500}
""",
        {"deepspeed": "a file that is not here", "dataset": "alpaca_en_demo has rows", "cutoff_len": "of a long row"},
    ),
}


def read(tmp_path: Path, files: dict[str, Any], command: str = "", kind: str | None = None) -> Draft:
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    given = [name for name in files if "/" not in name and name not in command]  # the others are named in it
    return imported(read_all(given, command.split(), kind))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_what_an_example_becomes(case: str, tmp_path: Path) -> None:
    files, command, config, lost = CASES[case]
    draft = read(tmp_path, files, command)
    assert draft.tree() == parse(config.replace("LLAMA3", json.dumps(LLAMA3)), "")[0]
    assert {".".join(fault.key) for fault in draft.lost} == lost.keys()
    assert [fault for fault in draft.lost if lost[".".join(fault.key)] not in str(fault)] == []
    absent = {"model.name_or_path", "data.path", "training.output_dir"}
    assert {".".join(fault.key) for fault in check(draft.tree())} <= (absent if "model" not in draft.tree() else set())
    # The file says the same as the draft, and where each key comes from.
    text = draft.text("start")
    assert parse(text, "")[0] == draft.tree() and yaml.safe_load(text)
    assert all(f"# {said}" in text for said in ("Made by", *map(differs, draft.lost)))
    assert all(" # " in line for line in text.splitlines() if re.match(r" +\w+: \S", line))


def test_ranks_and_their_batch(tmp_path: Path) -> None:
    assert read(tmp_path, {"train.sh": TRAIN_SH, "configs/ds.json": ZERO_3}).ranks == 4
    for change, found in (
        ({}, (4, 2, 4)),
        ({"gradient_accumulation_steps": None}, (4, None, 8)),
        ({"train_micro_batch_size_per_gpu": None}, (None, 2, None)),
        ({"train_batch_size": 30}, (4, 2, None)),
    ):
        draft = read(tmp_path, {"ds.json": NATIVE | change})
        values = draft.of("training.per_device_train_batch_size"), draft.of("training.gradient_accumulation_steps")
        assert (*values, draft.ranks) == found
        assert ("train_batch_size",) in [fault.key for fault in (draft.spare if draft.ranks else draft.lost)]
    launched = "deepspeed --num_gpus 8 train.py --per_device_train_batch_size 2 --output_dir o --deepspeed ds.json"
    ds = {"train_batch_size": 64, "gradient_clipping": 1.0}
    with_args = read(tmp_path, {"ds.json": ds}, launched.replace("2", "8"))
    assert with_args.lost == [] and with_args.ranks == 8
    assert "is another batch than 2 per device x 1 micro-batches x 8 ranks" in str(
        read(tmp_path, {"ds.json": ds}, launched).lost
    )


def test_deepspeed_decides_what_it_does_not_say(tmp_path: Path) -> None:
    """Nothing clipped without gradient_clipping, and the rate of the scheduler instead of the optimizer's."""
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_max_lr": 1e-5, "warmup_type": "linear"}}
    ds = {"zero_optimization": {"stage": 0}, "optimizer": {"type": "Adam", "params": {}}, "scheduler": scheduler}
    draft = read(tmp_path, {"ds.json": ds, "args.json": {"output_dir": "o", "max_grad_norm": 0.5}})
    found = {name.partition(".")[2]: value.value for name, value in draft.values.items()}
    assert found == {
        "output_dir": "o", "max_grad_norm": 0.0, "logging_steps": 500, "optim": "adamw_torch_fused",
        "learning_rate": 1e-5, "lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 1000,
        "lr_scheduler_kwargs": {"min_lr_rate": 1e-4}, "zero.stage": 0,
    }  # fmt: skip
    assert {".".join(fault.key) for fault in draft.spare} >= {"max_grad_norm", "optimizer.params.lr"}
    assert [".".join(fault.key) for fault in draft.lost] == ["scheduler.type"]


def test_arguments_as_transformers_saves_them(tmp_path: Path) -> None:
    """All names of TrainingArguments are known, and nothing that is at its default is lost."""
    from transformers import TrainingArguments

    saved = TrainingArguments("out", use_cpu=True, learning_rate=1e-4, warmup_steps=0.1).to_json_string()
    draft = read(tmp_path, {"training_args.json": saved})
    assert draft.lost == []
    assert (draft.of("training.learning_rate"), draft.of("training.warmup_steps")) == (1e-4, 0.1)
    assert {fault.key[0] for fault in check(draft.tree())} == {"model", "data"}


INFO = {
    "c4": {"file_name": "c4.json", "columns": {"prompt": "body"}},
    "talks": {"file_name": "c.json", "formatting": "sharegpt", "columns": {"messages": "talk"}},
    "pairs": {"hf_hub_url": "org/pairs", "ranking": True, "columns": {"chosen": "chosen", "rejected": "rejected"}},
}


KEYS = Path(__file__).with_name("importing_keys.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "line", [line for line in KEYS if not line.startswith("#")], ids=lambda line: " ".join(line.split())
)
def test_what_a_key_becomes(line: str, tmp_path: Path) -> None:
    kind, rest = line.split(maxsplit=1)
    given, outcome = re.split(r"\s{2,}", rest, maxsplit=1)
    keys = yaml.safe_load(given)
    more = {"seed": 1} | ({"max_steps": 100} if kind == "axolotl" and "num_epochs" not in keys else {})
    draft = read(tmp_path, {"a.yaml": more | keys, "data/dataset_info.json": INFO}, kind=kind)
    if outcome.startswith("!"):
        assert [fault for fault in draft.lost if outcome.removeprefix("! ") in str(fault)]
    elif outcome == "=":
        keys.popitem()
        without = read(tmp_path, {"a.yaml": more | keys}, kind=kind)
        assert (draft.tree(), draft.lost) == (without.tree(), without.lost)
    else:
        [(target, value)] = yaml.safe_load(outcome).items()
        assert draft.of(target) == value


REFUSED = r"""
base_model: x\ncutoff_len: 3                of Axolotl (base_model) and of LLaMA-Factory (cutoff_len); say which
learning: 1                                 a.yaml: none of its keys is known; say whose it is with --from deepspeed,
seed: 1\nseed: 2                            a.yaml:2: seed = 2: duplicate key, first on line 1; keep one
- 1                                         a.yaml: holds no keys and no command
base_model: x\nrl: grpo                     a.yaml:2: rl = "grpo": cannot be imported; there are sft, pt,
""".strip().splitlines()  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    content, line = re.split(r"\s{3,}", case.replace(r"\n", "\n"), maxsplit=1)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {"a.yaml": content})
    assert len(caught.value.lines) == 1 and line in caught.value.lines[0]


def test_refused_commands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.sh: holds 2 commands; give the one that trains after --"):
        read(tmp_path, {"a.sh": "python a.py --seed 1\npython b.py --seed 2"})
    with pytest.raises(ConfigError, match=r"a\.sh: neither options of a script, nor a file that is here"):
        read(tmp_path, {"a.sh": "python a.py"})
    twice = {"a.yaml": "template: x\ndataset: y", "data/dataset_info.json": '{"y": 1, "y": 2}'}
    with pytest.raises(
        ConfigError, match=r"data/dataset_info\.json:1: y = 2: duplicate key, first on line 1; keep one"
    ):
        read(tmp_path, twice)
    with pytest.raises(ConfigError, match=r"^a\.yml: no such file"):
        read_all(["a.yml"], [], None)


@pytest.mark.parametrize("odd", [True, "x y", [{"a": 1}]])
def test_odd_values_are_named_and_nothing_breaks(odd: object, tmp_path: Path) -> None:
    for kind in NAMES:
        tree: dict[str, Any] = {}
        for name in sorted(RULES.get(kind, ARGUMENTS).keys() - {""} - {"rl", "stage", "task"}):
            inner = tree
            for part in name.split(".")[:-1]:
                inner = inner.setdefault(part, {}) if isinstance(inner.get(part, {}), dict) else {}
            inner[name.rpartition(".")[2]] = deepcopy(odd)
        draft = imported([Source(kind, "odd.yaml", tree)])
        assert len(draft.lost) > 3 and parse(draft.text("start"), "")[0] == draft.tree()


def test_whose_it_is_can_be_said(tmp_path: Path) -> None:
    arguments = {"args.json": {"output_dir": "o"}}
    assert read(tmp_path, arguments).of("training.learning_rate") is None
    assert read(tmp_path, arguments, kind="trl").of("training.learning_rate") == 2e-5


def test_a_command_that_names_files_alone(tmp_path: Path) -> None:
    """As Axolotl and LLaMA-Factory are started; an option beside the file comes before what the file says."""
    files = {"x/a.yml": AXOLOTL, "x/lf.yaml": LLAMA_FACTORY, "x/acc.yaml": ACCELERATE}
    for command, kinds in (
        ("accelerate launch --config_file x/acc.yaml -m axolotl.cli.train x/a.yml", ["axolotl", "accelerate"]),
        ("FORCE_TORCHRUN=1 llamafactory-cli train x/lf.yaml", ["llamafactory"]),
        ("axolotl train x/a.yml --learning_rate 1e-3 --lora_alpha 64", ["axolotl", "axolotl"]),
    ):
        draft = read(tmp_path, files, command)
        assert list(dict.fromkeys(source.kind for source in draft.sources)) == list(dict.fromkeys(kinds)), command
    assert (draft.of("training.learning_rate"), draft.of("model.lora.lora_alpha")) == (1e-3, 64) and (
        "learning_rate",
    ) in [fault.key for fault in draft.lost]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not train the same is said, and written only with --anyway; no file is written over another."""
    out = tmp_path / "mine.yaml"
    words = ["import", "--out", str(out), "--", *CLM.split()]
    assert cli.main(words) == 2 and not out.exists()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("command line: does not train the same: block_size = 512: cuts rows out of one stream")
    assert lines[1].startswith("command line: does not train the same: lora_r_unknown = 3: ") and len(lines) == 3
    anyway = ["import", "--anyway", *words[1:]]
    assert cli.main(anyway) == 0 and load(out).training.output_dir == "/tmp/clm"
    assert all(f"# {line}" in out.read_text() for line in lines[:2])
    assert f"deepstow train --config {out}" in capsys.readouterr().out.splitlines()
    before = out.read_text()
    assert cli.main([*anyway, "--seed", "7"]) == 2 and out.read_text() == before
    assert capsys.readouterr().err == f"--out {out}: there is such a file; name another, or add --overwrite\n"
    assert cli.main(["import", "--overwrite", *anyway[1:], "--seed", "7"]) == 0 and load(out).training.seed == 7
    Path("ds.json").write_text(json.dumps(ZERO_3))
    assert import_config.main(["ds.json", "--anyway"]) == 2
    said = capsys.readouterr().out
    assert "# ds.json:1: does not train the same: train_micro_batch_size_per_gpu" in said
    assert "#   data.path: missing" in said


# --- data: ids and labels as the tool has them, by its algorithm ------------------------------------------------------

LONGER = [("system", "Be short."), ("user", "Hi  there\n"), ("assistant", "Yes: 2 of\nthem."), ("user", "So?")]
CHATS = [[("user", "What is 1 + 2?"), ("assistant", "Three.")], [*LONGER, ("assistant", "Ok [x].")]]
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>")
AXOLOTL_CHAT = """
base_model: m
datasets: [{path: c.jsonl, type: chat_template, field_messages: talk, message_property_mappings: {role: from,
  content: value}}]
chat_template: KIND
eot_tokens: [END]
learning_rate: 1e-4
warmup_steps: 1
"""
FACTORY_CHAT = """
model_name_or_path: m
finetuning_type: full
dataset: talks
template: KIND
"""
TALKS = {"talks": {"file_name": "c.json", "formatting": "sharegpt", "columns": {"messages": "talk"}}}


def _tokenizer() -> Any:
    """Bytes and a few merges, with the marks of templates as tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=list(MARKS))
    plain.train_from_iterator([text for chat in CHATS for turn in chat for text in turn] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<bos>", eos_token="<eos>")


def _head(kind: str, role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n" if kind == "llama3" else f"<|im_start|>{role}\n"


def _tail(kind: str) -> str:
    return "<|eot_id|>" if kind == "llama3" else "<|im_end|>\n"


def _as_axolotl(tokens: Any, kind: str, chat: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """An answer is where the text differs from that with another answer, [[dummy_message]], so one that begins with [
    or ends with ] loses that token. The end token within three is trained on.
    """

    def ids(turns: list[tuple[str, str]]) -> list[int]:
        turns = [(role, said.strip() if kind == "llama3" else said) for role, said in turns]
        text = "".join(f"{_head(kind, role)}{said}{_tail(kind)}" for role, said in turns)
        return list(tokens(("<bos>" if kind == "llama3" else "") + text, add_special_tokens=False)["input_ids"])

    whole = ids(chat)
    labels, end = [-100] * len(whole), tokens.convert_tokens_to_ids(_tail(kind).strip())
    for index, (role, _) in enumerate(chat):
        if role == "assistant":
            full, other = ids(chat[: index + 1]), ids([*chat[:index], (role, "[[dummy_message]]")])
            pairs = list(zip(full, other, strict=False))
            start = next(at for at, (one, two) in enumerate(pairs) if one != two)
            back = next(at for at, (one, two) in enumerate(zip(full[::-1], other[::-1], strict=False)) if one != two)
            stop = len(full) - back
            labels[start:stop] = whole[start:stop]
            at = whole.index(end, stop)
            assert at - stop <= 3
            labels[at] = end
    return whole, labels


def _as_llama_factory(tokens: Any, kind: str, chat: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Each piece is tokenised alone: what asks is masked, and an answer is trained on with all that ends it."""
    form, ids, labels = "llama3" if kind == "llama3" else "chatml", [], []
    system = (
        [("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")] if kind == "qwen" else []
    )
    pieces = [("<bos>", False)] if kind == "llama3" else []
    for role, said in chat if chat[0][0] == "system" else [*system, *chat]:
        asked = f"{_head(form, role)}{said}{_tail(form)}{_head(form, 'assistant') if role == 'user' else ''}"
        pieces.append((f"{said}{_tail(form)}", True) if role == "assistant" else (asked, False))
    for text, trained in pieces:
        found = tokens(text, add_special_tokens=False)["input_ids"]
        ids += found
        labels += found if trained else [-100] * len(found)
    return ids, labels


KINDS = [("axolotl", name) for name in datasets.AXOLOTL] + [("llamafactory", name) for name in datasets.LLAMA_FACTORY]


@pytest.mark.parametrize(("tool", "kind"), KINDS)
def test_chats_have_the_ids_and_labels_of_the_tool(tool: str, kind: str, tmp_path: Path) -> None:
    tokens, end = _tokenizer(), _tail(kind).strip()
    config = (AXOLOTL_CHAT if tool == "axolotl" else FACTORY_CHAT).replace("KIND", kind).replace("END", f"'{end}'")
    draft = read(tmp_path, {"a.yml": config, "data/dataset_info.json": TALKS})
    assert {".".join(fault.key) for fault in draft.lost} == ({"cutoff_len"} if tool == "llamafactory" else set())
    data = draft.tree()["data"]
    assert (data["columns"], data["assistant_only_loss"]) == ({"messages": "talk"}, True)
    template = find_template(DataSection(**data), tokens)
    names = {"user": "human", "assistant": "gpt"}
    for chat in CHATS:
        row = {"messages": [{"from": names.get(role, role), "value": said} for role, said in chat]}
        reference = _as_axolotl if tool == "axolotl" else _as_llama_factory
        assert template.encode(read_chat(row, "talk", True), True) == reference(tokens, kind, chat)
    if tool == "llamafactory":  # which leaves such a row out
        with pytest.raises(Fault, match="no pairs of user and assistant"):
            template.encode(read_chat({"messages": row["messages"][:-1]}, "talk", True), True)

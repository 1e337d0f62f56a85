"""A command line of TRL, imported and trained, against TRL itself: the same rows, batches, rates and clipping."""

import json
import random
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepstow.launch import import_config
from deepstow.trainer.config.importing.finish import imported
from deepstow.trainer.config.importing.read import Source
from tests.e2e.commands import Server
from tests.helpers.tiny import LLAMA
from tests.helpers.trainers import tokenizer

pytestmark = pytest.mark.slow

LINE = (
    "{3}.py --model_name_or_path {0}/model --dataset_name {0}/data --output_dir {0}/{1} --max_steps 4 --seed 7 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --warmup_steps 1 "
    "--bf16 False --lr_scheduler_type cosine --weight_decay 0.1 --max_grad_norm 0.5 --max_length 64 --use_cpu "
    "--report_to none --save_strategy no --logging_steps 1 --use_peft {2} "
)
MORE = {"sft": "", "dpo": "--beta 0.3 --loss_type ipo --precompute_ref_log_probs"}  # in batches of one size
WORDS = ("a", "model", "trains", "on", "rows", "of", "text")


def _rows(task: str) -> str:
    draw, rows = random.Random(0), []
    for _ in range(20):
        names = ("text",) if task == "sft" else ("prompt", "chosen", "rejected")
        rows.append(json.dumps({name: " ".join(draw.choices(WORDS, k=draw.randint(5, 25))) for name in names}))
    return "\n".join(rows)


@pytest.mark.parametrize(("task", "lora"), [("sft", False), ("sft", True), ("dpo", False)])
def test_trained_as_trl_trains(task: str, lora: bool, server: Server, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    script = import_module(f"trl.scripts.{task}")
    words = tokenizer()
    options = {**LLAMA, "vocab_size": len(words), "eos_token_id": words.eos_token_id}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options))
    for each in (model, words):
        each.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(_rows(task))

    theirs, ours = (LINE.format(tmp_path, name, lora, task) + MORE[task] for name in ("theirs", "ours"))
    script.main(*script.make_parser().parse_args_and_config(shlex.split(theirs)[1:], fail_with_unknown_args=False))
    config = tmp_path / "ours.yaml"
    assert import_config.main(["--out", str(config), "--", "python", *shlex.split(ours)]) == 0
    server.run(1, config).check().quiet()

    export = tmp_path / "ours" / "export"
    if lora:  # which begin from other random numbers
        given = [json.loads((at / "adapter_config.json").read_text()) for at in (tmp_path / "theirs", export)]
        names = ("r", "lora_alpha", "lora_dropout", "bias", "modules_to_save", "use_rslora", "use_dora")
        assert [given[0][name] for name in names] == [given[1][name] for name in names]
        assert set(given[0]["target_modules"]) == set(given[1]["target_modules"])
        return
    expected, found = (load_file(at / "model.safetensors") for at in (tmp_path / "theirs", export))
    assert found.keys() == expected.keys()
    if task == "dpo":
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        return
    # TRL sums the loss over chunks of tokens, which rounds in another order; a rate or a row more would be 1e-3.
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst < 2e-5, worst


@pytest.mark.parametrize("task", ["sft", "dpo", "kto", "reward"])
def test_no_default_of_trl_is_lost(task: str) -> None:
    """All names of its arguments are known, as they are where nobody has said anything."""
    parsed = import_module(f"trl.scripts.{task}").make_parser().parse_args(["--dataset_name", "d"])
    draft = imported([Source("trl", "args.json", vars(parsed) | ({"task": task} if task != "sft" else {}))])
    assert [str(fault) for fault in draft.lost] == []

"""Every key of a config is changed, and the run resumed: what becomes of it is what its rule says."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from deepstow.strategies.core.registry import available, find
from deepstow.strategies.core.resume import CHANGES, on_resume
from deepstow.trainer.config.check import inner_model
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.run.checkpoints import resume_rules, resuming
from deepstow.trainer.run.checkpoints.checkpoint import Found, Manifest
from deepstow.trainer.run.checkpoints.resume_rules import Changes
from tests.helpers.checkpoints import about
from tests.helpers.fakes import Fake
from tests.helpers.tiny import LLAMA, run_config

# opened: where something is; goes on once its contents are compared. The last ones are names in training.allow_change.
OUTCOMES: Mapping[str, str] = {
    "free": """quantize quantize.formats quantize.bnb_4bit_use_double_quant quantize.llm_int8_skip_modules
        export export.format data.num_proc model.trust_remote_code model.lora.export
        training.output_dir training.logging_strategy training.logging_steps training.logging_first_step
        training.log_on_each_node training.log_level training.log_level_replica training.report_to training.run_name
        training.include_num_input_tokens_seen training.profile training.profile.steps training.project
        training.trackio_space_id training.trackio_bucket_id training.trackio_static_space_id
        training.eval_strategy training.eval_steps training.eval_delay training.eval_on_start
        training.per_device_eval_batch_size training.eval_accumulation_steps training.metric_for_best_model
        training.greater_is_better training.compute_metrics training.preprocess_logits_for_metrics
        training.save_strategy training.save_steps training.save_total_limit training.save_on_each_node
        training.load_best_model_at_end training.sample_prompts training.overwrite training.allow_change
        training.resume_from_checkpoint training.restore_callback_states_from_checkpoint
        training.push_to_hub training.hub_model_id training.hub_private_repo training.hub_revision
        training.dataloader_num_workers training.dataloader_pin_memory training.dataloader_persistent_workers
        training.dataloader_prefetch_factor training.dataloader_multiprocessing_context training.ddp_timeout
        training.torch_empty_cache_steps training.predict_with_generate training.generation_max_length
        training.generation_num_beams training.gradient_checkpointing training.gradient_checkpointing_kwargs
        training.activation_checkpointing training.activation_checkpointing_kwargs""",
    "said": """model.lora.loraplus_lr_ratio training.learning_rate training.max_steps training.num_train_epochs
        training.lr_scheduler_type training.lr_scheduler_kwargs training.warmup_steps
        training.callbacks training.early_stopping_patience training.early_stopping_threshold
        strategies.buffers strategies.buffers.debug strategies.cross_entropy strategies.cross_entropy.chunked
        strategies.collectives strategies.collectives.hierarchical strategies.collectives.slices
        strategies.experts strategies.experts.degree strategies.experts.slices
        strategies.linear strategies.linear.transpose strategies.sequence strategies.sequence.degree
        strategies.offload strategies.offload.gpu_memory strategies.offload.host_memory strategies.offload.disk
        strategies.offload.disk_memory strategies.offload.disk_checksums strategies.offload.bucket_size
        strategies.offload.prefetch strategies.offload.site strategies.offload.weights strategies.offload.gradients
        strategies.offload.gather strategies.offload.reduction strategies.offload.accumulation
        strategies.offload.update_in_backward strategies.pipeline strategies.pipeline.stages
        strategies.pipeline.schedule strategies.pipeline.blocks strategies.recompute strategies.recompute.policy
        strategies.recompute.every strategies.recompute.activation_offloading strategies.tensor
        strategies.tensor.degree strategies.tensor.sequence_parallel strategies.tensor.chunks
        strategies.zero strategies.zero.stage""",
    "fixed": """task model.labels model.problem_type model.config.hidden_size model.tokenizer.train
        model.tokenizer.vocab_size model.lora model.lora.r model.lora.target_modules model.lora.bias
        model.lora.modules_to_save model.lora.use_dora training.optim training.optim_args""",
    "opened": """data.path data.chat_template data.chat_template_path model.name_or_path model.tokenizer
        distill.teacher""",
    "data": """data.datasets data.name data.split data.limit data.eval_path data.eval_split data.eval_fraction
        data.columns data.format data.reader data.completion_only_loss data.assistant_only_loss
        data.streaming data.rows""",
    "max_length": "data.max_length data.excess_length_strategy data.max_target_length",
    "packing": "data.packing",
    "seed": "training.seed training.data_seed",
    "order": "training.train_sampling_strategy training.dataloader_drop_last training.dataloader_in_order",
    "batch_size": "training.per_device_train_batch_size",
    "accumulation": "training.gradient_accumulation_steps",
    "loss": """recipes distill distill.alpha distill.temperature distill.loss distill.top_k distill.on
        distill.hidden_weight distill.teacher_dtype distill.teacher_batch_size training.average_tokens_across_devices
        training.label_smoothing_factor training.neftune_noise_alpha training.beta training.loss_type
        training.precompute_ref_log_probs training.desirable_weight training.undesirable_weight
        training.center_rewards_coefficient""",
    "pruning": """prune prune.method prune.sparsity prune.schedule prune.until prune.rounds prune.modules prune.parts
        prune.calibration_rows""",
    "dropout": "model.config.attention_dropout model.lora.lora_dropout training.disable_dropout",
    "betas": "training.adam_beta1 training.adam_beta2 training.adam_epsilon",
    "weight_decay": "training.weight_decay",
    "clipping": "training.max_grad_norm",
    "precision": "training.bf16 training.fp16 training.tf32 model.dtype",
    "kernels": """training.full_determinism training.use_cpu training.torch_compile training.torch_compile_backend
        training.torch_compile_mode training.use_liger_kernel training.liger_kernel_config
        model.attn_implementation""",
    "model": """model.adapter model.config.rms_norm_eps model.lora.lora_alpha model.lora.use_rslora
        model.attention_mask model.attention_mask.window model.attention_mask.sink model.attention_mask.strided
        model.attention_mask.strided.block model.attention_mask.strided.every model.attention_mask.random
        model.attention_mask.random.block model.attention_mask.random.number model.attention_mask.random.seed
        model.quantization_config model.quantization_config.load_in_4bit model.quantization_config.load_in_8bit
        model.quantization_config.bnb_4bit_quant_type model.quantization_config.bnb_4bit_use_double_quant
        model.quantization_config.bnb_4bit_compute_dtype model.quantization_config.llm_int8_threshold
        model.quantization_config.llm_int8_skip_modules""",
    "qat": "quantize.qat quantize.group_size",
    "compression": """strategies.collectives.compress strategies.collectives.density strategies.collectives.momentum
        strategies.collectives.rank strategies.collectives.start strategies.collectives.local_steps
        strategies.collectives.outer_lr strategies.collectives.outer_momentum strategies.tensor.exchange
        strategies.tensor.exchange.tokens strategies.tensor.exchange.bits strategies.tensor.exchange.codec""",
    "moments": "strategies.offload.moments strategies.offload.masters strategies.offload.frozen_weights",
}
LORA = {"name_or_path": "m", "lora": {"r": 2}, "quantization_config": {"load_in_4bit": True}}
MASK = {"window": 4, "strided": {"block": 2, "every": 3}, "random": {"block": 2, "number": 2}}
# Runs that have the sections in which keys are changed; the first that fits, by the beginning of a key.
RUNS: Mapping[str, Mapping[str, Any]] = {
    **{f"model.{name}": {"config": None, "model": LORA} for name in ("lora", "quantization_config", "name_or_path")},
    "model.tokenizer.": {
        "model": {"tokenizer": {"train": "bpe", "vocab_size": 400}},
        "config": {**LLAMA, "vocab_size": 400},
    },
    "model.attention_mask": {"model": {"attention_mask": MASK}},
    "training.profile.": {"profile": {"steps": [2, 3]}},
    "strategies.tensor.exchange": {"strategies": {"tensor": {"degree": 2, "exchange": {"bits": 8}}}},
    "distill": {"sections": {"distill": {"teacher": "t"}}},
    "prune": {"sections": {"prune": {}}},
    "quantize.": {
        "data": {"eval_fraction": 0.1},
        "sections": {"quantize": {"formats": ["int4_group"], "qat": "int4_group"}},
    },
    "quantize": {"data": {"eval_fraction": 0.1}, "sections": {"quantize": {}}},
    "export": {"sections": {"export": {}}},
    **{f"strategies.{name}": {"strategies": {name: find(name).examples[0]}} for name in available()},
}


def keys_of(section: type[BaseModel], at: str) -> Iterator[str]:
    """Every key of a section, with those of sections in it."""
    for name, field in section.model_fields.items():
        key = f"{at}{name}"
        inner = inner_model(field.annotation) if key != "data.datasets" else None  # a list is compared as a whole
        if field.default is not None and inner is not None:  # a section that is always there
            yield from keys_of(inner, f"{key}.")
        elif key == "model.config":
            yield from (f"{key}.{each}" for each in ("hidden_size", "attention_dropout", "rms_norm_eps"))
        elif key == "strategies":
            yield from (f"{key}.{each}" for each in available())
            for each in available():
                yield from keys_of(find(each), f"{key}.{each}.")
        else:
            yield key
            yield from keys_of(inner, f"{key}.") if inner is not None else ()


@cache
def run_of(start: str) -> RunConfig:
    """The run of ``RUNS`` that has the sections of keys with this beginning."""
    given = dict(RUNS.get(start, {}))
    config, sections = given.pop("config", LLAMA), given.pop("sections", {})
    return load_tree({**run_config(config, **given).tree(), **sections})


def ranks_of(tree: Mapping[str, Any]) -> int:
    """Of one copy of the model."""
    return 2 if {"pipeline", "tensor", "sequence"} & tree["strategies"].keys() else 1


def saved_by(config: RunConfig, key: str) -> Found:
    """A checkpoint of a run that had another value of ``key``, or no such section."""
    tree: dict[str, Any] = config.tree()
    *path, name = key.split(".")
    inside = tree
    for each in path:
        inside = inside[each]
    value = inside.get(name)
    if isinstance(value, dict) and value:
        del inside[name]
    else:
        inside[name] = str(value) if type(value) is int else "another"  # the degrees of as many ranks
    run = about(tree, ranks_of(tree), resuming.resolved(config, tree["training"]))
    model, data = run.model.model_copy(update={"weights": "w"}), run.data.model_copy(update={"teacher": "t"})
    run = run.model_copy(update={"model": model, "data": data})
    return Found(Path("c"), Manifest(step=8, finite=True, run=run))


def outcome(key: str) -> str:
    """What becomes of a run that resumes one with another value of ``key``; see ``OUTCOMES``."""
    config = run_of(next((start for start in RUNS if key.startswith(start)), ""))
    found = saved_by(config, key)

    def changes(*allowed: str) -> Changes:
        training = config.training.model_copy(update={"allow_change": list(allowed)})
        return resuming.compare(config.model_copy(update={"training": training}), ranks_of(config.tree()), found)

    def is_said(changes: Changes) -> bool:
        return not changes.refused and [line.partition(" = ")[0] for line in changes.said] == [key] == [*changes.keys]

    if not (refused := changes().refused):
        if is_said(changes()):
            return "said"
        places = resume_rules.moved(found.manifest.run.config, config.tree())
        return "opened" if [*places] == [key] else "free" if changes() == ({}, [], []) and not places else "unclear"
    assert refused[0].key == key
    if (allowed := re.search(r"allow it with training.allow_change: \[(\w+)\]$", refused[0].what)) is None:
        return "fixed" if changes(*CHANGES).refused[0] == refused[0] else "unclear"
    others = (name for name in CHANGES if name != allowed[1])
    return allowed[1] if is_said(changes(allowed[1])) and changes(*others).refused == refused else "unclear"


def test_each_key_does_what_its_rule_says() -> None:
    wanted = {key: rule for rule, keys in OUTCOMES.items() for key in keys.split()}
    keys = list(keys_of(RunConfig, ""))
    assert sorted(keys) == sorted(key for keys in OUTCOMES.values() for key in keys.split()), (
        "each key stands there once"
    )
    assert {*OUTCOMES} == {"free", "said", "fixed", "opened", *CHANGES} - {"ranks"}
    found = {key: outcome(key) for key in keys}
    assert {key: rule for key, rule in found.items() if rule != wanted[key]} == {}


class Plugin(Fake):
    """A strategy that says nothing about resuming, but for one option."""

    size: int = 1
    speed: int = Field(default=1, json_schema_extra=on_resume("said"))


def test_what_states_no_rule_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_rules, "available", lambda: ("plugin",))
    monkeypatch.setattr(resume_rules, "find", lambda name: Plugin)

    def refused(saved: Any, now: Any) -> list[str]:
        found = resume_rules.compare(saved, {**now, "training": {"allow_change": CHANGES}}, (1, 1), "c").refused
        assert all("its state does not fit another" in line.what for line in found)
        return [line.key for line in found]

    plugin = {"strategies": {"plugin": {}}}
    assert refused({}, plugin) == refused(plugin, {}) == ["strategies.plugin"]
    assert refused(plugin, {"strategies": {"plugin": {"size": 2, "speed": 2}}}) == ["strategies.plugin.size"]
    assert refused({"training": {"another": 1}}, {}) == ["training.another"]
    assert refused({"strategies": {"another": {}}}, {}) == ["strategies.another"]


def test_a_rule_that_is_none_is_seen_where_it_is_written() -> None:
    with pytest.raises(AssertionError, match="moment is no rule for resuming"):
        type("Wrong", (Fake,), {"resume": "moment", "__module__": __name__})
    with pytest.raises(AssertionError, match="moment is no rule"):
        on_resume("moment")  # type: ignore[arg-type]

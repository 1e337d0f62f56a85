"""What each key of the other tools means, one table per tool, where its name is not enough.

A rule is given a key, and the draft so far. Its outcome is values of ours; or ``Nothing``, a text that says why the key
has no effect on what is trained; or another text, which says why it does not train the same. What DeepSpeed has in
force whatever arguments say (``WINS``) replaces theirs.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from deepstow.trainer.config.importing import datasets
from deepstow.trainer.config.importing.datasets import EXCESS, evaluates
from deepstow.trainer.config.importing.draft import LOST, Draft, Nothing, Rule
from deepstow.trainer.config.importing.read import PATHS, Given
from deepstow.trainer.config.yaml_file import error_line
from deepstow.trainer.errors import ConfigError

SMALL = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
ADAMW = ("adam", "adamw", "fusedadam", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit", *SMALL)
SMALL_LION = ("lion_8bit", "paged_lion_8bit")
LION = ("lion", "fusedlion", "paged_lion_32bit", *SMALL_LION)
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine_with_min_lr"}
# How FSDP says that weights are sharded all the time (stage 3), or gathered from forward to backward (2).
FSDP = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "1": 3, "2": 2, "3": 0, "true": 3, "false": 2}
MICRO, STEPS = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
WARMUP = "training.warmup_steps"
RATE, SCHEDULE, KWARGS = (f"training.{name}" for name in ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs"))
QUANTISED = "model.quantization_config"
TASKS = {"sft": None, "pt": "pretrain", "rm": "reward", "ipo": "dpo"} | {n: n for n in ("dpo", "orpo", "kto", "reward")}
FLASH = "flash_attention_2"
ATTENTION = {"flash": FLASH, "fa2": FLASH, "fa3": "flash_attention_3", "disabled": "eager", "auto": None}
OFFLOAD = (
    "offload_optimizer_device", "offload_param_device", "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device", "zero_optimization.cpu_offload",
)  # fmt: skip
SHARDING = (
    "fsdp",
    *(f"fsdp_config.{at}{name}" for at in ("", "fsdp_") for name in ("sharding_strategy", "reshard_after_forward")),
)
PLACED = Nothing("says where bytes are, which the plan decides")
KERNELS = Nothing("chooses kernels of the same sums")
SAID = Nothing("says nothing of what is trained")
ORDER = Nothing("is about the order of rows alone")


def _only(values: Collection[object], why: str) -> Rule:
    return lambda given, draft: None if given.value in values else why


def _to(target: str) -> Rule:
    return lambda given, draft: {target: given.value}


def _order(strategy: str) -> Rule:
    return lambda given, draft: {"training.train_sampling_strategy": strategy if given.value else None}


def _says(outcome: str | None) -> Rule:
    return lambda given, draft: outcome


def _all(outcome: str, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), _says(outcome))


def _off(names: str) -> dict[str, Rule]:
    """What is not there without the key, and not here at all."""
    return dict.fromkeys(names.split(), _only((False, 0), "is not here; leave it out there, too, if it may be missed"))


def _task(given: Given, draft: Draft) -> dict[str, Any]:
    if given.value not in TASKS:
        what = f"cannot be imported; there are {', '.join(map(str, TASKS))}"
        raise ConfigError(f"{given.where}: {error_line(given.key, given.value, what)}")
    task = "orpo" if given.value == "dpo" and given.tree.get("pref_loss") == "orpo" else TASKS[given.value]
    return {"task": task, "training.loss_type": "ipo" if given.value == "ipo" else None}


def _optim(given: Given, draft: Draft) -> dict[str, Any]:
    name = str(given.value).lower()
    optimizer = "adamw_torch_fused" if name in ADAMW else "lion_32bit" if name in LION else name
    lost = f"has state in 8 bits or 4; {optimizer} has it in 32, which may rest on the host with strategies.offload"
    return {"training.optim": optimizer, LOST: lost if name in (*SMALL, *SMALL_LION) else None}


def _scheduler(given: Given, draft: Draft) -> dict[str, Any] | str:
    if given.value not in SCHEDULES:
        return f"is no schedule here; of DeepSpeed's there are {', '.join(SCHEDULES)}"
    lost = "is one step behind Transformers' schedule; leave the section scheduler out, and write lr_scheduler_type"
    return {SCHEDULE: SCHEDULES[given.value], LOST: lost}


def _scale(default: int) -> Rule:
    """How the scale of the loss moves, where there is one."""

    def rule(given: Given, draft: Draft) -> str | None:
        if given.value == default or not (draft.of("training.fp16") or given.tree["fp16"].get("enabled") is True):
            return Nothing("moves no scale of the loss, or as here")
        return f"moves the scale of the loss, of which steps are skipped, otherwise; write {default}"

    return rule


def _offload(given: Given, draft: Draft) -> dict[str, Any] | None:
    if given.value == "nvme":
        draft.need_not(given, "rests in host memory here; strategies.offload.disk names a disk for a part of it")
    return {"strategies.offload": {}} if given.value in ("cpu", "nvme", True) else None


def _precision(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    """Transformers takes the launcher's precision where arguments say none."""
    if given.value not in ("bf16", "fp16"):
        return None if given.value in ("no", False) else "is no precision here; there are bf16, fp16 and fp32"
    if draft.of("training.bf16") or draft.of("training.fp16"):
        agrees = draft.of(f"training.{given.value}")
        return None if agrees else Nothing("is not in force there: the arguments say another precision")
    return {f"training.{given.value}": True}


def _ranks(given: Given, draft: Draft) -> None:
    machines = given.tree.get("num_nodes", given.tree.get("nnodes", 1))
    draft.ranks = given.value * machines if type(given.value) is type(machines) is int else None


def _sharding(given: Given, draft: Draft) -> dict[str, Any]:
    words = re.findall(r"\w+", str(given.value).lower())
    if "hybrid" in str(words):
        draft.need_not(given, "is sharded over all ranks, and not copied between machines: stage 3")
    return {
        "strategies.zero.stage": next((FSDP[word] for word in words if word in FSDP), 3) or None,
        "strategies.offload": {} if "offload" in words else None,
    }


def _lora_target(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    names = given.value
    if given.tree.get("lora_target_linear"):  # besides which these are targets
        outside = {"embed_tokens", "lm_head", "wte"} & set(names)
        return f"{', '.join(sorted(outside))} is no linear layer of a block; write modules_to_save" if outside else None
    if isinstance(names, str) and not re.search(r"[\\()*|\[]", names):
        names = names.replace(" ", "").split(",")
    return {"model.lora.target_modules": "all-linear" if names in (["all"], ["all-linear"]) else names}


def _share(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    why = "is a number of rows, which are held out of training; write a share below 1"
    return {"data.eval_fraction": given.value} if 0 < given.value < 1 else why if given.value else None


def _named_file(given: Given, draft: Draft) -> str | None:
    instead = any(source.kind in given.name for source in draft.sources)  # another is given
    file_names = (source.file.rpartition("/")[2] for source in draft.sources)
    is_read = instead or given.value in (True, False) or str(given.value).rpartition("/")[2] in file_names
    return None if is_read else "is a file that is not here; give it, too"


def _split(given: Given, draft: Draft) -> dict[str, Any]:
    return {"data.split": given.value if given.value != "train" else None}


def _degree(target: str) -> Rule:
    return lambda given, draft: {target: given.value if given.value != 1 else None}


def _warmup_share(given: Given, draft: Draft) -> dict[str, Any] | None:
    """Axolotl rounds it down to whole steps, and warms up in at least two."""
    if given.tree.get("warmup_steps"):
        return None
    steps = given.tree.get("max_steps")
    return {WARMUP: warmup(int(given.value * steps)) if steps else given.value}


def warmup(steps: int) -> int:
    """Steps of warm-up as Axolotl counts them."""
    return 2 if steps == 1 else steps


def _per_epoch(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    """A share of all steps; where that is one whole or more Axolotl does as if the key were not there."""
    event, share = given.name[:4], 1 / given.value / (given.tree.get("num_epochs") or 1) if given.value else 1
    if share >= 1 or (event == "eval" and not evaluates(given.source)):
        return SAID
    return {f"training.{event}_strategy": "steps", f"training.{event}_steps": share} | (
        {"training.eval_on_start": True} if event == "eval" else {}
    )


def _evaluations(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    """Steps are what says that it evaluates, there."""
    if not given.value or not evaluates(given.source):
        return SAID
    if given.name == "eval_steps":
        return {"training.eval_strategy": "steps", "training.eval_steps": given.value, "training.eval_on_start": True}
    return {"training.eval_strategy": given.value, "training.eval_on_start": given.value != "no" or None}


def _half(given: Given, draft: Draft) -> dict[str, Any] | None:
    """Of Axolotl, where auto is on wherever the device has it; weights are loaded in it, too."""
    return {"training.bf16": True, "model.dtype": "bfloat16"} if given.value else {"training.bf16": False}


def _plugins(given: Given, draft: Draft) -> str | None:
    unknown = [name for name in given.value if not re.search(r"Liger|CutCrossEntropy|KernelsPlugin", name)]
    return f"runs code of Axolotl ({', '.join(unknown)}), which is not run here; leave it out" if unknown else KERNELS


def _quantised_options(given: Given, draft: Draft) -> dict[str, Any]:
    return {f"{QUANTISED}.{name}": value for name, value in given.value.items()}


def _preference(given: Given, draft: Draft) -> dict[str, Any] | str:
    """LLaMA-Factory's loss of stage dpo."""
    if given.tree.get("stage") != "dpo" or given.value == "orpo":
        return Nothing("is of stage dpo alone, or says the task")
    return {"training.loss_type": given.value} if given.value in ("sigmoid", "hinge", "ipo") else "is no loss here"


def _packed(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    """LLaMA-Factory's, of which only neat_packing keeps documents apart."""
    neat, pretrains = given.tree.get("neat_packing"), given.tree.get("stage") == "pt"
    if pretrains or not given.value:
        return None  # said with the data, or off
    return {"data.packing": True} if neat else "lets documents of a row see each other; write neat_packing: true"


SHARED: dict[str, Rule] = {
    "optimizer.type": _optim,
    "optimizer.params.betas": lambda key, draft: {
        f"training.adam_beta{n}": beta for n, beta in enumerate(key.value, 1)
    },
    "optimizer.params.adam_w_mode": _only((True,), "has weight decay in the gradient, where AdamW has not; write true"),
    "optimizer.params.torch_adam": _says(KERNELS),
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_max_lr": _to(RATE),
    "scheduler.params.warmup_type": _only(("linear",), "raises the rate by the logarithm of the step; write linear"),
    "scheduler.params.warmup_min_lr": _only((0,), "is where the rate begins, which is 0 here; write 0"),
    "scheduler.params.warmup_min_ratio": _only((0,), "is where the rate begins, which is 0 here; write 0"),
    "scheduler.params.cos_min_ratio": lambda key, draft: {KWARGS: {"min_lr_rate": key.value}},
    "gradient_clipping": _to("training.max_grad_norm"),
    "steps_per_print": lambda key, draft: SAID if draft.trains else {"training.logging_steps": key.value},
    "fp16.initial_scale_power": _scale(16),
    "fp16.loss_scale_window": _scale(1000),
    "fp16.hysteresis": _scale(2),
    "fp16.min_loss_scale": _scale(1),
    "fp16.loss_scale": _only((0,), "is a fixed scale of the loss, which is dynamic here; write 0"),
    "mixed_precision": _precision,
    "use_cpu": lambda key, draft: {"training.use_cpu": key.value or None},
    "distributed_type": _only(
        ("DEEPSPEED", "FSDP", "NO", "no", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU"),
        "is not here; there are ZeRO, tensor parallelism and pipelines",
    ),
    **dict.fromkeys(OFFLOAD, _offload),
    **dict.fromkeys(("num_processes", "num_gpus", "nproc_per_node"), _ranks),
    **dict.fromkeys(SHARDING, _sharding),
    **dict.fromkeys(PATHS, _named_file),
    **_all(PLACED, "zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path aio "
           "offload_optimizer_nvme_path offload_param_nvme_path zero_optimization.offload_optimizer.pipeline_read "
           "zero_optimization.offload_optimizer.pipeline_write fsdp_version activation_checkpointing"),
    "train_batch_size": _says(None),  # looked at when all else is known
}  # fmt: skip
ARGUMENTS: dict[str, Rule] = {  # of Transformers and TRL, and of all who take theirs
    **SHARED,
    "optim": _optim,
    "activation_checkpointing": lambda key, draft: {f"training.{key.name}": key.value or None},
    "warmup_ratio": lambda key, draft: None if key.tree.get("warmup_steps") else {WARMUP: key.value},
    **dict.fromkeys(("lora_target", "lora_target_modules"), _lora_target),
    "lora_task_type": _says(Nothing("follows from the task")),
    "block_size": lambda key, draft: {"data.max_length": key.value, "data.packing": True, LOST: datasets.STREAM},
    "validation_split_percentage": lambda key, draft: {"data.eval_fraction": key.value / 100},
    **dict.fromkeys(("val_size", "test_split_size", "dataset_mixture.test_split_size", "val_set_size"), _share),
    "datasets": datasets.of_trl,
    "dataset_mixture.datasets": datasets.of_trl,
    "dataset_mixture.seed": _says(ORDER),
    "dataset_text_field": lambda key, draft: None if key.value == "text" else {"data.columns": {"text": key.value}},
    "dataset_train_split": _split,
    "packing_strategy": _only(("bfd", "ffd"), datasets.STREAM),
    "eos_token": _says("is given to the tokenizer there; save one with it, and name it in model.tokenizer"),
    "truncation_mode": _only(("keep_start",), "keeps the ends of long rows; here they lose their ends"),
    "max_prompt_length": _says("cuts prompts apart from answers; leave it out, and choose data.max_length"),
    "loss_type": lambda key, draft: KERNELS if "nll" in key.value else {"training.loss_type": key.value},
    **dict.fromkeys(("task", "stage"), _task),
    "chat_template": _to("data.chat_template"),
    "load_in_4bit": lambda key, draft: {f"{QUANTISED}.load_in_4bit": key.value or None},
    "load_in_8bit": lambda key, draft: {f"{QUANTISED}.load_in_8bit": key.value or None},
    "model_revision": _only(("main",), "is another state of the model; load it, and name its folder"),
    **_all(KERNELS, "padding_free pad_to_multiple_of"),
    **_all(PLACED, "activation_offloading precompute_ref_batch_size"),
    **_all(ORDER, "shuffle_dataset"),
    **_all(SAID, "eval_packing bf16_full_eval fp16_full_eval hub_token hub_model_revision hub_strategy debug pad_token "
           "save_only_model do_eval"),
    "run_name": lambda key, draft: SAID if "$" in str(key.value) else {"training.run_name": key.value},
    "f_divergence_type": _only(("reverse_kl",), "is no divergence here; write reverse_kl"),
    **_all(Nothing("is of a loss or a reference that is not chosen"),
           "f_alpha_divergence_coef discopop_tau ref_model_mixup_alpha ref_model_sync_steps"),
    "lora_r": _to("model.lora.r"),
    "lora_modules_to_save": _to("model.lora.modules_to_save"),
    **dict.fromkeys(("use_peft", "dataset_test_split"), _says(None)),
    **_off("use_weighting sync_ref_model loss_weights ld_alpha label_smoothing router_aux_loss_coef "
           "ignore_bias_buffers generate_during_eval lora_target_parameters bnb_4bit_quant_storage"),
}  # fmt: skip
LLAMA_FACTORY: dict[str, Rule] = {
    **ARGUMENTS,
    "dataset": datasets.of_llama_factory,
    "eval_dataset": datasets.of_llama_factory,
    **dict.fromkeys(("template", "max_samples", "dataset_dir", "train_on_prompt"), _says(None)),  # read with the data
    "cutoff_len": _to("data.max_length"),
    **dict.fromkeys(("packing", "neat_packing"), _packed),
    "finetuning_type": _only(("lora", "full"), "is not here; there are lora and full, and full is written"),
    "quantization_bit": lambda key, draft: {f"{QUANTISED}.load_in_{key.value}bit": True},
    "quantization_method": _only(("bnb", "bitsandbytes"), "is not here; bitsandbytes is used"),
    "double_quantization": _to(f"{QUANTISED}.bnb_4bit_use_double_quant"),
    "flash_attn": lambda key, draft: {"model.attn_implementation": ATTENTION.get(key.value, key.value)},
    "mix_strategy": _only(("concat",), "takes rows of several data sets in turn; write concat, and weights in ours"),
    "ignore_pad_token_for_loss": _only((True,), "trains on padding; write true"),
    "enable_thinking": _only((True,), "changes the template; write the template itself in data.chat_template"),
    "disable_shuffling": _order("sequential"),
    "early_stopping_steps": _to("training.early_stopping_patience"),
    "pref_loss": _preference,
    "kto_chosen_weight": _to("training.desirable_weight"),
    "kto_rejected_weight": _to("training.undesirable_weight"),
    **_all(SAID, "compute_accuracy include_effective_tokens_per_second predict_with_generate swanlab_project "
           "swanlab_mode print_param_status preprocessing_batch_size data_shared_file_system use_ray ray_num_workers"),
    **_all(KERNELS, "use_unsloth use_unsloth_gc use_reentrant_gc use_kv_cache use_v1_kernels infer_backend infer_dtype "
           "quantization_device_map gradient_checkpointing"),
    **_all(Nothing("is of images, video and sound, which are not trained on here"),
           "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen media_dir "
           "freeze_vision_tower freeze_multi_modal_projector"),
    **_off(
        "mask_history pure_fp16 upcast_layernorm upcast_lmhead_output resize_vocab split_special_tokens add_tokens "
        "add_special_tokens shift_attn rope_scaling mixture_of_depths train_from_scratch moe_aux_loss_coef pissa_init "
        "create_new_adapter pref_ftx pref_bco_weight dpo_label_smoothing ld_alpha use_galore use_apollo use_badam "
        "use_llama_pro use_adam_mini use_muon use_dft_loss use_asft_loss use_eaft_loss use_mca use_megatron_bridge "
        "use_hyper_parallel use_kt fp8 streaming interleave_probs default_system tool_format freeze_language_model"
    ),
}  # fmt: skip
AXOLOTL: dict[str, Rule] = {
    **ARGUMENTS,
    "datasets": datasets.of_axolotl,
    "pretraining_dataset": datasets.stream_of_axolotl,
    "test_datasets": datasets.test_of_axolotl,
    "adapter": _only(("lora", "qlora"), "is not here; there are LoRA and full fine-tuning, and full is written"),
    "optimizer": _optim,
    **dict.fromkeys(("bf16", "bfloat16"), _half),
    "fp16": lambda key, draft: {"training.fp16": True, "training.bf16": False} if key.value else None,
    "tf32": lambda key, draft: None if key.value == "auto" else {"training.tf32": key.value},
    "warmup_ratio": _warmup_share,
    "warmup_steps": lambda key, draft: {WARMUP: warmup(key.value)},
    "saves_per_epoch": _per_epoch,
    "evals_per_epoch": _per_epoch,
    **dict.fromkeys(("eval_strategy", "eval_steps", "evaluation_strategy"), _evaluations),
    "save_steps": lambda key, draft: {"training.save_strategy": "steps", "training.save_steps": key.value},
    "batch_size": lambda key, draft: {STEPS: key.value // (key.tree.get("micro_batch_size") or 1)},
    "wandb_project": lambda key, draft: {"training.report_to": "wandb", "training.project": key.value},
    "cosine_min_lr_ratio": lambda key, draft: (
        {KWARGS: {"min_lr_rate": key.value}, SCHEDULE: "cosine_with_min_lr"}
        if key.tree.get("lr_scheduler", "cosine") == "cosine"
        else Nothing("is of the cosine schedule alone")
    ),
    "lr_scheduler": lambda key, draft: (
        None if key.value == "cosine" and key.tree.get("cosine_min_lr_ratio") else {SCHEDULE: key.value}
    ),
    "gradient_checkpointing": lambda key, draft: {"training.gradient_checkpointing": key.value is not False},
    "attention": lambda key, draft: {"model.attn_implementation": ATTENTION.get(key.value, key.value)},
    "eager_attention": lambda key, draft: {"model.attn_implementation": "eager" if key.value else None},
    "torch_compile_mode": _says(KERNELS),
    "rl": _task,
    "reward_model": lambda key, draft: {"task": "reward" if key.value else None},
    "orpo_alpha": _to("training.beta"),
    "bnb_config_kwargs": _quantised_options,
    "plugins": _plugins,
    "group_by_length": _order("group_by_length"),
    "curriculum_sampling": _order("sequential"),
    "excess_length_strategy": lambda key, draft: (
        {EXCESS: key.value} if key.value != "raise" else "ends the run at a long row; remove such rows, and write drop"
    ),
    "min_sample_len": _only(range(3), "drops rows that are shorter; remove them, and the key"),
    "model_type": lambda key, draft: (
        Nothing("follows from the task")
        if str(key.value).endswith(("ForCausalLM", "ForSequenceClassification"))
        else "is another kind of model; there are causal ones here"
    ),
    "num_labels": _only((1,), "is a classification, which is not imported; write task: classification"),
    "revision_of_model": _only(("main",), "is another state of the model; load it, and name its folder"),
    "hub_model_id": lambda key, draft: {
        "training.hub_model_id": key.value, "training.push_to_hub": True, "training.hub_private_repo": True,
    },
    "special_tokens.pad_token": _says(Nothing("is not trained on")),
    "tensor_parallel_size": _degree("strategies.tensor.degree"),
    "context_parallel_size": _degree("strategies.sequence.degree"),
    "sequence_parallel_degree": _degree("strategies.sequence.degree"),
    **dict.fromkeys(  # read with others
        ("train_on_inputs", "chat_template", "chat_template_jinja", "eot_tokens", "load_best_model_at_end"), _says(None)
    ),
    **_all(ORDER, "shuffle_merged_datasets shuffle_before_merging_datasets sample_packing_group_size "
           "sample_packing_bin_size multipack_real_batches sample_packing_eff_est total_num_tokens"),
    **_all(PLACED, "dp_shard_size dp_replicate_size expert_parallel_size device_map gpu_memory_limit max_memory "
           "lora_on_cpu activation_offloading layer_offloading selective_checkpointing tiled_mlp gc_steps"),
    **_all(KERNELS, "xformers_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp "
           "cut_cross_entropy chunked_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_kernels "
           "flex_attn_compile_kwargs batch_flattening sdpa_varlen use_scattermoe use_sonicmoe "
           "experts_implementation liger_rms_norm_gated"),
    **_all(SAID, "wandb_mode swanlab_project swanlab_experiment_name swanlab_description swanlab_mode use_swanlab "
           "swanlab_workspace trackio_project_name trackio_run_name use_mlflow use_comet use_trackio include_tkps "
           "loss_watchdog_threshold loss_watchdog_patience tokenizer_use_fast hf_use_auth_token use_ray "
           "ray_num_workers dataset_keep_in_memory do_causal_lm_eval eval_causal_lm_metrics torchdistx_path "
           "push_dataset_to_hub"),
    **_off(
        "gptq flash_optimum float16 fp8 deepcompile relora lisa_n_layers skip_prepare_dataset process_reward_model "
        "dataset_exact_deduplication sample_packing_sequentially lr_quadratic_warmup cosine_constant_lr_ratio "
        "lora_fan_in_fan_out reinit_weights resize_token_embeddings_to_32x use_pose sage_attention unfrozen_parameters "
        "processor_type freeze_mm_modules tokenizer_legacy tokenizer_use_mistral_common dpo_use_weighting use_eaft "
        "s2_attention quantize_moe_experts bfloat16_full lr_groups embedding_lr use_onebitllms fp32_norms"
    ),
}  # fmt: skip
RULES = {
    "deepspeed": SHARED, "accelerate": SHARED, "axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "trl": ARGUMENTS,
    "transformers": ARGUMENTS,
}  # fmt: skip
# DeepSpeed's, whatever arguments say.
WINS = {"optimizer.type", "scheduler.type", "scheduler.params.warmup_max_lr", "gradient_clipping", "mixed_precision"}

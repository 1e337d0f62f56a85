"""A checkpoint resumed under another strategy, on other ranks, or both: the same bits, and the same next steps.

In fp32 without clipping all strategies on the same ranks compute the same, so the runs that go on from one checkpoint
end with the same bits as well. In bf16 those with fp32 masters do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from tests.helpers.moves import (
    OFFLOAD,
    RECOMPUTE,
    SAVED,
    Job,
    Kind,
    accumulating,
    different,
    forget_run,
    in_both,
    in_turn,
    in_worlds,
    made,
    offload,
    pipeline,
    plain,
    run,
    shared,
    staged,
    tensor,
    together,
    zero,
)
from tests.helpers.releases import HIGHEST_STAGE
from tests.helpers.tiny import LLAMA, MIXTRAL

pytestmark = pytest.mark.ranks
STEPS = 3
LORA: Mapping[str, Any] = {"lora": {"r": 4}}
BF16: Mapping[str, Any] = {"bf16": True}


def moved(folder: Path, first: Kind, *others: Kind) -> list[dict[str, Any]]:
    """Train ``first``, and go on from its checkpoint with each of ``others``: what all of them found."""
    saved = str(folder / "first" / f"checkpoint-{SAVED}")
    jobs: list[tuple[Kind, Job]] = [(first, ("first", first.config(folder / "first", STEPS), None))]
    jobs += [(kind, (str(at), kind.config(folder / str(at), STEPS), saved)) for at, kind in enumerate(others)]
    found = in_worlds(jobs)
    runs = [found[name] for _, (name, *_) in jobs]
    for each in runs[1:]:
        assert different(runs[0][f"saved at {SAVED}"], each["start"]) == [] != different(each["start"], each["end"])
    return runs


def all_equal(runs: list[dict[str, Any]]) -> None:
    assert [different(runs[0]["end"], each["end"]) for each in runs] == [[]] * len(runs)
    assert len({tuple(each["loss"]) for each in runs}) == 1


def test_from_plain(tmp_path: Path) -> None:
    all_equal(moved(tmp_path, plain(), plain(), Kind(1, {**OFFLOAD, **RECOMPUTE}), zero(0), zero(HIGHEST_STAGE)))


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path) -> None:
    """What a process compiles does not depend on what ran before, so a resumed run has the same bits."""
    on = {"torch_compile": True}
    all_equal(moved(tmp_path, plain(**on), plain(**on), Kind(1, {**OFFLOAD, **RECOMPUTE}, on)))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"optim": "rmsprop", "optim_args": "centered=true,momentum=0.9"}, marks=pytest.mark.slow),
        {"fp16": True},
    ],
    ids=["rmsprop", "fp16"],
)
def test_optimizers_and_the_loss_scale(tmp_path: Path, other: dict[str, Any]) -> None:
    """With their state, from plain training into the engine, into the ranks' shares of it, and back."""
    runs = moved(tmp_path, plain(2, **other), shared(2, **other), offload(2, **other))
    all_equal(runs)
    all_equal([runs[0], *moved(tmp_path / "back", shared(2, **other), plain(2, **other))])


@pytest.mark.slow
def test_masters(tmp_path: Path) -> None:
    """Weights are bf16 and masters fp32; plain training has fp32 weights alone, which have to be the masters."""
    runs = moved(tmp_path, zero(2, 2, **BF16), offload(2, **BF16), zero(0, 2, **BF16), plain(2, **BF16))
    all_equal(runs[:3])


def test_to_several_ranks_and_back(tmp_path: Path) -> None:
    """Ranks that share buckets go on with the bits of one process that accumulates, and it goes on with theirs."""
    alone = run(accumulating(3), tmp_path / "alone", 5)
    several = run(together(3), tmp_path / "several", 5, tmp_path / "alone" / f"checkpoint-{SAVED}")
    back = run(accumulating(3), tmp_path / "back", 5, tmp_path / "several" / f"checkpoint-{2 * SAVED}")
    assert different(alone[f"saved at {SAVED}"], several["start"]) == [] != different(several["start"], several["end"])
    assert different(several[f"saved at {2 * SAVED}"], back["start"]) == [] != different(back["start"], back["end"])
    assert different(alone["end"], several["end"]) == [] == different(several["end"], back["end"])


def test_divided_layers(tmp_path: Path) -> None:
    """Rows and columns of weights, whole or in ZeRO's shares; copies add in another order than one rank."""
    moved(tmp_path, tensor(2, 4), tensor(0))


@pytest.mark.slow
def test_stages_of_divided_layers(tmp_path: Path) -> None:
    """To one process, to tensor ranks and to stages alone, back from one, and on as if nothing had happened."""
    common = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "max_grad_norm": 0.05}
    both = in_both(4, **common)
    runs = moved(tmp_path, both, both, tensor(0, 2, **common), plain(1, **common))
    all_equal(runs[:3])
    moved(tmp_path / "back", pipeline(2, **common), both)


FOUR: Any = {"model": {"num_hidden_layers": 4}}


def test_stages(tmp_path: Path) -> None:
    """Between cuts, schedules and whole copies, with the bits of one that never moved."""
    there = (pipeline(2), pipeline(4), offload(), staged(2))
    all_equal(moved(tmp_path, *(replace(each, **FOUR) for each in there)))


@pytest.mark.slow
def test_copies_of_a_stage_share_its_state(tmp_path: Path) -> None:
    """Clipped and accumulated: the bits of copies that each update all, and of one process, there and back."""
    common = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "max_grad_norm": 0.05}
    odd = {"mlp_bias": True, "intermediate_size": 33}  # biases that two copies cannot halve
    apart = replace(pipeline(2, 4, **common), model=odd)
    shared = replace(apart, strategies={**apart.strategies, "zero": {"stage": 1}})
    runs = [run(apart, tmp_path / "apart", STEPS), run(shared, tmp_path / "shared", STEPS)]
    assert different(weights(runs[0]["end"]), weights(runs[1]["end"])) == [] and runs[0]["loss"] == runs[1]["loss"]
    saved = f"checkpoint-{SAVED}"
    back = run(apart, tmp_path / "back", STEPS, tmp_path / "shared" / saved)
    there = run(shared, tmp_path / "there", STEPS, tmp_path / "apart" / saved)
    assert different(back["start"], runs[0][f"saved at {SAVED}"]) == [] == different(back["end"], runs[0]["end"])
    assert different(weights(there["end"]), weights(runs[0]["end"])) == []


def weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if name.endswith(" weight")}


def test_the_memory_engine_in_stages(tmp_path: Path) -> None:
    """The bits of the engine on the whole model: clipped, accumulated, with fewer micro-batches in the last step."""
    common: dict[str, Any] = {"gradient_accumulation_steps": 5, "per_device_train_batch_size": 1, "max_grad_norm": 0.05}
    apart = staged(2, "1f1b", **common, **BF16)
    kinds = (offload(**common, **BF16), replace(apart, strategies={**apart.strategies, **RECOMPUTE}))
    runs = [run(replace(kind, **FOUR), tmp_path / str(at), 5) for at, kind in enumerate(kinds)]
    assert max(len(each["loss"]) for each in runs) == 5
    all_equal(runs)


EXPERTS, IN_STAGES = Kind(model=MIXTRAL), replace(pipeline(2), model=MIXTRAL)


def test_weights_that_hugging_face_converts(tmp_path: Path) -> None:
    """Mixtral's experts are one tensor in the model and many in the file, which the model could not read back."""
    all_equal(moved(tmp_path, EXPERTS, EXPERTS, IN_STAGES))


def test_weights_that_hugging_face_renames(tmp_path: Path) -> None:
    """GPT-NeoX's head has another name in the file, which ranks that have parts of the weights do not read."""
    unknown = ("num_key_value_heads", "head_dim")
    model = {key: value for key, value in LLAMA.items() if key not in unknown} | {"model_type": "gpt_neox"}
    all_equal(moved(tmp_path, replace(pipeline(2), model=model), replace(plain(), model=model)))


def test_adapters(tmp_path: Path) -> None:
    first = Kind(1, OFFLOAD, BF16, section=LORA)
    all_equal(moved(tmp_path, first, replace(first, strategies={"zero": {"stage": 2}})))


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of plain training on one rank."""
    folder = tmp_path_factory.mktemp("plainly")
    run(plain(), folder, STEPS)
    return folder / f"checkpoint-{SAVED}"


def test_the_learning_rate_is_that_of_the_run(tmp_path: Path, plainly: Path) -> None:
    found = run(zero(1, learning_rate=3e-2), tmp_path, STEPS, plainly)
    assert found["start"]["lr"].tolist() == [3e-2 * (2 / 3)]  # warming up over three steps


def test_a_schedule_with_history(tmp_path: Path) -> None:
    kind = plain(
        lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1, warmup_steps=None,
        lr_scheduler_kwargs={"patience": 0, "threshold": 1.0},
    )  # fmt: skip
    runs = moved(tmp_path, kind, kind)
    all_equal(runs)
    assert runs[0][f"saved at {SAVED}"]["lr"].item() < 1e-2


@pytest.mark.slow
def test_ends_with_the_best_weights(tmp_path: Path) -> None:
    """Under every strategy; masters go back with the weights."""
    best = {
        "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1,
        "greater_is_better": True, "metric_for_best_model": "loss", "learning_rate": 0.1, "warmup_steps": 0,
    }  # fmt: skip
    for name, kind in {"zero": zero(HIGHEST_STAGE, 2, **best, **BF16), "offload": offload(2, **best, **BF16)}.items():
        found = run(kind, tmp_path / name, STEPS)
        names = [key for key in found["end"] if key.endswith(" weight")]
        saved = [f"saved at {step}" for step in range(1, STEPS + 1)]
        back = [all(torch.equal(found["end"][key], found[each][key]) for key in names) for each in saved]
        assert back[:-1].count(True) == 1 and not back[-1], f"{name}: the worst by loss is not the last"


REFUSED: Mapping[str, tuple[Kind, str]] = {
    "rule": (plain(optim="sgd"), "saved by AdamW, this optimizer is SGD: train on with the rule that saved it"),
    "shape": (Kind(model={"hidden_size": 64}), "lm_head.weight: saved as [128, 32], the model has [128, 64]"),
    "parameters": (Kind(section=LORA), "not in the save; train the same parameters as the run that saved"),
    "dtype": (
        Kind(section={"dtype": "bfloat16"}), "exp_avg was saved in torch.float32, and here it would be torch.bfloat16"
    ),
}  # fmt: skip


def said(ranks: Ranks, jobs: Sequence[Job]) -> dict[str, str]:
    """The last line of the error of each."""
    found = {}
    for job in jobs:
        with pytest.raises(Exception) as caught:
            in_turn(ranks, [job])
        found[job[0]] = str(caught.value).rstrip().splitlines()[-1]
        forget_run()
    return found


def test_refused(tmp_path: Path, plainly: Path) -> None:
    jobs = [(name, kind.config(tmp_path / name, STEPS), str(plainly)) for name, (kind, _) in REFUSED.items()]
    for name, line in run_world(1, said, jobs).items():
        assert REFUSED[name][1] in line


# --- what is in the files is data ------------------------------------------------------------------------------------


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


FORMER = (
    "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth", "latest",
    "training_args.bin", "pytorch_model.bin", "adapter_model.bin", "global_step2/mp_rank_00_model_states.pt",
    "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
)  # fmt: skip


def _replaced(ranks: Ranks, config: Any, mark: str) -> dict[str, Any]:
    """Save, put a pickle and then half of the file in place of every file of the checkpoint, and load."""
    import pickle

    from deepstow.trainer.errors import ConfigError
    from deepstow.trainer.run.checkpoints import training_state

    trainer = made(ranks, config)
    trainer.train()
    checkpoint = Path(config.training.output_dir) / f"checkpoint-{SAVED}"
    payload = pickle.dumps(Payload(Path(mark)))
    for name in FORMER:
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(payload)
    found: dict[str, Any] = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        kept = path.read_bytes()
        for content in (payload, kept[: len(kept) // 2]):
            path.write_bytes(content)
            try:
                training_state.load(trainer, checkpoint)
                training_state.load_random_state(trainer, checkpoint)
                said = []
            except ConfigError as error:
                said = list(error.lines)
            found.setdefault(str(path.relative_to(checkpoint)), []).append(said)
        path.write_bytes(kept)
    training_state.load(trainer, checkpoint)
    trainer.accelerator.free_memory()
    return found


def _each_replaced(ranks: Ranks, configs: Sequence[Any], mark: str) -> list[dict[str, Any]]:
    found = []
    for config in configs:
        found.append(_replaced(ranks, config, mark))
        forget_run()
    return found


def test_no_file_is_unpickled(tmp_path: Path) -> None:
    kinds = {"offload": offload(), "zero": zero(HIGHEST_STAGE)}
    configs = [kind.config(tmp_path / name, SAVED + 1) for name, kind in kinds.items()]
    for found in run_world(1, _each_replaced, configs, str(tmp_path / "mark")):
        _only_data(found)
    assert not (tmp_path / "mark").exists()


def _only_data(found: dict[str, Any]) -> None:
    read = {name for name, said in found.items() if said != [[], []]}
    assert read == {
        "model.safetensors", "scheduler.json", "random_state-00000-of-00001.json",
        "optimizer/optimizer.json", "optimizer/optimizer-00000-of-00001.json",
        "optimizer/optimizer-00000-of-00001-001.safetensors",
    }  # fmt: skip
    for name in read:
        for said in found[name]:
            assert len(said) == 1 and name in said[0], f"{name}: {said}"

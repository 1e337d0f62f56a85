"""``stowed(AnyTrainer)`` trains what the Trainer alone trains, bit for bit, with default arguments: clipping, bf16
autocast, recomputation, adapters, several ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from deepstow.trainer.run.checkpoints import training_state
from deepstow.trainer.run.stowed_trainer import stowed
from tests.helpers.trainers import ON_POLICY, TRAINERS, llama, stock, trained, unlike

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
TRAVEL: dict[str, Any] = {"site": "host", "weights": "streamed", "prefetch": 0}
BATCH = {"batch": (2, 12)}


def travelling(base: type) -> type:
    """The arguments of TRL's Trainers say how long rows are."""
    return stowed(base, **TRAVEL, **({} if hasattr(base, "_tag_names") else BATCH))


# What these have beside the others is in the Trainer's or TRL's code alone: other tests below train the first two.
ALIKE = ("Trainer", "SFTTrainer", "DPOTrainer", "RewardTrainer")


@pytest.mark.parametrize("name", [name for name in TRAINERS if name not in ALIKE])
def test_as_the_trainer_alone(name: str, tmp_path: Path) -> None:
    assert unlike(TRAINERS[name], travelling, str(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ON_POLICY if name != "GKDTrainer"])
def test_as_the_trainer_alone_whose_student_answers(name: str, tmp_path: Path) -> None:
    """Weights that travel generate, too; the teacher is TRL's and stays where TRL has it."""
    assert unlike(ON_POLICY[name], lambda base: stowed(base, **TRAVEL, **BATCH), str(tmp_path)) == []


def test_moments_in_fewer_bits(tmp_path: Path) -> None:
    """Another result than the Trainer's alone, and not by much."""
    trainer, weights, _ = trained(
        TRAINERS["Trainer"], lambda base: stowed(base, moments_as="int8", weights="streamed", **BATCH), str(tmp_path)
    )
    assert trainer.plan.layout.moments_as == "int8"
    assert trainer.plan.facts.run.evaluation_rows == trainer.args.per_device_eval_batch_size > 0
    _, alone, _ = trained(TRAINERS["Trainer"], lambda base: base, str(tmp_path))
    apart = [(weights[name] - value).norm() / value.norm() for name, value in alone.items()]
    assert 0 < max(apart) < 0.05


def test_from_a_budget(tmp_path: Path) -> None:
    """The plan knows what the Trainer's own loss reads, if it is told how the model is called."""
    ids = torch.zeros(2, 12, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids, "fused_lm_head": True}
    trainer, weights, _ = trained(
        TRAINERS["SFTTrainer"], lambda base: stowed(base, gpu_memory="2000KiB", batch=call), str(tmp_path)
    )
    assert trainer.plan.facts.run.max_grad_norm == 1.0
    assert {param.name for param in trainer.plan.facts.params if param.elsewhere} == {"lm_head.weight"}
    assert sum(unit.saved_bytes for unit in trainer.plan.facts.units) > 0
    _, alone, _ = trained(TRAINERS["SFTTrainer"], lambda base: base, str(tmp_path))
    assert all(torch.equal(weights[name], value) for name, value in alone.items())


def test_saved_bucket_by_bucket_and_resumed(tmp_path: Path) -> None:
    """A run that is resumed in the middle, by a new process as it were, ends with the bits of one that is not."""

    def make(wrap: Callable[[type], type], folder: str, **more: Any) -> Any:
        return stock(wrap, folder, save_strategy="steps", save_steps=1, **more)

    _, whole, _ = trained(make, lambda base: base, str(tmp_path / "plain"))
    trained(make, travelling, str(tmp_path / "ours"))
    saved = {path.name for path in (tmp_path / "ours" / "checkpoint-1" / "optimizer").iterdir()}
    assert any(name.endswith(".safetensors") for name in saved)
    again = make(travelling, str(tmp_path / "ours"))
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-1"))
    assert all(torch.equal(whole[name], value) for name, value in again.model.state_dict().items())

    stocks = make(travelling, str(tmp_path / "plain"))  # what the Trainer alone has saved is read, too
    stocks.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert all(torch.equal(whole[name], value) for name, value in stocks.model.state_dict().items())


def test_generators_as_a_run_has_saved_them(tmp_path: Path) -> None:
    trainer = stock(travelling, str(tmp_path))
    training_state.save_random_state(trainer, tmp_path)
    drawn = torch.rand(3)
    trainer._load_rng_state(str(tmp_path))
    assert torch.equal(torch.rand(3), drawn)


def of_others(model: Any) -> tuple[Any, Any]:
    """Groups and rates are those of whatever made the optimizer; a scheduler goes on driving them."""
    vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 1e-4, "weight_decay": 0.0}
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}, vectors]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_optimizers_and_schedulers_of_others(tmp_path: Path) -> None:
    """Also of a Trainer that evaluates before it trains."""
    losses = []

    def make(wrap: Callable[[type], type], folder: str) -> Any:
        trainer = stock(wrap, folder, optimizers=of_others)
        losses.append(trainer.evaluate()["eval_loss"])
        return trainer

    assert unlike(make, travelling, str(tmp_path)) == []
    assert losses[0] == losses[1]


class Multiplies(Trainer):
    """Its gradients are multiplied by a factor of its own before Hugging Face's loop clips them."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(7 / 3)
        return loss


def test_gradients_that_a_training_step_multiplies(tmp_path: Path) -> None:
    make = partial(stock, base=Multiplies, gradient_accumulation_steps=1)
    assert unlike(make, travelling, str(tmp_path)) == []


def test_a_forward_that_cannot_be_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It looks at a value, so the plan is made without a batch."""

    def make(wrap: Callable[[type], type], folder: str) -> Any:
        trainer = TRAINERS["SFTTrainer"](wrap, folder)
        trainer.model.model.layers[0].register_forward_hook(
            lambda module, args, out: out * int(out.numel() > out.sum())
        )
        return trainer

    assert unlike(make, travelling, str(tmp_path)) == []
    assert [line for line in capsys.readouterr().out.splitlines() if "not counted" in line] == [
        "what backward keeps is not counted (forward cannot be counted on tensors without values: "
        "DataDependentOutputException: aten._local_scalar_dense.default)"
    ]


@pytest.mark.parametrize(("name", "rows"), [("SFTTrainer", 2), ("DPOTrainer", 4), ("RewardTrainer", 4)])
def test_the_batch_of_the_arguments(name: str, rows: int, tmp_path: Path) -> None:
    """As many rows as a call has, of as many tokens as a row may have."""
    trainer = TRAINERS[name](travelling, str(tmp_path))
    trainer.create_optimizer()
    known = trainer.plan.facts
    assert known.run.evaluation_rows == 0, "none are held out"
    assert (known.run.micro_batch, known.run.sequence) == (rows, trainer.args.max_length)
    assert sum(unit.saved_bytes for unit in known.units) > 0


@pytest.mark.slow
def test_two_trainers_on_one_model(tmp_path: Path) -> None:
    """The second begins with an optimizer of its own, as ever."""

    def twice(wrap: Callable[[type], type]) -> dict[str, Any]:
        model = llama()
        for number in range(2):
            trainer = stock(wrap, str(tmp_path / str(number)))
            wrap(Trainer)(model, trainer.args, train_dataset=trainer.train_dataset).train()
        return {name: value.clone() for name, value in model.state_dict().items()}

    ours = twice(travelling)
    assert all(torch.equal(ours[name], value) for name, value in twice(lambda base: base).items())


def prepares(base: Any) -> Any:
    own = {"_prepare_inputs": lambda self, inputs: super(base, self)._prepare_inputs(inputs)}
    return stowed(type("Prepares", (base,), own), order="layers", **BATCH)


def hooked(model: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer, None


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"wrap": stowed},
            r"batch is missing, since TrainingArguments .* write batch=\(rows, tokens\)",
        ),
        ({"optim": "adafactor"}, "updates element by element, as .* RMSprop, SGD do, and not with Adafactor: write"),
        ({"optim": "lion_8bit"}, "Lion of a stowed trainer: parameter 0 of group 0 has optim_bits = 8 of its own"),
        (
            {"fp16": True, "wrap": lambda base: stowed(base, update_in_backward=True, **BATCH), "max_grad_norm": 0.0},
            "update_in_backward=True: fp16's loss scale needs all gradients first",
        ),
        ({"bf16_full_eval": True}, "bf16_full_eval: a stowed trainer evaluates in the precision of training"),
        ({"torch_compile": True}, "torch_compile=True: weights travel in this plan"),
        ({"wrap": prepares}, "order='layers': this trainer prepares inputs by itself, step by step"),
        ({"optimizers": hooked}, "this optimizer has step hooks"),
        (
            {"wrap": lambda base: stowed(base, gpu_memory="10KiB", **BATCH)},
            r"gpu_memory = .*10KiB.*needed.*write \d+KiB or more",
        ),
    ],
    ids=["batch", "rule", "bits", "fp16", "full_eval", "compiled", "order", "hooks", "budget"],
)
def test_refused(tmp_path: Path, more: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line) as refused:
        stock(**{"wrap": travelling, "folder": str(tmp_path), **more}).train()
    assert "\n" not in str(refused.value) or "10KiB" in line


def test_what_is_no_trainer() -> None:
    with pytest.raises(TypeError, match=r"is not a subclass of transformers.Trainer"):
        stowed(dict)
    with pytest.raises(TypeError, match="max_grad_norm: the Trainer's own arguments decide that"):
        stowed(Trainer, max_grad_norm=1.0)

"""Which private methods of Hugging Face's Trainer ours override, and why nothing public does it."""

import re
from pathlib import Path

import transformers

from deepstow.trainer.run.stowed_trainer import StowedTrainer
from deepstow.trainer.run.trainer import Trainer

TESTS = Path(__file__).resolve().parents[1]
OURS = (StowedTrainer, Trainer)
# Of each method the module that overrides it, why, and the test that would notice a change.
OVERRIDDEN = {
    "_save_checkpoint": (
        "trainer",
        "it writes into checkpoint-N itself; on_save comes after that, and earlier events also when nothing is saved",
        "unit/test_sealing.py::test_training_goes_on",
    ),
    "_prepare_for_training": (
        "trainer",
        "with DeepSpeed it loads DeepSpeed's own checkpoint; before it there is no optimizer to load ours into",
        "parity/test_moves.py::test_from_plain",
    ),
    "_init_training_state": (
        "trainer",
        "of a stream without a length it takes all steps for those of the first pass",
        "parity/test_tasks.py::test_a_stream_goes_on_in_a_later_pass",
    ),
    "_load_from_checkpoint": (
        "trainer",
        "it loads the model's files into every rank, which may have a share only, before ours can be",
        "parity/test_moves.py::test_stages",
    ),
    "_load_best_model": (
        "trainer",
        "the same at the end; callbacks of on_train_end that upload the model come before ours",
        "parity/test_moves.py::test_ends_with_the_best_weights",
    ),
    "_load_rng_state": (
        "stowed_trainer",
        "the states belong before an epoch's order is drawn, or after its skipped batches; only the loop knows which",
        "e2e/test_interrupted.py::test_a_signal_saves_at_the_end_of_the_step",
    ),
    "_save_optimizer_and_scheduler": (
        "stowed_trainer",
        "it asks the optimizer for one state dict, a second copy of all moments",
        "parity/test_trainers.py::test_saved_bucket_by_bucket_and_resumed",
    ),
    "_load_optimizer_and_scheduler": (
        "stowed_trainer",
        "the same on the way back",
        "parity/test_trainers.py::test_saved_bucket_by_bucket_and_resumed",
    ),
    "_move_model_to_device": (
        "stowed_trainer",
        "place_model_on_device belongs to the user's arguments, and bf16_full_eval moves the model without asking it",
        "accelerator/test_trainer.py::test_offload_has_the_bits_of_plain_training",
    ),
}


def test_only_these_are_overridden() -> None:
    """A method that a release of Transformers has renamed is missed here."""
    assert {(name, f"deepstow.trainer.run.{module}") for name, (module, _, _) in OVERRIDDEN.items()} == {
        (name, kind.__module__)
        for kind in OURS
        for name in vars(kind)
        if re.match(r"_(?!_)", name) and hasattr(transformers.Trainer, name)
    }


def test_each_has_its_test() -> None:
    for _, _, test in OVERRIDDEN.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(), test

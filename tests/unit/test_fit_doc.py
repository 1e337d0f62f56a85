"""docs/fit.md: its commands are those of the generator, and the arithmetic by hand counts what the model has."""

import pytest

from benchmarks import fit_doc
from tests.helpers.tiny import run_config
from trainer.planning.facts import count_model

SMALL = {"llama": (64, 96, 2, 4, 4, 128), "qwen2": (64, 96, 3, 4, 2, 128)}


@pytest.mark.parametrize("kind", SMALL)
def test_parameters_by_hand_are_those_of_the_model(kind: str) -> None:
    config = {"model_type": kind, **dict(zip(fit_doc.NAMES, SMALL[kind], strict=True))}
    lora = {"r": fit_doc.LORA_RANK, "target_modules": "all-linear"}
    units = count_model(run_config(config, model={"lora": lora})).units
    trained = sum(unit.num_trainable for unit in units)
    assert trained == fit_doc.num_adapters(SMALL[kind])
    assert sum(unit.num_params for unit in units) - trained == fit_doc.num_params(kind, SMALL[kind])


def test_the_page_has_a_table_and_the_arithmetic_for_every_model() -> None:
    section = "\n".join(fit_doc.section("small", "llama", SMALL["llama"]))
    published = fit_doc.PAGE.read_text()
    headings = [line for line in published.splitlines() if line.startswith("## ")]
    assert headings == [f"## {name}" for name in fit_doc.MODELS]
    assert "does it fit? llama on NVIDIA GeForce RTX 4090: 24.0 GiB of device memory, 64.0 GiB of host" in section
    assert f"P = {fit_doc.num_params('llama', SMALL['llama']):,} parameters" in section
    assert (
        section.count("launch/plan.py --fit --profile") == 1 and published.count("launch/plan.py --fit --profile") == 4
    )

"""``deepstow fit``: every row is the plan of a config that can be written, and says what is missing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstow.launch.plan import main
from deepstow.strategies.core.facts import Tier
from deepstow.strategies.planner import placement_search
from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, TooLargeError, report
from deepstow.trainer.machine.probe import Machine
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning import fit
from deepstow.trainer.planning.facts import ENGINE_HOST_BYTES
from deepstow.trainer.planning.fit import Fit, FitRow, config_of, explained, lines, unwritten
from deepstow.trainer.planning.from_config import plan_of
from tests.helpers.tiny import run_config

SIZES = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip
OVERRIDES = [f"model.config.{name}={value}" for name, value in SIZES.items()]
SMALL = ["data.max_length=256", "training.per_device_train_batch_size=2"]
ROW = ["strategies.recompute={policy: auto}", "strategies.offload={}"]
HERE = Ranks()


def card(device: int, host: int = 1 << 36) -> Machine:
    """A card of so many bytes, at the rates of a real one."""
    return replace(profile("rtx4090-pcie4"), device_total_bytes=device, host_available_bytes=host)


def rows_of(machine: Machine, *overrides: str) -> list[FitRow]:
    config = config_of(None, [*OVERRIDES, *SMALL, *overrides], accelerated=True)
    return Fit(config, HERE, machine, written=unwritten(config)).rows()


@pytest.fixture(scope="module")
def tight() -> list[FitRow]:
    """On a card that holds the training state of neither all weights nor what plain training saves."""
    return rows_of(card(5 << 20))


@pytest.fixture(autouse=True)
def fewer_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of single tests have rows of two times the ranks only, which is quicker."""
    monkeypatch.setattr(fit, "MORE_RANKS", (2,))


def test_what_does_not_fit_as_it_is_fits_otherwise(tight: list[FitRow]) -> None:
    by_name = {(row.training, row.ranks): row for row in tight}
    assert not by_name["full", 1].fits and not by_name["LoRA", 1].fits
    assert by_name["full + recompute + offload", 1].fits and by_name["LoRA + recompute + offload", 1].fits
    assert {row.ranks for row in tight} == {1, 2, 4, 8}
    lora, qlora = by_name["LoRA", 1], by_name["QLoRA", 1]
    saved = [row.needed[Tier.DEVICE] for row in (lora, qlora)]
    linears = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # two bytes a weight become half a byte, and scales
    assert 1.2 * linears < saved[0] - saved[1] < 1.5 * linears
    assert lines(tight)[0].startswith("full fine-tuning fits: full + ")


def test_a_row_is_the_plan_of_the_config_that_its_lines_write(tight: list[FitRow], tmp_path: Path) -> None:
    """The lines are pasted into a file that has what a user has before; its plan, as brief, has the bytes of a row."""
    given = {"model": {"config": SIZES, "tokenizer": "x"}, "data": {"path": "my.jsonl", "max_length": 256}}
    given |= {"training": {"output_dir": str(tmp_path), "per_device_train_batch_size": 2}}
    some = [row for row in tight if row.fits and row.ranks == 1]
    assert len(some) >= 2
    for row in (some[0], some[-1]):
        pasted = {name: dict(section) for name, section in given.items()}
        for line in row.write:
            ((name, section),) = yaml.safe_load(line).items()
            pasted.setdefault(name, {}).update(section)
        path = tmp_path / "x.yaml"
        path.write_text(yaml.safe_dump(pasted))
        config = load(path)
        brief = {name: each.briefly() for name, each in config.strategies.items()}
        plan = plan_of(config.model_copy(update={"strategies": brief}), HERE, card(5 << 20))
        assert row.needed == {home: plan.peak(home) for home in Tier}, row.training


def test_what_the_machine_has_is_kept() -> None:
    rows = rows_of(card(5 << 20), "strategies.offload={disk: /fast, disk_memory: 1GiB, site: host}")
    here = [row.tree["strategies"]["offload"] for row in rows if row.ranks == 1 and "offload" in row.strategies]
    assert here and all(each == {"disk": "/fast", "disk_memory": "1GiB"} for each in here)
    assert not any(row.refused for row in rows if row.ranks == 2)


@pytest.mark.slow
def test_state_in_fewer_bits_is_an_answer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried where all of it does not fit, until it does."""
    monkeypatch.setattr(fit, "MORE_RANKS", ())
    machine = card(5 << 20, int(((1 << 30) + (6 << 20)) / 0.9))
    rows = rows_of(machine, "model.config.num_hidden_layers=12")
    found = [row for row in rows if row.kind == "full (inexact)"]
    assert [row.tree["strategies"]["offload"] for row in found] == [{"moments": "bf16"}, {"moments": "int8"}]
    assert [row.fits for row in found] == [False, True]
    whole, inexact, *_ = lines(rows)
    assert whole.startswith(
        "full fine-tuning does not fit on 1 rank; nearest is full + recompute + offload, host lacks"
    )
    assert inexact.startswith("full fine-tuning with inexact state fits: full (inexact) + recompute + offload, ")
    least = card(5 << 20, int(((1 << 30) + (8 << 20)) / 0.9))
    rows = rows_of(least, "model.config.num_hidden_layers=24")
    *others, last = (row for row in rows if row.kind == "full (inexact)")
    assert lines(rows)[-1] == "in every row that has no other: training: {bf16: true}"
    assert len(others) == 3 and not any(row.fits for row in others) and last.fits
    passing = "offload: {moments: int8, masters: bf16, gradients: passing}"
    assert last.write[0] == "training: {max_grad_norm: 0.0, bf16: true}" and passing in last.write[1]
    small = card(5 << 20, 300 << 20)
    assert not [row for row in rows_of(small, "training.optim=sgd") if row.kind == "full (inexact)"], "of AdamW alone"


def test_adapters_that_a_model_does_not_take_are_a_row() -> None:
    """Nobody wrote ``model.lora``: the rest of the table is there, and the reason once, without PEFT's own layers."""
    model = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 128}
    config = run_config(model)
    rows = Fit(config, HERE, card(1 << 30)).rows()
    first, second = lines(rows)[:2]
    assert first.startswith("full fine-tuning fits") and second == "LoRA is refused on 1 rank"
    (lora,) = (row for row in rows if row.kind == "LoRA")
    assert "incompatible with Mamba" in lora.refused and "base_layer" not in lora.refused
    with pytest.raises(ConfigError, match="incompatible with Mamba"):
        Fit(run_config(model, model={"lora": {"r": 4, "target_modules": "all-linear"}}), HERE, card(1 << 30)).rows()


def test_what_is_for_one_rank_is_refused_once_in_words() -> None:
    rows = rows_of(card(5 << 20), "prune={method: magnitude}", "strategies.offload={moments: int8}")
    assert next(row for row in rows if row.kind == "LoRA").refused.startswith("model.lora: cannot go with prune")
    assert [row.ranks for row in rows if row.ranks > 1] == [2]
    written = [row.tree["strategies"]["offload"] for row in rows if "offload" in row.strategies]
    assert written and all(each == {"moments": "int8"} for each in written)
    (over,) = (row for row in rows_of(card(5 << 20, 300 << 20), "strategies.offload={moments: int8}") if row.ranks > 1)
    assert over.strategies == ("zero", "offload") and over.tree["strategies"]["offload"] == {}


def test_the_table_takes_no_climbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the config as it is, whose plan is the one of a run."""
    climbs = []
    monkeypatch.setattr(placement_search, "fastest", lambda *given: climbs.append(given))
    config = config_of(None, [*OVERRIDES, *SMALL, "strategies.offload={}"], accelerated=True)
    asked = Fit(config, HERE, card(1 << 25), written=unwritten(config))
    offloaded = [row for row in asked.rows() if "offload" in row.strategies and row.seconds is not None]
    assert offloaded and not climbs
    asked.rows(as_given=True)
    assert climbs


def test_missing_is_what_lies_beyond_nine_tenths(tight: list[FitRow]) -> None:
    (plain,) = (row for row in tight if row.training == "full" and row.ranks == 1)
    assert plain.missing == {Tier.DEVICE: plain.needed[Tier.DEVICE] - int(0.9 * (5 << 20))}


def test_on_a_large_card_nothing_is_added_that_does_nothing() -> None:
    machine = card(1 << 36)
    assert machine.rates is not None  # launching and casting cost nothing: offload does without autocast
    found = rows_of(replace(machine, rates=replace(machine.rates, launch_s=0.0, device_bytes_per_s=1e18)))
    assert all(row.fits for row in found)
    assert not any("recompute" in row.training for row in found)  # it would keep all
    assert found[0].seconds is not None and found[0].seconds > 0
    assert lines(found)[0].startswith("full fine-tuning fits: full,")


def test_a_refusal_for_memory_is_a_row_with_its_numbers() -> None:
    """With too little host memory for the state that has to leave, the planner refuses; the row has its numbers."""
    machine = card(5 << 20, host=int((ENGINE_HOST_BYTES + (1 << 19)) / 0.9))
    (row,) = (row for row in rows_of(machine) if row.training == "full + recompute + offload")
    config = config_of(None, [*OVERRIDES, *SMALL, *ROW], accelerated=True)
    with pytest.raises(TooLargeError) as refused:
        plan_of(config, HERE, machine)
    home = Tier(refused.value.tier)
    assert row.needed == {home: refused.value.needed}
    assert row.missing == {home: refused.value.needed - refused.value.budget}


def test_what_the_config_has_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing of Hugging Face's would hide in every row; adapters are not all weights."""
    monkeypatch.setattr(fit, "_saving", lambda: ["recompute"])
    config = run_config(SIZES, model={"lora": {"r": 4}, "dtype": "bfloat16"}, bf16=True, gradient_checkpointing=True)
    rows = Fit(config, HERE, card(1 << 36)).rows(as_given=True)
    whole, adapters = (next(row for row in rows if row.kind == kind) for kind in ("full", "LoRA"))
    assert whole.write == ("model: {dtype: float32, lora: null}", "training: {gradient_checkpointing: false}")
    assert adapters.write == ("training: {gradient_checkpointing: false}",)


def test_a_config_in_stages_is_compared_with_whole_copies() -> None:
    more = ["strategies.pipeline={stages: 2}", "training.gradient_accumulation_steps=2"]
    config = config_of(None, [*OVERRIDES, *SMALL, *more], accelerated=True)
    given, *others = Fit(config, Ranks(world_size=2, local_world_size=2), card(1 << 36)).rows(as_given=True)
    assert given.given and given.needed[Tier.DEVICE] < others[0].needed[Tier.DEVICE]
    assert others and not any(row.refused for row in others)


@pytest.mark.slow
def test_rows_too_long_for_a_card_are_divided_over_those_of_a_machine() -> None:
    """By as many ranks as divide the heads, with all that saves memory; and only where nothing else fits."""
    long = ["data.max_length=2048", "training.per_device_train_batch_size=1"]
    config = config_of(None, [*OVERRIDES, *long], accelerated=True)
    ranks = Ranks(world_size=6, local_world_size=6)
    given = Fit(config, ranks, card(10 << 20), written=unwritten(config))
    *others, last = given.rows()
    assert not any(row.fits for row in others if row.kind == "full" and row.ranks == 6)
    assert last.training == "full + sequence + zero + recompute + offload" and last.fits
    assert last.write[-1].startswith("strategies: {sequence: {degree: 2}, zero: {stage: 3}, ")
    assert not any("sequence" in row.training for row in replace(given, machine=card(1 << 36)).rows())


def test_a_refusal_ends_with_the_table_and_a_broken_table_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(None, [*OVERRIDES, *SMALL, "strategies.offload={gpu_memory: 100KiB}"], accelerated=True)

    def refused() -> list[str]:
        with pytest.raises(TooLargeError) as error, explained(config, HERE, card(1 << 36)):
            plan_of(config, HERE, card(1 << 36))
        report(error.value)
        return capsys.readouterr().err.splitlines()

    said = refused()
    assert said[0].startswith('command line: strategies.offload.gpu_memory = "100KiB": ') and "are needed" in said[0]
    assert any(line.startswith("full fine-tuning fits: ") for line in said)
    assert not any("LoRA " in line for line in said[:-1]), "the first way that fits is the last one that is counted"
    assert said[-1] == "more ways of training, and more ranks: deepstow fit"

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Fit, "lines", broken)
    assert refused() == [said[0], "what would fit cannot be shown: ZeroDivisionError: a mistake"]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--gpu-memory", "8MiB", "--host-memory", "4GiB"]
    assert main(["--fit", *sizes, *OVERRIDES, *SMALL]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("does it fit? llama on a GPU: 8.0 MiB of device memory, 4.0 GiB of host memory")
    assert "2 x 256 tokens, bf16" in said.out
    assert not any(" s  " in line for line in said.out.splitlines()), "the rates of a card that is not here are unknown"
    assert "planning full + offload on 1 rank" in said.err


def test_a_model_that_is_not_one(capsys: pytest.CaptureFixture[str]) -> None:
    misspelt = ["model.config.model_type=llama", "model.config.hidden_sise=64"]
    for arguments, says in (
        ([], "--fit: which model? Give --config FILE, --model NAME_OR_FOLDER, or model.config.model_type=llama "),
        (
            ["--model", "./no/such/folder"],
            "command line: model.name_or_path = './no/such/folder': there is no such folder",
        ),
        (misspelt, "command line: model.config.hidden_sise = 64"),
    ):
        assert main(["--fit", "--profile", "rtx4090-pcie4", *arguments]) == 2
        said = capsys.readouterr()
        assert said.err.splitlines()[-1].startswith(says) and said.out == ""


def test_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    monkeypatch.setattr(fit, "_saving", list)  # the rows without strategies are enough

    kind, sizes = SIZES["model_type"], {name: value for name, value in SIZES.items() if name != "model_type"}
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    assert main(["--fit", "--profile", "rtx4090-pcie4", "--model", str(tmp_path), *SMALL]) == 0
    assert capsys.readouterr().out.startswith(f"does it fit? {tmp_path} on NVIDIA GeForce RTX 4090: 23.6 GiB")


def test_every_answer_has_its_words() -> None:
    short = FitRow(missing={Tier.HOST: 3 << 30}, needed={Tier.HOST: 5 << 30}, write=("a: {}", "b: {}"))
    other = FitRow(strategies=("zero",), ranks=4, refused="why not", write=("a: {}",))
    said = lines([short, other])
    assert said[0] == "full fine-tuning does not fit on 1 rank; nearest is full, host lacks 3.0 GiB"
    assert said[-1] == "in every row: a: {}"
    assert any("no: refused" in line and line.endswith("(why not)") for line in said)
    fine = FitRow(strategies=("zero",), ranks=4, needed={Tier.DEVICE: 1, Tier.HOST: 1})
    assert lines([short, fine])[0].endswith("; on 4 ranks full + zero fits")

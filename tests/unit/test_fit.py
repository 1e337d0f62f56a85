"""``deepstow fit``: every row is the plan of a config that can be written, and says what is missing."""

import re
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import yaml

from deepstow.launch import plan as plan_command
from deepstow.launch.fit import main
from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.on_disk import disk_bytes
from deepstow.strategies.core.sizes import human
from deepstow.trainer.config.load import build, load, load_tree
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, TooLargeError, report
from deepstow.trainer.machine.probe import Machine
from deepstow.trainer.machine.profiles import profile
from deepstow.trainer.planning import fit
from deepstow.trainer.planning.facts import ENGINE_HOST_BYTES
from deepstow.trainer.planning.fit import Fit, FitRow, changes, chosen, config_of, explained, lines, unwritten
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
    return rows_of(card(5 << 20), "model.config.num_hidden_layers=1")


@pytest.fixture
def whole_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows of adapters."""
    plain = fit._plain
    monkeypatch.setattr(fit, "_plain", lambda config: plain(config)[:1])


def test_what_does_not_fit_as_it_is_fits_otherwise(tight: list[FitRow]) -> None:
    by_name = {row.training: row for row in tight}
    assert not by_name["full"].fits and not by_name["LoRA"].fits
    assert by_name["full + recompute + offload"].fits and by_name["LoRA + recompute + offload"].fits
    assert by_name["full"].missing == {Tier.DEVICE: by_name["full"].needed[Tier.DEVICE] - int(0.9 * (5 << 20))}
    lora, qlora = by_name["LoRA"], by_name["QLoRA"]
    saved = [row.needed[Tier.DEVICE] for row in (lora, qlora)]
    linears = 4 * 64 * 64 + 3 * 64 * 128  # two bytes a weight become half a byte, and scales
    assert 1.2 * linears < saved[0] - saved[1] < 1.5 * linears
    assert lines(tight)[0].startswith("full fine-tuning fits: full + ")


def test_a_row_is_the_plan_of_the_config_that_its_lines_write(tight: list[FitRow], tmp_path: Path) -> None:
    """They change what a user has before, as on the command line; its plan, as brief, has the bytes of a row."""
    model = {"config": SIZES | {"num_hidden_layers": 1}, "tokenizer": "x"}
    given = {"model": model, "data": {"path": "my.jsonl", "max_length": 256}}
    given |= {"training": {"output_dir": str(tmp_path), "per_device_train_batch_size": 2}}
    some = [row for row in tight if row.fits]
    assert len(some) >= 2
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(given))
    for row in (some[0], some[-1]):
        config = load(path, row.write)
        brief = {name: each.briefly() for name, each in config.strategies.items()}
        plan = plan_of(config.model_copy(update={"strategies": brief}), HERE, card(5 << 20))
        assert row.needed == {home: plan.peak(home) for home in Tier}, row.training


@pytest.mark.slow
def test_state_in_fewer_bits_is_an_answer_of_its_own(whole_alone: None) -> None:
    """Tried where all of it does not fit into memory, until it does; with a disk all of it does."""
    machine = card(5 << 20, int(((1 << 30) + (6 << 20)) / 0.9))
    rows = rows_of(machine, "model.config.num_hidden_layers=12")
    found = [row for row in rows if row.kind == "full (inexact)"]
    assert [row.tree["strategies"]["offload"] for row in found] == [{"moments": "bf16"}, {"moments": "int8"}]
    assert [row.fits for row in found] == [False, True]
    whole, inexact, *_ = lines(rows)
    assert whole.startswith("full fine-tuning fits with a disk of 1 GB: full + recompute + offload + disk, ")
    assert inexact.startswith("full fine-tuning with inexact state fits: full (inexact) + recompute + offload, ")
    least = card(5 << 20, int(((1 << 30) + (8 << 20)) / 0.9))
    rows = rows_of(least, "model.config.num_hidden_layers=24")
    *others, last = (row for row in rows if row.kind == "full (inexact)")
    assert len(others) == 3 and not any(row.fits for row in others) and last.fits
    assert last.write[:2] == ("training.max_grad_norm=0.0", "training.bf16=true")
    assert last.write[-1] == "strategies.offload={moments: int8, masters: bf16, gradients: passing}"
    small = card(5 << 20, 300 << 20)
    assert not [row for row in rows_of(small, "training.optim=sgd") if row.kind == "full (inexact)"], "of AdamW alone"


@pytest.mark.slow
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


def test_on_a_large_card_nothing_is_added_that_does_nothing() -> None:
    machine = card(1 << 36)
    assert machine.rates is not None  # launching and casting cost nothing: offload does without autocast
    found = rows_of(replace(machine, rates=replace(machine.rates, launch_s=0.0, device_bytes_per_s=1e18)))
    assert all(row.fits for row in found)
    assert not any("recompute" in row.training for row in found)  # it would keep all
    assert found[0].seconds is not None and found[0].seconds > 0
    assert lines(found)[0].startswith("full fine-tuning fits: full,")


def test_a_host_that_is_too_small_is_named_and_how_much_would_do() -> None:
    """Of the device what training takes with that much host memory, not what it would take instead of it."""
    host = int((ENGINE_HOST_BYTES + (1 << 19)) / 0.9)
    machine = card(1 << 20, host)
    config = config_of(None, [*OVERRIDES, *SMALL, *ROW], accelerated=True)
    way = fit._plain(config)[0].using(["recompute", "offload"])
    row = Fit(config, HERE, machine)._row(way, HERE)
    with pytest.raises(TooLargeError) as refused:
        plan_of(config, HERE, machine)
    assert refused.value.tier == "device"
    with pytest.raises(TooLargeError) as alone:
        plan_of(config, HERE, card(1 << 20))
    assert row.needed[Tier.DEVICE] == alone.value.needed < refused.value.needed
    assert row.missing[Tier.DEVICE] == alone.value.needed - int(0.9 * (1 << 20))
    assert row.lacks.startswith(f"host lacks {human(row.missing[Tier.HOST])}, device lacks ")
    enough = replace(machine, device_total_bytes=int(row.needed[Tier.DEVICE] / 0.9) + 1)
    with pytest.raises(TooLargeError) as host_too_small:
        plan_of(config, HERE, enough)
    assert (host_too_small.value.tier, host_too_small.value.needed) == ("host", row.needed[Tier.HOST])
    larger = host + int(row.missing[Tier.HOST] / 0.9) + 1
    plan_of(config, HERE, replace(enough, host_available_bytes=larger))
    words = f"with {human(larger)} of host memory {human(row.needed[Tier.DEVICE])} of the device do"
    assert row.instead == words and any(line.endswith(f"({words})") for line in lines([row]))


def test_with_a_disk_what_memory_does_not_hold(whole_alone: None) -> None:
    """As many whole gigabytes as its plan takes; not where the config has a disk."""
    machine = card(5 << 20, int(((1 << 30) + (1 << 20)) / 0.9))
    rows = rows_of(machine)
    (row,) = (row for row in rows if row.disk)
    assert row.fits and row.training == "full + recompute + offload + disk"
    assert not any(other.fits for other in rows if other.kind == "full" and other is not row)
    offload = row.tree["strategies"]["offload"]
    assert offload == {"disk": fit.FOLDER, "disk_memory": "1GB"}
    layout = plan_of(build(row.tree), HERE, machine).layout
    assert layout is not None and 0 < disk_bytes(layout) <= fit.GB
    assert lines(rows)[0].startswith("full fine-tuning fits with a disk of 1 GB: full + recompute + offload + disk, ")
    disk = "strategies.offload={disk: /d, disk_memory: 2KiB}"
    named = config_of(None, [*OVERRIDES, *SMALL, disk], accelerated=True)
    assert not [*Fit(named, HERE, machine)._on_disk([row for row in rows if not row.disk])]


def write_config(folder: Path) -> Path:
    path = folder / "mine.yaml"
    model = {"config": SIZES, "tokenizer": "x", "lora": {"r": 4, "target_modules": "all-linear"}, "dtype": "bfloat16"}
    training = {"output_dir": str(folder / "run"), "bf16": True, "gradient_checkpointing": True}
    training["per_device_train_batch_size"] = 2
    tree = {"model": model, "data": {"path": "rows.jsonl", "max_length": 256}, "training": training}
    path.write_text(yaml.safe_dump(tree | {"strategies": {"zero": {"stage": 1}}}))
    return path


def test_a_row_is_written_as_a_whole_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and data are kept, what nobody set stays out, and the plan of the file is the row's."""
    plain = fit._plain
    monkeypatch.setattr(fit, "_plain", lambda config: plain(config)[:2])
    config, out = write_config(tmp_path), tmp_path / "fits.yaml"
    given = ["--profile", "rtx4090-pcie4", "--gpu-memory", "5MiB"]
    assert main([*given, "--config", str(config), "--write", str(out)]) == 0
    said = capsys.readouterr().out
    number = re.search(rf"^written: {out}, row (\d+): LoRA \+ ", said, re.MULTILINE)
    assert number is not None, "what the config trains, if it fits"
    tree = yaml.safe_load(out.read_text())
    assert tree["data"] == {"path": "rows.jsonl", "max_length": 256}
    assert tree["model"]["config"] == SIZES and tree["model"]["lora"]["r"] == 4
    assert set(tree["training"]) <= {"output_dir", "bf16", "per_device_train_batch_size", "gradient_checkpointing"}
    assert "zero" not in tree["strategies"] and tree["strategies"]
    row = next(line for line in said.splitlines() if line.split()[:2] == [number[1], "yes"])
    plan = plan_of(load(out), HERE, card(5 << 20))
    assert human(plan.peak(Tier.DEVICE)) in row
    assert plan_command.main([*given, "--config", str(out)]) == 0
    assert capsys.readouterr().out.startswith("plan: it fits. ")
    assert main([*given, "--config", str(config), "--write", str(out)]) == 2
    assert capsys.readouterr().err == f"--write {out}: is there already; name another file\n"


def test_which_row_is_written() -> None:
    config = run_config(SIZES, model={"lora": {"r": 4}, "dtype": "bfloat16"}, bf16=True)
    small = {Tier.DEVICE: 1}
    rows = [
        FitRow(missing=small),
        FitRow(strategies=("offload",), needed=small, seconds=1.0),
        FitRow(kind="LoRA", needed=small, seconds=3.0),
        FitRow(kind="LoRA", strategies=("offload",), needed=small, seconds=2.0),
    ]
    assert chosen(rows, config, None) is rows[3], "what is trained anyhow, and the fastest way"
    assert chosen(rows, run_config(SIZES), None) is rows[1]
    assert chosen(rows, config, 2) is rows[1]
    for number, words in ((1, "--row 1: full does not fit"), (5, "--row 5: there are rows 1 to 4")):
        with pytest.raises(ConfigError, match=words):
            chosen(rows, config, number)
    with pytest.raises(ConfigError, match="--write: nothing fits"):
        chosen(rows[:1], config, None)


def test_more_ranks_are_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By numbers; the column is there only then."""
    monkeypatch.setattr(fit, "_saving", lambda: ["zero"])
    given = ["--profile", "rtx4090-pcie4", *OVERRIDES, *SMALL]
    for ranks, found in (([], None), (["--ranks", "1,2"], ["1", "2"])):
        assert main([*given, *ranks]) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r" +\d|row", line)]
        assert ("  ranks  " in rows[0]) is (found is not None)
        assert found is None or ("full + zero" in rows[-1] and " 2  " in rows[-1])
    with pytest.raises(SystemExit, match="2"):
        main([*given, "--ranks", "2,x"])
    assert "must be one or more numbers from 1, as in 2 or 1,2,4,8" in capsys.readouterr().err


def test_what_the_config_has_is_taken_back() -> None:
    """Checkpointing of Hugging Face's would hide in every row; adapters are not all weights."""
    config = run_config(SIZES, model={"lora": {"r": 4}, "dtype": "bfloat16"}, bf16=True, gradient_checkpointing=True)
    whole, adapters, *_ = (changes(config.tree(), row.tree) for row in fit._plain(config))
    assert whole == ("model.dtype=float32", "model.lora=null", "training.gradient_checkpointing=false")
    assert adapters == ("training.gradient_checkpointing=false",)


def test_changes_are_those_of_a_command_line() -> None:
    """Key by key; of a strategy that stays on only what is set otherwise, and none that is as by default."""
    before = {"offload": {"gpu_memory": "20GiB", "site": "host"}, "zero": {"stage": 1}}
    config = run_config(SIZES, strategies=before, data={"path": "mine.jsonl"})
    tree = config.tree()
    tree |= {"strategies": {"recompute": {"policy": "auto"}, "offload": {"moments": "int8"}}}
    found = changes(config.tree(), tree)
    assert sorted(found) == [
        "strategies.offload.gpu_memory=null",
        "strategies.offload.moments=int8",
        "strategies.offload.site=null",
        "strategies.recompute={policy: auto}",
        "strategies.zero=null",
    ]
    assert load_tree(config.tree(), found).tree() == build(tree).tree()


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
    assert {"'strategies.sequence={degree: 2}'", "'strategies.zero={stage: 3}'"} <= {*map(quote, last.write)}
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
    assert said[-1].startswith("more ways of training: deepstow fit --config FILE; ")

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Fit, "rows", broken)
    assert refused() == [said[0], "what would fit cannot be shown: ZeroDivisionError: a mistake"]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--gpu-memory", "8MiB", "--host-memory", "4GiB"]
    assert main([*sizes, *OVERRIDES, *SMALL]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("does it fit? llama on a GPU: 8.0 MiB of device memory, 4.0 GiB of host memory")
    assert "2 x 256 tokens, bf16" in said.out
    assert not any(" s  " in line for line in said.out.splitlines()), "the rates of a card that is not here are unknown"
    assert "planning full + offload on 1 rank" in said.err


def test_a_model_that_is_not_one(capsys: pytest.CaptureFixture[str]) -> None:
    misspelt = ["model.config.model_type=llama", "model.config.hidden_sise=64"]
    for arguments, says in (
        (
            [],
            "deepstow fit: which model? Give --config FILE, --model NAME_OR_FOLDER, or ",
        ),
        (
            ["--model", "./no/such/folder"],
            "command line: model.name_or_path = './no/such/folder': there is no such folder",
        ),
        (misspelt, "command line: model.config.hidden_sise = 64"),
    ):
        assert main(["--profile", "rtx4090-pcie4", *arguments]) == 2
        said = capsys.readouterr()
        assert said.err.splitlines()[-1].startswith(says) and said.out == ""


def test_every_answer_has_its_words() -> None:
    short = FitRow(missing={Tier.HOST: 3 << 30}, needed={Tier.HOST: 5 << 30}, write=("a=1", "b=2"))
    other = FitRow(strategies=("zero",), ranks=4, refused="why not", write=("a=1",))
    said = lines([short, other])
    assert said[0] == "full fine-tuning does not fit on 1 rank; nearest is full, host lacks 3.0 GiB"
    assert said[-1] == "in every row: a=1"
    assert any("no: refused" in line and line.endswith("(why not)") for line in said)
    fine = FitRow(strategies=("zero",), ranks=4, needed={Tier.DEVICE: 1, Tier.HOST: 1})
    assert lines([short, fine])[0].endswith("; on 4 ranks full + zero fits")

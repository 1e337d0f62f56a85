"""A model whose parts were taken out is the large one with those parts zeroed, and trained as any other."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from deepstow.trainer.config.load import load_tree
from deepstow.trainer.data import pydoc_rows
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model import build
from deepstow.trainer.planning.from_config import plan_of
from deepstow.trainer.planning.streamed import plan_within
from deepstow.trainer.recipes.prune.sizes import FAMILIES, cut, sizes_of, smaller
from deepstow.trainer.recipes.prune.structured import chosen, scored
from deepstow.trainer.run import session as runs
from tests.e2e.commands import write_jsonl
from tests.helpers.sides import unequal
from tests.helpers.tiny import LLAMA

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, WORDS = 24, 300
ALL = {"sparsity": 0.34, "parts": ["channels", "heads", "layers"]}
MODEL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 64,
    "initializer_range": 0.3,
}  # fmt: skip


def model_of(family: str, **more: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **MODEL | more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(each)
    return model.eval()


def config_of(home: Path, run: Path, prune: Any = ALL, strategies: Any = None, **training: Any) -> Any:
    said = {
        "output_dir": str(run), "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2,
        "use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no",
    }  # fmt: skip
    return load_tree(
        {
            "model": {"name_or_path": str(home)},
            "data": {"path": str(home.parent / "rows.jsonl"), "max_length": LENGTH},
            "training": said | training,
            "prune": {"method": "structured", "calibration_rows": 3, **prune},
            "strategies": strategies or {},
        }
    )


BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True, "head_dim": 16}}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_goes_adds_nothing(family: str, tmp_path: Path) -> None:
    """In fp64: the large model with its columns zeroed has the logits of the smaller one, as stock Transformers loads
    that. Scores of channels and heads are what a loop over them finds.
    """
    large = model_of(family, **BIASED.get(family, {}), **({"head_dim": 8} if family == "gemma" else {}))
    ids = torch.randint(WORDS, (2, 12))
    rows = [{"input_ids": row.tolist()} for row in ids]
    scores = scored(large, None, rows, torch.device("cpu"))
    config = config_of(tmp_path / "large", tmp_path / "run")
    small = smaller(config, large.config)
    kept = chosen(scores, sizes_of(small))
    assert [len(kept.layers), *map(len, kept.channels.values()), *map(len, kept.groups.values())] == [2, 48, 48, 2, 2]
    blocks, shared = large.model.layers, 2
    with torch.no_grad():
        gone = sorted(set(range(3)) - set(kept.layers))
        check = kept.layers[0]
        assert gone == [min(range(3), key=lambda index: scores[2][index].item())]
        for kind, stayed in ((0, kept.channels[check]), (1, kept.groups[check])):
            best = scores[kind][check].argsort(descending=True)[: len(stayed)]
            assert stayed.tolist() == sorted(best.tolist())
        layer = blocks[check]
        seen: dict[str, Tensor] = {}
        for name, module in (("down", layer.mlp.down_proj), ("o", layer.self_attn.o_proj)):
            module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
        large(ids)
        part = seen["down"][..., 5:6] * layer.mlp.down_proj.weight[:, 5]
        assert scores[0][check][5].item() == pytest.approx(part.square().sum().item(), rel=1e-5)
        width = shared * layer.self_attn.head_dim
        part = seen["o"][..., width : 2 * width] @ layer.self_attn.o_proj.weight[:, width : 2 * width].T
        assert scores[1][check][1].item() == pytest.approx(part.square().sum().item(), rel=1e-5)
        narrow = transformers.AutoModelForCausalLM.from_config(small, dtype=torch.float64)
        narrow.load_state_dict(cut(large.state_dict(), kept, large.config))
        narrow.save_pretrained(tmp_path / "small")
        for index, block in enumerate(blocks):
            for each in (block.mlp.down_proj, block.self_attn.o_proj):
                if index in gone:
                    each.weight.zero_()
                    each.bias.zero_() if each.bias is not None else None
            if index not in gone:
                columns = torch.ones(64, dtype=torch.bool)
                columns[kept.channels[index]] = False
                block.mlp.down_proj.weight[:, columns] = 0
                missing = next(iter(set(range(3)) - set(kept.groups[index].tolist())))
                block.self_attn.o_proj.weight[:, missing * width : (missing + 1) * width] = 0
        stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float64)
        assert (stock.config.num_attention_heads, stock.config.head_dim) == (4, layer.self_attn.head_dim)
        torch.testing.assert_close(stock.eval()(ids).logits, large(ids).logits, rtol=0, atol=1e-11)


def test_scores_of_weights_that_travel(tmp_path: Path) -> None:
    """The same bits, and the model is whole after it."""
    rows = [{"input_ids": list(range(start, start + 9))} for start in (0, 50)]
    found, states = [], []
    for room in (1 << 30, 400 << 10):
        model = model_of("llama", num_hidden_layers=12).float()
        plan, _ = plan_within(model, room)
        assert (plan is None) is (room == 1 << 30)
        found.append(scored(model, plan, rows, torch.device("cpu")))
        states.append(model.state_dict())
    assert all(whole.equal(travels) for one, other in zip(*found, strict=True) for whole, travels in pairs(one, other))
    assert unequal(*states) == []


def pairs(one: dict[int, Tensor], other: dict[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
    assert one.keys() == other.keys() == set(range(12))
    return [(one[index], other[index]) for index in one]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and a model."""
    home = tmp_path_factory.mktemp("models")
    texts = [{"text": row["text"]} for _, row in islice(pydoc_rows.rows("labels"), 16)]
    write_jsonl(home / "rows.jsonl", texts)
    model_of("llama").float().save_pretrained(home / "model")
    tokenizers.trained(WORDS, home, (row["text"] for row in texts)).save_pretrained(home / "model")
    return home / "model"


def ran(config: Any) -> dict[str, Tensor]:
    """The weights that a run exports."""
    assert runs.run(config, Ranks(), Stop()) == 0
    return load_file(Path(config.training.output_dir) / "export" / "model.safetensors")


def of_folder(folder: Path, run: Path, home: Path, strategies: Any = None, **training: Any) -> Any:
    """A run of what a pruned run has made."""
    tree = config_of(folder, run, strategies=strategies, **training).tree()
    del tree["prune"]
    tree["model"]["tokenizer"], tree["data"]["path"] = str(home), str(home.parent / "rows.jsonl")
    return load_tree(tree)


def pruned(run: Path) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in load_file(run / "pruned" / "model.safetensors").items()}


@pytest.mark.slow
def test_a_run_is_one_of_the_smaller_model(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By bits: as a run of the folder that it leaves, and resumed elsewhere with weights that travel. The plan
    is of the smaller model, what is there is not made again, and what is damaged is.
    """
    run = tmp_path / "run"
    found = ran(config_of(home, run, save_strategy="steps", save_steps=2))
    said = capfd.readouterr().out
    assert (
        "intermediate_size 64 -> 48, num_attention_heads 6 -> 4, num_key_value_heads 3 -> 2, num_hidden_layers" in said
    )
    small = pruned(run)
    assert not any(each.equal(small[name]) for name, each in found.items() if "proj" in name)
    plan = json.loads((run / "plan.json").read_text())
    assert sum(unit["num_params"] for unit in plan["facts"]["units"]) == sum(each.numel() for each in small.values())
    card = (run / "export" / "README.md").read_text()
    assert "Before training parts of it were taken out: intermediate_size 64 -> 48" in card
    stock = transformers.AutoModelForCausalLM.from_pretrained(run / "export")
    assert stock.config.use_cache and stock.config.num_hidden_layers == 2
    assert unequal(found, ran(of_folder(run / "pruned", tmp_path / "plain", home))) == []
    travels, again = {"offload": {"gpu_memory": "700KiB"}}, {"resume_from_checkpoint": str(run / "checkpoint-2")}
    assert unequal(found, ran(config_of(home, tmp_path / "again", strategies=travels, **again))) == []
    assert unequal(small, pruned(tmp_path / "again")) == []
    config, (file,) = config_of(home, run, max_steps=1), run.glob("pruned/*.safetensors")
    for touched in (False, True):
        capfd.readouterr()
        if touched:
            file.write_bytes(file.read_bytes()[:-1] + b"!")
        ran(config)
        assert ("52,080 parameters, by 3 rows" in capfd.readouterr().out) is touched
    assert unequal(small, pruned(run)) == []


def test_refused(home: Path, tmp_path: Path) -> None:
    """In one line, before anything is loaded: by a section alone, or by the configuration of the model."""
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    gpt2.save_pretrained(tmp_path / "gpt2")
    mixed = transformers.AutoConfig.for_model(
        "qwen2", **MODEL, layer_types=["full_attention", *["sliding_attention"] * 2]
    )
    mixed.save_pretrained(tmp_path / "mixed")
    cases = {
        "prune.method = \"structured\": a gpt2 model cannot be made smaller so; it can be done for llama, mistral": (
            tmp_path / "gpt2", ALL),
        "its layers are of several kinds (full_attention, sliding_attention)": (tmp_path / "mixed", ALL),
        "prune.sparsity = 0.25: none of 3 groups of heads would go; write 0.34 or more, or leave heads out": (
            home, {"sparsity": 0.25}),
        "prune.sparsity = 0.1: none of 64 channels would go; write more": (home, {"sparsity": 0.1}),
        "prune.parts: are of method structured": (home, {"method": "magnitude", "parts": ["heads"]}),
        "prune.rounds = 3: is for weights that become zero": (home, {"rounds": 3}),
    }  # fmt: skip
    for line, (model, prune) in cases.items():
        with pytest.raises(ConfigError) as error:
            plan_of(config_of(model, tmp_path / "run", prune), Ranks(), probe())
        assert line.split(": ", 1)[-1] in str(error.value) and str(error.value).count("\n") == 0, str(error.value)
    tree = config_of(home, tmp_path / "run").tree()
    plain = load_tree({key: section for key, section in tree.items() if key != "prune"})
    sizes = [
        sum(unit.num_params for unit in plan_of(each, Ranks(), probe()).facts.units)
        for each in (plain, config_of(home, tmp_path / "run"))
    ]
    assert sizes == [77_520, 52_080]  # the one is not in the cache for the other
    with pytest.raises(ConfigError, match=r"cannot go with prune.method structured: random weights"):
        load_tree({**tree, "model": {"config": dict(LLAMA), "tokenizer": "none"}})


def test_heads_that_a_family_cannot_have(tmp_path: Path) -> None:
    """A Llama's heads divide its width; 8 of 12 do not divide 60, and 6 do. A Mistral may have any number."""
    sizes = {"hidden_size": 60, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}
    for family in ("llama", "mistral"):
        transformers.AutoConfig.for_model(family, **MODEL | sizes).save_pretrained(tmp_path / family)
    run = tmp_path / "run"
    config = config_of(tmp_path / "mistral", run, {"sparsity": 0.34})
    assert build.config_of(config).num_attention_heads == 8
    with pytest.raises(ConfigError, match=r"8 of 12 heads would stay, which llama .* cannot have .*; 0.50 keeps 6, or"):
        build.config_of(config_of(tmp_path / "llama", run, {"sparsity": 0.34}))
    better = config_of(tmp_path / "llama", run, {"sparsity": 0.50})
    assert build.config_of(better).num_attention_heads == 6

"""The program of ``torch.export`` gives the model's logits without Transformers; what cannot be exported is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deepstow.trainer.config.load import load_tree
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.planning import from_config
from deepstow.trainer.recipes.export import graph
from deepstow.trainer.recipes.export.exporter import EXPORTERS
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.exporting import results
from deepstow.trainer.run.exporting.export import ExportError, after
from tests.helpers.tiny import LLAMA, VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")
ALONE = """
import sys, torch
program = torch.export.load(sys.argv[1] + "/model.pt2").module()
torch.save(program(*torch.load(sys.argv[1] + "/rows.pt")), sys.argv[1] + "/logits.pt")
assert "transformers" not in sys.modules
"""


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    options = {"initializer_range": 0.3, **LLAMA}
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def config_of(run: Path, **model: Any) -> Any:
    """A run that exports a program."""
    given = {"config": {**LLAMA, "vocab_size": 300}, "tokenizer": {"train": "bpe", "vocab_size": 300}, **model}
    return load_tree(
        {
            "model": {key: value for key, value in given.items() if value is not None},
            "data": {"path": "pydoc", "max_length": 16, "limit": 8},
            "training": {
                "output_dir": str(run), "max_steps": 2, "use_cpu": True, "report_to": "none", "save_steps": 2,
                "resume_from_checkpoint": "auto",
            },
            "export": {"format": "torch_export"},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a program of ``model_of()``."""
    folder = tmp_path_factory.mktemp("exported")
    model_of().save_pretrained(folder / "exact")
    (folder / "exact" / "README.md").write_text("---\ntags: [deepstow]\n---\n\n# Exact\n")
    (folder / "program").mkdir()
    said = EXPORTERS["torch_export"].export(folder / "exact", folder / "program", config_of(folder / "run"))
    after(folder / "exact", said).save(folder / "program" / "README.md")
    return folder / "program"


@pytest.mark.slow
def test_the_program_is_the_model_without_transformers(program: Path) -> None:
    """In a process of its own, on rows of other lengths than it was made with, padded on the left."""
    model = model_of()
    ids = torch.randint(VOCAB, (4, 29))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    torch.save((ids, mask), program / "rows.pt")
    subprocess.run([sys.executable, "-c", ALONE, str(program)], check=True)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.load(program / "logits.pt")[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)
    card = (program / "README.md").read_text()
    assert card.startswith("---\ntags:") and 'torch.export.load("model.pt2")' in card and card.endswith("# Exact\n")
    sources = (str(Path(graph.__file__)), transformers.__path__[0], torch.__path__[0])
    content = (program / "model.pt2").read_bytes()
    assert [each for each in sources if each.encode() in content] == [], "nothing says where it was made"


def test_another_program_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of(1).save_pretrained(tmp_path)
    monkeypatch.setattr(graph, "saved", lambda *_: graph.Logits(model_of()))
    with pytest.raises(ExportError, match="logits of the program differ by"):
        EXPORTERS["torch_export"].export(tmp_path, tmp_path, config_of(tmp_path / "run"))


def test_what_torch_cannot_export_is_refused(tmp_path: Path) -> None:
    """By name, from a small copy, before the model is built."""
    mamba = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300, "state_size": 8}
    with pytest.raises(
        ConfigError, match=r'export.format = "torch_export": torch cannot export a mamba model: UserError: Con'
    ):
        results.refuse(config_of(tmp_path, config=mamba))
    with pytest.raises(ConfigError, match="adapters are exported without their base, which export needs"):
        config_of(tmp_path, config=None, name_or_path="some", lora={"r": 2})


def as_onnx(run: Path) -> Any:
    return load_tree({**config_of(run).tree(), "export": {"format": "onnx"}})


def test_onnx_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepstow.trainer.recipes.export.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'export.format = "onnx": needs onnx, onnxscript, onnxruntime; write pip'):
        from_config.check_options(as_onnx(tmp_path), 1)


def test_onnx(tmp_path: Path) -> None:
    """In the runtime alone, on rows of other lengths; where the packages are."""
    runtime = pytest.importorskip("onnxruntime")
    model, ids = model_of(), torch.randint(VOCAB, (4, 29))
    model.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("---\ntags: [deepstow]\n---\n\n# Exact\n")
    EXPORTERS["onnx"].export(tmp_path, tmp_path, as_onnx(tmp_path))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.from_numpy(found)[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_run_leaves_one(tmp_path: Path) -> None:
    """Made again alone if it is damaged, without a step of training."""
    config, program = config_of(tmp_path), tmp_path / "export-torch" / "model.pt2"
    assert runs.run(config, Ranks(), Stop()) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    before = (tmp_path / "metrics.jsonl").read_text()
    for left in ([], ["torch"]):
        if left:
            program.write_bytes(program.read_bytes()[:-1])
        assert results.missing(config) == left
        assert runs.run(config, Ranks(), Stop()) == 0
        assert graph.largest_difference(torch.export.load(program).module(), model) < 1e-6
    assert results.missing(config) == [] and (tmp_path / "metrics.jsonl").read_text() == before
    assert json.loads((tmp_path / "export-torch" / "manifest.json").read_text())["content"]["kind"] == results.FURTHER
    assert {path.name for path in (tmp_path / "earlier-1").iterdir()} == {"export-torch"}
    longer = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 4})})
    assert runs.run(longer, Ranks(), Stop()) == 0 and results.missing(longer) == []
    assert {path.name for path in (tmp_path / "earlier-2").iterdir()} == {"export", "export-torch"}, "both of step 2"

"""Tasks, formats, readers, exporters, recipes and callbacks from one file outside of the tree, named in a config."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file

from deepstow.launch import plan
from deepstow.trainer.config.load import load, load_tree
from deepstow.trainer.config.sections import DataSection
from deepstow.trainer.data import prepare as preparing
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.planning.facts import count_model
from deepstow.trainer.planning.from_config import check_options
from deepstow.trainer.registry import Raised
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.callbacks.user_callbacks import UserCallbacks
from deepstow.trainer.tasks.task import TASKS
from tests.e2e.commands import write_jsonl
from tests.helpers.tiny import LLAMA

WORDS = ["the", "a", "cat", "dog", "runs", "sleeps", "in", "park", "house", "big", "small"]
NOUNS = ("cat", "dog", "park", "house")
TAGGED = [
    {"tokens": row, "ner": ["N" if word in NOUNS else "O" for word in row]}
    for row in ([WORDS[(3 * i + j * j) % len(WORDS)] for j in range(3 + i % 5)] for i in range(16))
]
TAGGING = """
from deepstow.trainer.tasks.task import Field, Task, token_types


class Tagging(Task):
    fields = (Field("words", (list,)), Field("tags", (list,)))
    model_class = "transformers.AutoModelForTokenClassification"
    adapters = "TOKEN_CLS"
    keys = ("model.labels",)

    def features(self, rows, tokenizer, model, data):
        return [row_of(row["words"], row["tags"], tokenizer, model) for row in rows]

    def options(self, model, tokenizer, config):
        from transformers import DataCollatorForTokenClassification

        return {"data_collator": DataCollatorForTokenClassification(tokenizer)}

    def forward(self, model, config):
        return lambda **inputs: model(**inputs, **token_types(model, config, inputs["input_ids"]))


class Misjudged(Tagging):
    def probe(self, ids):
        return {"input_ids": ids.view(-1)}


def row_of(words, tags, tokenizer, model):
    if wrong := {*tags} - {*model.label2id}:
        return f"field 'tags' has {min(wrong)!r}"
    made = tokenizer(words, is_split_into_words=True)
    labels = [-100 if at is None else model.label2id[tags[at]] for at in made.word_ids()]
    return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"], "labels": labels}
"""
ARRAYS = """
import numpy
from safetensors.numpy import load_file
from deepstow.trainer.recipes.export.exporter import Exporter


class Npz(Exporter):
    def export(self, exact, out, config):
        numpy.savez(out / "weights.npz", **load_file(exact / "model.safetensors"))
        return "# As arrays"


class Silent(Npz):
    def export(self, exact, out, config):
        super().export(exact, out, config)


class Empty(Exporter):
    def export(self, exact, out, config):
        return "nothing"


class Alters(Npz):
    def export(self, exact, out, config):
        (exact / "config.json").write_text("{}")
        return super().export(exact, out, config)


class Above(Npz):
    folder = "../above"
"""
ANSWERED = """
from deepstow.trainer.formats.format import Format
from deepstow.trainer.formats.reader import Reader


class Answered(Format):
    required = ("question", "context", "answer")
    answers = True

    def segments(self, row):
        if not row["question"].endswith("?"):
            return "field 'question' asks nothing"
        return [(f"{row['context']} {row['question']} ", False), (row["answer"], True)]


class Tsv(Reader):
    def rows(self, path, wanted):
        names, *lines = path.read_text().splitlines()
        for number, line in enumerate(lines, start=2):
            yield number, dict(zip(names.split("\\t"), line.split("\\t")))
"""
SCALED = """
import torch
from deepstow.trainer.config.arguments import Section, option
from deepstow.trainer.config.recipe import Recipe, Writer


class Factor(Section):
    by: float = option("What the head is multiplied by before training.", 0.5)
    twice: bool = option("Once more.", False)


class Scaled(Recipe):
    section = Factor
    language = True

    def conflicts(self, sections):
        if sections[self.name].twice and sections[self.name].by == 1:
            yield f"recipes.{self.name}.twice", "changes nothing; leave it out"

    def apply(self, model, config):
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(self.options(config).by)

    def plan_lines(self, config, plan, machine):
        return [f"its head: times {self.options(config).by}"]

    def sentence(self, session):
        return f"Its head was multiplied by {self.options(session.config).by} before."

    def exports(self, config):
        return {"sizes": self.options(config).model_dump()}

    def writer(self, config, exact):
        return Sizes()


class NoWriter(Recipe):
    def exports(self, config):
        return {"sizes": {}}


class Broken(NoWriter):
    def writer(self, config, exact):
        return Nothing()


class Nothing(Writer):
    def write(self, name, draft):
        return 1 / 0


class Sizes(Writer):
    def write(self, name, draft):
        (draft / "sizes.txt").write_text(name)
        return {}
"""
CALLBACKS = """
from pathlib import Path
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class Count(TrainerCallback, ExportableState):
    def __init__(self, first=0):
        self.seen = first

    def on_step_end(self, args, state, control, **kwargs):
        self.seen += 1
        (Path(args.output_dir) / "seen.txt").write_text(str(self.seen))

    def state(self):
        return {"args": {}, "attributes": {"seen": self.seen}}


class Shrink(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        for each in model.parameters():
            each.detach().mul_(0.9)


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        assert state.global_step < 3, "three"


class Inside(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "mine.txt").write_text("x")
"""
SAID: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 1e-2,
    "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a config, with files beside it; another one than that of the command."""
    files = {"tagging": TAGGING, "arrays": ARRAYS, "answered": ANSWERED, "added": CALLBACKS, "scaled": SCALED}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def config_in(home: Path, tree: dict[str, Any]) -> Any:
    (home / "run.yaml").write_text(json.dumps(tree))  # JSON is YAML
    return load(home / "run.yaml")


def test_token_classification_and_an_exporter(home: Path) -> None:
    """The bits of Hugging Face's Trainer on the same rows, and its arrays."""
    write_jsonl(home / "rows.jsonl", TAGGED)
    tokenizer = tokenizers.trained(300, home, WORDS)
    tokenizer.save_pretrained(home / "model")
    torch.manual_seed(1)
    labels = {"id2label": {0: "O", 1: "N"}, "label2id": {"O": 0, "N": 1}}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    base = transformers.BertConfig(vocab_size=300, max_position_embeddings=64, **sizes, **labels)
    transformers.BertForTokenClassification(base).save_pretrained(home / "model")
    config = config_in(
        home,
        {
            "task": "tagging:Tagging",
            "model": {"name_or_path": str(home / "model"), "labels": ["O", "N"]},
            "data": {
                "path": str(home / "rows.jsonl"), "max_length": 32, "columns": {"words": "tokens", "tags": "ner"}
            },
            "export": {"format": "arrays:Npz"},
            "training": {**SAID, "output_dir": str(home / "run")},
        },
    )  # fmt: skip
    misjudged = config.model_copy(update={"task": "tagging:Misjudged"})
    with pytest.raises(Raised, match=r"tagging:Misjudged: forward, of what probe returns, has raised"):
        count_model(misjudged)
    assert runs.run(config, Ranks(), Stop()) == 0

    theirs: dict[str, Any] = {}
    exec(TAGGING, theirs)
    transformers.set_seed(42)
    model: Any = transformers.AutoModelForTokenClassification.from_pretrained(home / "model")
    model.accepts_loss_kwargs = False
    rows = [theirs["row_of"](row["tokens"], row["ner"], tokenizer, model.config) for row in TAGGED]
    arguments = transformers.TrainingArguments(str(home / "plain"), optim="adamw_torch_fused", **SAID)
    trainer = transformers.Trainer(
        model,
        arguments,
        transformers.DataCollatorForTokenClassification(tokenizer),
        Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    found, plain = load_file(home / "run" / "export" / "model.safetensors"), model.state_dict()
    assert {name for name, each in plain.items() if not each.equal(found[name])} == set()
    arrays = np.load(home / "run" / "export-Npz" / "weights.npz")
    assert all((arrays[name] == each.numpy()).all() for name, each in found.items())


def test_exporters_that_do_not_export(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each ends the run in one line, which leaves the exact export, or makes it again."""

    def run(name: str) -> tuple[int, str]:
        tree = tree_of(home, resume_from_checkpoint="auto") | {"export": {"format": f"arrays:{name}"}}
        code = runs.run(config_in(home, tree), Ranks(), Stop())
        return code, capfd.readouterr().err

    lines = {
        "Empty": "arrays:Empty: export has written no file",
        "Silent": "arrays:Silent: export has returned None, and is to return what the card says, a text",
        "Alters": f"export-Alters has changed {home / 'run' / 'export' / 'config.json'}, which is to be read only",
    }
    for name, line in lines.items():
        code, said = run(name)
        assert code == 1 and line in said and "Traceback" not in said
        assert not (home / "run" / f"export-{name}").exists()
    assert run("Npz")[0] == 0
    assert json.loads((home / "run" / "export" / "config.json").read_text())["model_type"] == "llama"
    assert "library_name" not in (home / "run" / "export-Npz" / "README.md").read_text()
    with pytest.raises(ConfigError, match=r"its folder is '\.\./above', which is no name"):
        check_options(config_in(home, tree_of(home) | {"export": {"format": "arrays:Above"}}), 1)


def test_a_format_and_a_reader(home: Path) -> None:
    """Rows are those of prompt and completion; in other processes, too. A bad row is named by its line."""
    texts = [(f"what is {i}?", f"numbers are {i}", f"it is {i}") for i in range(5)]
    lines = ["question\tcontext\tanswer", *("\t".join(row) for row in texts)]
    (home / "qa.tab").write_text("\n".join(lines))
    write_jsonl(home / "qa.jsonl", [{"prompt": f"{c} {q} ", "completion": a} for q, c, a in texts])
    tokenizer = tokenizers.trained(300, home, ["what is numbers are it"])

    def rows(section: DataSection) -> Any:
        return preparing.prepare(section, tokenizer, 300, 0, home / "kept", str)

    given = {"path": str(home / "qa.tab"), "format": "answered:Answered", "reader": "answered.py:Tsv", "max_length": 32}
    tree = {"model": {"name_or_path": "m"}, "training": {"output_dir": "x"}}
    section = config_in(home, {**tree, "data": {**given, "num_proc": 2}}).data
    found, expected = rows(section), rows(DataSection(path=str(home / "qa.jsonl"), max_length=32))
    assert found.train[:] == expected.train[:]
    (home / "answered.py").write_text(ANSWERED.replace('{row["context"]}', "Q: "))
    (home / "qa.tab").write_text("\n".join([*lines, "nothing\tx\ty"]))
    with pytest.raises(Exception, match=r"qa.tab:7: field 'question' asks nothing"):
        rows(section)


def tree_of(home: Path, **training: Any) -> dict[str, Any]:
    write_jsonl(home / "rows.jsonl", [{"text": f"row {i} of a few"} for i in range(12)])
    return {
        "model": {"config": {**LLAMA, "vocab_size": 300}, "tokenizer": {"train": "bpe", "vocab_size": 300}},
        "data": {"path": str(home / "rows.jsonl"), "max_length": 16},
        "training": {**SAID, "output_dir": str(home / "run"), "save_strategy": "steps", "save_steps": 2, **training},
    }


def test_rows_of_other_code_are_said(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run whose format is another file by now is not resumed, and learns which file that is."""
    write_jsonl(home / "qa.jsonl", [{"question": f"{i}?", "context": "a few", "answer": f"{i}"} for i in range(12)])
    tree = tree_of(home, max_steps=2)
    tree["data"] = {"path": str(home / "qa.jsonl"), "format": "answered:Answered", "max_length": 32}
    assert runs.run(config_in(home, tree), Ranks(), Stop()) == 0
    with (home / "answered.py").open("a") as file:
        file.write("# mended\n")
    tree["training"] |= {"max_steps": 4, "resume_from_checkpoint": "auto"}
    assert runs.run(config_in(home, tree), Ranks(), Stop()) == 2
    said = capfd.readouterr().err
    assert "answered:Answered, which makes them, is another file than then; the rows made of it are not those" in said


def test_callbacks_go_on_and_the_card_names_them(home: Path) -> None:
    """A run that is resumed counts on; it says which callback has changed weights."""
    callbacks = [{"class": "added:Count", "first": 10}, "added:Shrink"]
    half = config_in(home, tree_of(home, callbacks=callbacks, max_steps=2))
    assert runs.run(half, Ranks(), Stop()) == 0
    assert (home / "run" / "seen.txt").read_text() == "12"
    whole = config_in(home, tree_of(home, callbacks=callbacks, resume_from_checkpoint=True))
    assert runs.run(whole, Ranks(), Stop()) == 0
    assert (home / "run" / "seen.txt").read_text() == "14"
    card = (home / "run" / "export" / "README.md").read_text()
    assert "`added:Count`, `added:Shrink` (it changed parameters or the optimizer)." in card
    manifest = json.loads((home / "run" / "checkpoint-4" / "manifest.json").read_text())
    assert '"code": {"added:Count": "' in json.dumps(manifest)


def test_a_recipe(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It changes the model before training, plan and card say so, and what it exports is made again if it is gone."""
    heads = []
    for by in (0.5, None):
        tree = tree_of(home, output_dir=str(home / str(by)), resume_from_checkpoint="auto")
        if by is not None:
            tree["recipes"] = {"scaled:Scaled": {"by": by}}
        config = config_in(home, tree)
        assert runs.run(config, Ranks(), Stop()) == 0
        heads.append(load_file(home / str(by) / "export" / "model.safetensors")["lm_head.weight"])
    assert not heads[0].equal(heads[1])
    assert "Its head was multiplied by 0.5 before." in (home / "0.5" / "export" / "README.md").read_text()
    manifest = json.loads((home / "0.5" / "checkpoint-4" / "manifest.json").read_text())
    assert '"code": {"scaled:Scaled": "' in json.dumps(manifest)
    (home / "0.5" / "export-sizes" / "sizes.txt").unlink()
    tree["recipes"], tree["training"]["output_dir"] = {"scaled:Scaled": {"by": 0.5}}, str(home / "0.5")
    assert runs.run(config_in(home, tree), Ranks(), Stop()) == 0
    assert (home / "0.5" / "export-sizes" / "sizes.txt").read_text() == "sizes"
    assert "its head: times 0.5" in capfd.readouterr().out
    tree["recipes"] = {"scaled:Scaled": {"by": 0.25}}
    config_in(home, tree)
    assert plan.main(["--config", str(home / "run.yaml")]) == 0
    assert "its head: times 0.25" in capfd.readouterr().out
    tree["recipes"] = {"scaled:Broken": {}}
    tree["training"]["allow_change"] = ["loss"]
    assert runs.run(config_in(home, tree), Ranks(), Stop()) == 1
    said = capfd.readouterr().err
    assert "scaled:Broken: write has raised ZeroDivisionError: division by zero (" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("recipes", "line"),
    [
        ({"scaled:Scaled": {"bye": 1.0}}, "recipes.scaled:Scaled.bye = 1.0: unknown key; did you mean 'by'"),
        ({"scaled:Scaled": {"by": "x"}}, 'recipes.scaled:Scaled.by = "x": must be a number'),
        ({"scaled:Scaled": {"by": 1.0, "twice": True}}, "scaled:Scaled.twice = true: changes nothing; leave it out"),
        ({"scaled:NoWriter": {}}, "recipes.scaled:NoWriter = {}: has exports, and no method writer(config, exact)"),
        ({"scaled:Scale": {}}, "scaled has no Scale; did you mean 'Scaled'"),
        ({"scaled": {}}, "is none of distill, export, prune, quantize, nor module:Class, as in my_module:Recipe"),
        ({"quantize": {}}, "recipes.quantize = {}: has a section of its own; write quantize: {...}"),
        (["scaled:Scaled"], "must be a section: indented 'module:Class: {options}' lines"),
    ],
)
def test_recipes_that_are_refused(home: Path, recipes: Any, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_options(config_in(home, {**tree_of(home), "recipes": recipes}), 1)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("name", "line", "kept"),
    [
        ("Fails", "on_step_end has raised AssertionError: three (", "checkpoint-2 is the last checkpoint"),
        ("Inside", "on_save has written mine.txt into ", "take it out, and write beside the checkpoints"),
    ],
)
def test_a_callback_that_ends_the_run(
    home: Path, capfd: pytest.CaptureFixture[str], name: str, line: str, kept: str
) -> None:
    config = config_in(home, tree_of(home, callbacks=[f"added:{name}"]))
    assert runs.run(config, Ranks(), Stop()) == 1
    said = capfd.readouterr().err
    assert f"training.callbacks = added:{name}: {line}" in said and kept in said and "Traceback" not in said


ODD = """
from transformers import TrainerCallback
from deepstow.trainer.formats.format import Format
from deepstow.trainer.tasks.task import Field, Task


class NoFields(Task):
    def features(self, rows, tokenizer, model, data): ...
    def options(self, model, tokenizer, config): ...


class NoMethod(Task):
    fields = (Field("x", ()),)
    def features(self, rows, tokenizer, model, data): ...


class Signature(Task):
    fields = (Field("x", ()),)
    def features(self, rows): ...
    def options(self, model, tokenizer, config): ...


class Both(Format):
    required = ("x",)
    def segments(self, row): ...
    def tokens(self, row): ...


class NoKwargs(TrainerCallback):
    def on_step_end(self, args, state, control): ...


class Asks(TrainerCallback):
    def __init__(self, much): ...


def function(): ...
"""


@pytest.mark.parametrize(
    ("where", "name", "line"),
    [
        ("task", "odd:NoFields", "cannot be made: TypeError: fields must name the columns, as in fields = "),
        ("task", "odd:NoMethod", r"NoMethod has no method options\(model, tokenizer, config\)"),
        ("task", "odd:Signature", r"Signature.features takes \(rows\), and is called with \(rows, tokenizer, model, d"),
        ("task", "odd:Asks", "Asks is no Task; derive it from deepstow.trainer.tasks.task.Task"),
        ("task", "odd:Signatur", "odd has no Signatur; did you mean 'Signature'"),
        ("task", "odd:function", "function is no class"),
        ("task", "nowhere:Task", "nowhere cannot be imported from the folder of the config, that of the command, or"),
        ("task", "raises.py:Task", r"raises.py cannot be imported .*: ZeroDivisionError: division by zero \(.*:2\)"),
        ("task", "twice", r"one \(a:Task\) and two \(b:Task\) claim it; uninstall one, or write module:Class"),
        ("data.format", "odd:Both", "cannot be made: TypeError: must have one of the methods segments, conversation"),
        ("training.callbacks", "odd:NoKwargs", r"NoKwargs.on_step_end takes \(args, state, control\), and is called"),
        ("training.callbacks", "odd:Asks", "missing a required argument: 'much'"),
    ],
)
def test_odd_things_are_refused_in_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str, line: str
) -> None:
    class Named(EntryPoint):
        dist = property(lambda self: type("Dist", (), {"name": {"a": "one", "b": "two"}[self.value[0]]}))  # type: ignore[assignment]

    claims = (Named("twice", "a:Task", "deepstow.tasks"), Named("twice", "b:Task", "deepstow.tasks"))
    monkeypatch.setitem(vars(TASKS), "_entries", claims)
    (home / "odd.py").write_text(ODD)
    (home / "raises.py").write_text("\n1 / 0\n")
    tree = tree_of(home)
    section, _, key = where.rpartition(".")
    (tree[section] if section else tree)[key] = [name] if key == "callbacks" else name
    if name == "twice":  # it is known to no schema that was made before
        config: Any = load_tree(tree_of(home)).model_copy(update={"task": name})
    else:
        config = config_in(home, tree)
    with pytest.raises(ConfigError, match=f'{where} = "{name}": .*{line}') as refused:
        check_options(config, 1)
        UserCallbacks(config)
    assert len(refused.value.lines) == 1

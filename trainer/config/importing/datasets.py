"""What the data sets of the other tools mean: paths, columns, templates, and which tokens are trained on.

Axolotl and LLaMA-Factory write chats by templates of their own, and train on answers alone. Where we know a template's
text, it is written into the config with the answers marked, so that ids and labels are theirs token by token. Where it
comes from a tokenizer, nobody can say without it: that is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deepstow.trainer.config.importing.draft import LOST, Draft
from deepstow.trainer.config.importing.read import Given, Source, mapping

EXCESS = "data.excess_length_strategy"
STREAM = "cuts rows out of one stream, where documents see each other; here rows hold documents that do not"
INFO = "dataset_info.json"
HEADERS = ("<|start_header_id|>{}<|end_header_id|>\\n\\n", "<|eot_id|>", "")
CHATML = ("<|im_start|>{}\\n", "<|im_end|>", "\\n")
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class Words(NamedTuple):
    """A template: what stands before and after a turn, what follows, and what the tool makes of it."""

    before: str  # with {} for the role
    end: str
    after: str = ""
    after_trained: bool = False
    begins: str = ""  # an expression: what the whole begins with
    content: str = "message['content']"
    system: str = ""  # of a chat that has none
    pairs: bool = False  # a chat is pairs of user and assistant; others are left out there

    def text(self) -> str:
        """The Jinja template, in which what is trained on is marked."""
        trained, tail = (self.end + self.after, "") if self.after_trained else (self.end, self.after)
        head = self.before.format("' + message['role'] + '")
        last = "loop.last and message['role'] == 'user' and not add_generation_prompt"
        wrong = f"(message['role'] == 'user') != (loop.index0 % 2 == 0) or ({last})"
        system = f"{{{{ '{self.before.format('system')}{self.system}{self.end}{self.after}' }}}}"
        return "".join((
            "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}" if self.pairs else "",
            f"{{{{ {self.begins} }}}}" if self.begins else "",
            f"{{% if messages[0]['role'] != 'system' %}}{system}{{% endif %}}" if self.system else "",
            "{% for message in messages %}"
            "{% if message['role'] not in ('system', 'user', 'assistant') %}"
            "{{ raise_exception('no role ' + message['role'] + ' in this template') }}{% endif %}",
            f"{{{{ '{head}' }}}}",
            f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{{{{ {self.content} + '{trained}' }}}}"
            f"{{% endgeneration %}}{{{{ '{tail}' }}}}{{% else %}}{{{{ {self.content} + '{self.end}{self.after}' }}}}"
            "{% endif %}{% endfor %}",
            f"{{% for message in rest %}}{{% if {wrong} %}}{{{{ raise_exception('no pairs of user and assistant') }}}}"
            "{% endif %}{% endfor %}" if self.pairs else "",
            f"{{% if add_generation_prompt %}}{{{{ '{self.before.format('assistant')}' }}}}{{% endif %}}",
        ))  # fmt: skip


AXOLOTL = {"chatml": Words(*CHATML), "llama3": Words(*HEADERS, begins="bos_token", content="message['content'] | trim")}
LLAMA_FACTORY = {  # where what follows an answer's end is trained on
    "chatml": Words(*CHATML, after_trained=True, pairs=True),
    "qwen": Words(*CHATML, after_trained=True, pairs=True, system=QWEN),
    "llama3": Words(*HEADERS, after_trained=True, pairs=True, begins="bos_token or ''"),
}
ROLES = {  # of messages, as they are read here
    "user": {"human", "user"}, "assistant": {"gpt", "assistant"}, "system": {"system"}, "tool": {"tool"},
}  # fmt: skip
PLAIN = {"path", "name", "split", "data_files", "ds_type", "type", "trust_remote_code", "shards"}
SHAREGPT = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
TAGS = (SHAREGPT, {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"})


def evaluates(source: Source) -> bool:
    """Whether there is something to evaluate on; Axolotl's keys about it are written anyway."""
    return source.kind != "axolotl" or bool(source.tree.get("val_set_size") or source.tree.get("test_datasets"))


def _mixed(ours: list[dict[str, Any]]) -> dict[str, Any]:
    """One data set, or several, as values of ours without those that are not set."""
    sets = [{name: value for name, value in dataset.items() if value} for dataset in ours]
    return {f"data.{name}": value for name, value in sets[0].items()} if len(sets) == 1 else {"data.datasets": sets}


def _path(entry: dict[str, Any]) -> Any:
    files = entry.get("data_files")
    return files[0] if isinstance(files, list) and len(files) == 1 else files or entry.get("path")


def _inside(given: Given) -> Iterator[tuple[Given, dict[str, Any]]]:
    """The data sets of a list, and what is set of each."""
    for index, options in enumerate(given.value):
        entry = {name: value for name, value in options.items() if value not in (None, [], {}, False)}
        yield Given(given.source, (*given.key, str(index)), options), entry


def of_trl(given: Given, draft: Draft) -> dict[str, Any]:
    """TRL's mixture, whose columns are those that are kept; and the alignment handbook's, which has other names."""
    datasets = []
    for at, entry in _inside(given):
        source = {name: entry.get(name) for name in ("name", "split")}
        datasets.append({"path": entry.get("id") or _path(entry)} | source | {"weight": entry.get("weight")})
        datasets[-1]["name"] = entry.get("config") or source["name"]
        for name in sorted(entry.keys() - {"id", "config", "weight", "columns"} - PLAIN):
            cure = "; write token_share" if name == "fraction" else "; write the rows that are meant into a file"
            draft.lose(at.at(name), f"is not read of a data set{cure}")
        if entry.get("weight", 1) != 1:
            draft.lose(at.at("weight"), "is a share of its rows there, and of its tokens here; write limit")
    return _mixed(datasets)


# --- Axolotl ---------------------------------------------------------------------------------------------------------


def of_axolotl(given: Given, draft: Draft) -> dict[str, Any]:
    """Data sets of Axolotl. ``type`` decides, which columns do here."""
    tree = given.tree
    prefers = next((name for name in ("rl", "reward_model") if tree.get(name)), None)
    datasets = []
    kinds = set()
    templates = []
    for at, entry in _inside(given):
        kind = str(entry.get("type"))
        kinds.add(kind.partition(".")[0])
        dataset = {"path": _path(entry), "name": entry.get("name"), "split": entry.get("split"), "columns": {}}
        known_keys = PLAIN
        if prefers:
            known_keys = _preferences(at, entry, kind, draft, dataset)
        elif kind in ("completion", "pretrain"):
            dataset["columns"] = {"text": entry.get("field", "text")}
            known_keys = PLAIN | {"field"}
        elif kind.partition(".")[0] in ("chat_template", "sharegpt"):
            known_keys = _chat(at, entry, kind, draft, dataset)
            templates.append((entry.get("chat_template") or tree.get("chat_template") or "tokenizer_default", at))
        else:
            draft.lose(at.at("type"), _written(kind))
        dataset["columns"] = {name: column for name, column in dataset["columns"].items() if column not in (None, name)}
        for name in sorted(entry.keys() - known_keys):
            draft.lose(at.at(name), "is not read of a data set; write the rows that it makes into a file")
        datasets.append(dataset)
    outcome = _mixed(datasets)
    if tree.get("train_on_inputs") and not prefers and kinds - {"completion", "pretrain"}:
        what = "trains on what each turn says, and not on what stands around it; write false"
        draft.lose(Given(given.source, ("train_on_inputs",), True), what)
    if "completion" in kinds and len(kinds) > 1:
        draft.lose(
            given, "are texts, which are split, and rows that are dropped where they are long; train on one kind"
        )
    elif "completion" in kinds:
        outcome[EXCESS] = "split"
    if templates:
        outcome |= _template_of_axolotl(given, templates, draft)
    return outcome


def _written(kind: str) -> str:
    """Why a type that writes its own words around columns is lost."""
    if kind.startswith("alpaca"):
        return "writes other words around instruction, input and output; save its text in columns prompt and completion"
    return "writes words of its own around columns; save its text in columns that are read here (deepstow docs data)"


def _preferences(each: Given, entry: dict[str, Any], kind: str, draft: Draft, one: dict[str, Any]) -> set[str]:
    """Pairs of answers: the columns of what is there, of which the text is written otherwise."""
    if kind.startswith(("chat_template", "bradley_terry.chat_template")):
        one["columns"] = {"prompt": entry.get("field_messages", "messages")}
        draft.lose(
            each.at("type"),
            "ends an answer at the turn's last word, and the tokenizer's end token; here as the template ends it. "
            "Save prompt, chosen and rejected as text",
        )
    else:
        column = {"intel": "question", "icr": "input"}.get(kind.rpartition(".")[2])
        one["columns"] = {"prompt": column}
        draft.lose(each.at("type"), _written(kind).replace("read here", "prompt, chosen and rejected"))
    one["columns"] |= {name: entry.get(f"field_{name}") for name in ("chosen", "rejected")}
    return PLAIN | {"field_messages", "field_chosen", "field_rejected", "message_property_mappings", "roles"}


def _chat(each: Given, entry: dict[str, Any], kind: str, draft: Draft, one: dict[str, Any]) -> set[str]:
    """Turns of a chat, of which the assistant's are trained on."""
    sharegpt = kind.startswith("sharegpt")
    one["columns"] = {"messages": entry.get("field_messages", "conversations" if sharegpt else "messages")}
    one["assistant_only_loss"] = True
    if sharegpt:
        draft.lose(each.at("type"), "writes the words of FastChat around turns; write type: chat_template")
    usual = {
        "roles_to_train": lambda value: {*value} <= ROLES["assistant"],
        "train_on_eos": lambda value: value == "turn",
        "train_on_eot": lambda value: value == "turn",
        "roles": lambda value: all({*value[role]} <= ROLES.get(role, set()) for role in value),
        "message_property_mappings": lambda value: value in ({"role": "from", "content": "value"}, _same(value)),
        "message_field_role": lambda value: value in ("role", "from"),
        "message_field_content": lambda value: value in ("content", "value"),
        "message_field_training": lambda value: value == "train",
        "conversation": lambda value: sharegpt,
    }
    fits = {name for name, test in usual.items() if name in entry and test(entry[name])}
    return PLAIN | {"field_messages", "chat_template"} | fits


def _same(mapping: dict[str, str]) -> dict[str, str]:
    return {name: name for name in mapping}


def _template_of_axolotl(given: Given, chosen: list[tuple[str, Given]], draft: Draft) -> dict[str, Any]:
    """The chat template. Axolotl trains on an answer and on the end token that follows it."""
    tree, name = given.tree, chosen[0][0]
    at = Given(given.source, ("chat_template",), name)
    if len({template for template, _ in chosen}) > 1:
        draft.lose(chosen[1][1].at("chat_template"), f"is another than {name}; there is one here")
    words = AXOLOTL.get(name)
    if words:
        ends = tree.get("eot_tokens") or [(tree.get("special_tokens") or {}).get("eos_token")]
        if words.end not in ends:
            draft.lose(at, f"ends turns with {words.end}, which is trained on if eot_tokens has it; write it there")
        return {"data.chat_template": words.text()}
    cure = "write it into data.chat_template, with {% generation %} around them"
    why = f"trains on an answer and its end token, here on all that the template writes for a turn; {cure}"
    if name.startswith("tokenizer_default"):
        draft.lose(at, why)
        return {}
    jinja = tree.get("chat_template_jinja")
    if not jinja:
        draft.lose(at, "is a template of Axolotl; write its text into data.chat_template, with the answers marked")
        return {}
    if "generation" not in jinja or not {*(tree.get("eot_tokens") or ())}:
        draft.lose(at, why)
    return {"data.chat_template": jinja}


def stream_of_axolotl(given: Given, draft: Draft) -> dict[str, Any]:
    """Rows that are read while it trains."""
    datasets = []
    for at, entry in _inside(given):
        column = entry.get("text_column") or entry.get("field") or "text"
        dataset = {"path": _path(entry), "name": entry.get("name"), "split": entry.get("split")}
        datasets.append(dataset | {"columns": {"text": column} if column != "text" else {}})
        for name in sorted(entry.keys() - PLAIN - {"text_column", "field"}):
            draft.lose(at.at(name), "is not read of a data set; write the rows that it makes into a file")
    return _mixed(datasets) | {"data.streaming": True, EXCESS: "split", LOST: STREAM}


def test_of_axolotl(given: Given, draft: Draft) -> dict[str, Any] | str | None:
    """Rows to evaluate on, which are read as those to train on."""
    paths = [_path(entry) for _, entry in _inside(given)]
    return {"data.eval_path": paths[0]} if len(paths) == 1 else "are several; there is one data.eval_path here"


# --- LLaMA-Factory ---------------------------------------------------------------------------------------------------


def of_llama_factory(given: Given, draft: Draft) -> dict[str, Any] | str:
    """The names of data sets, by dataset_info.json beside the file or in ``dataset_dir``."""
    names = [name.strip() for name in given.value.split(",")] if isinstance(given.value, str) else given.value
    folder, info = _info(given)
    if given.name == "eval_dataset":
        paths = [_place(info.get(name, {}), folder) for name in names]
        return {"data.eval_path": paths[0]} if len(paths) == 1 and paths[0] else "is not found; write data.eval_path"
    datasets: list[dict[str, Any]] = []
    for name in names:
        if entry := info.get(name):
            datasets.append(_one_of_llama_factory(given, f"{name} ", entry, folder, draft))
        else:
            why_not = f"is not in {INFO}" if info else f"is a name in {INFO}, which is not in {folder}"
            draft.lose(given, f"{name} {why_not}; give its file, or write a path instead of the name")
            datasets.append({"path": name})
        datasets[-1]["limit"] = given.tree.get("max_samples")
    outcome, stage = _mixed(datasets), given.tree.get("stage", "sft")
    if stage == "pt":
        packs = given.tree.get("packing") is not False
        outcome |= {"data.packing": True, EXCESS: "split", LOST: STREAM} if packs else {EXCESS: "truncate"}
    elif any("messages" in dataset.get("columns", {}) for dataset in datasets):
        name = given.tree.get("template")
        words = LLAMA_FACTORY.get(str(name))
        outcome |= {"data.chat_template": words.text()} if words else {}
        if not words:
            why = "is a template of LLaMA-Factory; write its text into data.chat_template, with the answers marked"
            draft.lose(Given(given.source, ("template",), name), why)
    return outcome


def _info(given: Given) -> tuple[str, dict[str, Any]]:
    """The folder of the data, and what dataset_info.json says there."""
    folder = given.tree.get("dataset_dir", "data")
    beside = Path(given.source.file).parent
    for candidate in (Path(folder), beside / folder, beside):
        if (candidate / INFO).is_file():
            return str(candidate), mapping(candidate / INFO).tree
    return folder, {}


def _place(entry: dict[str, Any], folder: str) -> Any:
    return entry.get("hf_hub_url") or (str(Path(folder) / entry["file_name"]) if "file_name" in entry else None)


def _one_of_llama_factory(given: Given, at: str, entry: dict[str, Any], folder: str, draft: Draft) -> dict[str, Any]:
    """One data set as ours, with its columns if they are read here."""
    stage, columns = given.tree.get("stage", "sft"), entry.get("columns") or {}
    dataset: dict[str, Any] = {"path": _place(entry, folder), "name": entry.get("subset"), "split": entry.get("split")}
    if not dataset["path"]:
        draft.lose(given, f"{at}has neither file_name nor hf_hub_url; write a path instead of the name")
    odd = sorted(entry.keys() & {"folder", "num_samples", "script_url", "cloud_file_name"})
    odd += sorted(columns.keys() & {"images", "videos", "audios", "tools", "history", "kto_tag"})
    if odd:
        draft.lose(given, f"{at}has {', '.join(odd)}, which is not read; save the rows that it makes into a file")
    formatting = entry.get("formatting", "alpaca")
    if stage == "pt":
        dataset["columns"] = {"text": columns.get("prompt", "instruction")}
    elif stage != "sft" or entry.get("ranking"):
        draft.lose(given, f"{at}has turns that the template writes; save prompt, chosen and rejected as text")
    elif formatting == "sharegpt":
        tags = SHAREGPT | (entry.get("tags") or {})
        if not any(usual.items() <= tags.items() for usual in TAGS):
            draft.lose(given, f"{at}has tags that are not read; rename them to from, value, human and gpt")
        dataset["columns"] = {"messages": columns.get("messages", "conversations"), "system": columns.get("system")}
        dataset["assistant_only_loss"] = not given.tree.get("train_on_prompt")
    else:
        what = "has rows that the template writes as turns" if formatting == "alpaca" else "gets a system prompt more"
        draft.lose(given, f"{at}{what}; save them as messages, with formatting: sharegpt")
    dataset["columns"] = {name: column for name, column in dataset.get("columns", {}).items() if column}
    return dataset

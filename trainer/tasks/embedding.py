"""One vector per text, so that texts that belong together are near each other: ``AutoModel``, the mean over tokens, and
in-batch negatives (``MultipleNegativesRankingLoss``), both by sentence-transformers, with Transformers' Trainer.

A row is an anchor and its positive; the positives of the other rows of a micro-batch are its negatives. If
``data.columns`` names a ``negative``, a row has that as well. The texts of a micro-batch go through the model at once,
anchors first, so a plan counts two or three sequences per row. sentence-transformers' own Trainer takes anchors apart,
a second forward; of a loss that calls its ``embed_columns`` with ``separate_first=False`` a run has the bits.

The model that is trained, saved and exported is Transformers'. ``SentenceTransformer(FOLDER)`` opens the export, with
the mean over tokens, as it opens any such model.

Refused: saved models of sentence-transformers with other modules than those (another pooling, a dense layer), since
they would be trained as another model; models with a decoder of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.install import needs
from deepstow.strategies.core.protocol import Refusal
from deepstow.trainer.errors import DataError
from deepstow.trainer.tasks.task import TASKS, Field, Saved, Task, token_types

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig

CURE = "write data.columns: {negative: negative}, so that it is trained on and counted"
MODULES = ("Transformer", "Pooling", "Normalize")  # of a saved SentenceTransformer; the last changes no cosine


@TASKS.add
class Embedding(Task):
    """Texts that belong together, near each other."""

    name = "embedding"
    fields = (Field("anchor", (str,)), Field("positive", (str,)), Field("negative", (str,), required=False))
    model_class = "transformers.AutoModel"
    trainer = "deepstow.trainer.tasks.trainers.embedding.EmbeddingTrainer"
    adapters = "FEATURE_EXTRACTION"
    pipeline_tag = "sentence-similarity"
    own_loss = "a loss alone"

    def sequences(self, config: RunConfig) -> int:
        return 2 + ("negative" in config.data.columns)

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        yield from super().refusals(config)
        if find_spec("sentence_transformers") is None:
            yield Refusal("task", self.name, needs("sentence-transformers", "embedding"))

    def refuses_model(self, config: RunConfig, model: PretrainedConfig, saved: Saved) -> Iterator[Refusal]:
        if model.is_encoder_decoder:
            yield Refusal("task", self.name, f"{model.model_type} has a decoder; take an encoder, or a decoder alone")
        if extra := other_part(saved):
            what = f"is a SentenceTransformer with {extra}, and task {self.name} trains the mean over tokens alone"
            yield Refusal("model.name_or_path", config.model.name_or_path, what)

    def features(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, data: Any
    ) -> list[dict[str, Any] | str]:
        if "negative" in rows[0] and "negative" not in data.columns:
            raise DataError(f"data.columns: rows have a negative, too; {CURE}")
        names = [field.name for field in self.fields if field.name in rows[0]]
        limits: dict[str, Any] = {"truncation": True, "max_length": data.max_length, "verbose": False}
        token_ids = [tokenizer([row[name] for row in rows], **limits)["input_ids"] for name in names]
        pairs = (dict(zip(names, ids, strict=True)) for ids in zip(*token_ids, strict=True))
        return [pair if all(pair.values()) else f"field {min(pair, key=pair.get)!r} has no tokens" for pair in pairs]  # type: ignore[arg-type]

    def name_tokens(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """A template would have sentence-transformers wrap each text when it opens the export; here texts are plain."""
        tokenizer.chat_template = None

    def options(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> dict[str, Any]:
        import torch
        from transformers import DataCollatorWithPadding

        pad = DataCollatorWithPadding(tokenizer)

        def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
            texts = [{"input_ids": row[name]} for name in rows[0] for row in rows]
            # The labels are first: the Trainer asks them how many rows there are.
            return {"labels": torch.arange(len(rows)), **pad(texts)}

        return {"data_collator": collate}

    def targets(self, ids: Tensor, config: RunConfig) -> dict[str, Any]:
        return {"labels": ids[: len(ids) // self.sequences(config), 0]}

    def forward(self, model: Any, config: RunConfig) -> Callable[..., Any]:
        from deepstow.trainer.tasks.trainers.embedding import loss_of

        def run(**inputs: Any) -> dict[str, Any]:
            return {"loss": loss_of(model, inputs | token_types(model, config, inputs["input_ids"]))}

        return run


def other_part(saved: Saved) -> str:
    """What a saved SentenceTransformer has that is not trained here; empty if there is nothing, or it is none."""

    def read(file: str) -> Any:
        path = saved(file)
        return json.loads(path.read_text()) if path else {}

    for module in read("modules.json"):
        kind = module["type"].rpartition(".")[2]
        if kind not in MODULES:
            return f"a module {kind}"
        if kind == "Pooling":
            pooled = read(f"{module['path']}/config.json")
            older_modes = [name for name, value in pooled.items() if name.startswith("pooling_mode_") and value is True]
            mode = older_modes or pooled.get("pooling_mode", "mean")  # release 6 has one key for all modes
            if mode not in (["pooling_mode_mean_tokens"], ["mean"], "mean"):
                return f"the pooling {mode}"
    return ""

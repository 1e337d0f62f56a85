"""Which of two answers is better, or whether an answer is good: TRL's trainers for DPO, ORPO, KTO and reward models.

TRL tokenises the rows, adds the adapters of ``model.lora`` and computes the loss. DPO and KTO compare the model with
what it was before training, the reference. With adapters that is the same weights without them. Otherwise TRL asks the
model once for what it says about every row, before the first step (``precompute_ref_log_probs``), so no second model is
ever in memory. The forward of the reference keeps nothing for backward; its seconds are not in the simulated step.
With ``model.adapter`` the reference is that adapter, of which TRL keeps a frozen copy.

On a base in 4 or 8 bits TRL rounds adapters to bfloat16, except for ORPO; so are the plan's. Plain training has TRL's
bits. The memory engine has a float32 master of whatever is in bfloat16: its bits are those of TRL with such masters.

Refused: a second model as reference, which no plan has a place for; DeepSpeed's engine where the reference is asked
before training, since it does not exist then; a head in few bits, whose weight DPO and KTO read. ORPO is in TRL's
``experimental`` folder; a release may move it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.compose import requirements_of
from deepstow.strategies.core.install import needs
from deepstow.strategies.core.protocol import Refusal, Requirement
from deepstow.trainer.errors import DataError
from deepstow.trainer.tasks.prompts import carried
from deepstow.trainer.tasks.task import Field, Task, loaded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig

ANSWER = (str, list)  # a text, or a list of messages
PAIR = (Field("chosen", ANSWER), Field("rejected", ANSWER), Field("prompt", ANSWER, required=False))


class Preference(Task):
    """What TRL's trainers have in common."""

    runs_once = False
    adds_adapters = True
    folder = "trainer"  # of TRL, where its trainer is
    fused = False  # the loss reads the head's weight by itself, through TRL's fused head
    splits = True  # the loss counts the answer's tokens alone

    def sequences(self, config: RunConfig) -> int:
        return 1 + any(field.name == "rejected" for field in self.fields)

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        yield from super().refusals(config)
        found = find_spec("trl")
        if found is None:
            yield Refusal("task", self.name, needs("trl", "tasks"))
        elif not (Path(str(found.origin)).parent / self.folder).is_dir():
            yield Refusal("task", self.name, f"this release of TRL has no trl/{self.folder} any more; trl 1.16 has")
        before = self.fused and config.model.lora is None
        if before and Requirement.DEEPSPEED in requirements_of(config.strategies):
            what = "DeepSpeed's engine cannot be asked for the reference before training; write model.lora, or add"
            yield Refusal("task", self.name, f"{what} strategies.offload, whose engine can")

    def features(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, data: Any
    ) -> list[dict[str, Any] | str]:
        if tokenizer.eos_token is None:
            raise DataError("model.tokenizer: it has no eos token, with which an answer ends; name one that has")
        answers = tuple(name for name in ("chosen", "rejected", "completion") if name in rows[0])
        made = [carried(row, answers, needed=self.splits) for row in rows]
        mixed = "the rows are not all text, or all lists of messages"
        first = next((type(row[answers[0]]) for row in made if isinstance(row, dict)), None)
        return [mixed if isinstance(row, dict) and type(row[answers[0]]) is not first else row for row in made]

    def note(self, columns: Collection[str]) -> str:
        if "prompt" in columns or not self.splits:
            return ""
        return "the rows have no prompt column: what chosen and rejected share from their beginning is the prompt"

    def complete(self, given: dict[str, Any], config: RunConfig) -> dict[str, Any]:
        given = {"gradient_checkpointing": False, **given, "max_length": config.data.max_length}
        if self.fused:
            given["precompute_ref_log_probs"] = config.model.lora is None
        return given

    def options(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> dict[str, Any]:
        return {}

    def adapted(self, model: Any, config: RunConfig, adapt: Callable[[Any], Any]) -> Any:
        """TRL copies a saved adapter, which is the reference, and rounds those of a quantised base to bfloat16."""
        made = adapt(model)
        if self.has_reference and config.model.adapter is not None:
            made.add_adapter("ref", made.peft_config["default"])
        if config.model.quantization_config is not None:
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.bfloat16()
        return made

    def targets(self, ids: Tensor, config: RunConfig) -> dict[str, Any]:
        return super().targets(ids, config) if self.fused else {}

    def forward(self, model: Any, config: RunConfig) -> Callable[..., Any]:
        from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

        from deepstow.strategies.engine.tensors.quantised import is_quantised

        if config.training.disable_dropout is not False:
            disable_dropout_in_model(model)
        if not self.fused:
            return super().forward(model, config)
        head = model.get_output_embeddings()
        if head is not None and is_quantised(head.weight):
            what = "TRL multiplies with the head's weight itself, which has to stay whole; name the head (lm_head), too"
            key, section = "model.quantization_config.llm_int8_skip_modules", config.model.quantization_config
            raise config.error(key, section and section.llm_int8_skip_modules, what)
        outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
        add_fused_lm_head(model.get_base_model() if config.model.lora else model, outputs=outputs)

        def run(**inputs: Any) -> dict[str, Any]:
            return {"loss": model(**inputs, use_cache=False, fused_lm_head=True).log_probs.sum()}

        return run


class Dpo(Preference):
    """Direct preference optimisation."""

    name = "dpo"
    fields = PAIR
    trainer, arguments = "trl.DPOTrainer", "trl.DPOConfig"
    fused = has_reference = True

    def complete(self, given: dict[str, Any], config: RunConfig) -> dict[str, Any]:
        given = super().complete(given, config)
        return {**given, "loss_type": [given["loss_type"]]} if "loss_type" in given else given


class Kto(Preference):
    """Answers that are good or not, one by one. The rows are read in their order."""

    name = "kto"
    fields = (Field("prompt", ANSWER), Field("completion", ANSWER), Field("label", (bool,)))
    trainer, arguments = "trl.KTOTrainer", "trl.KTOConfig"
    fused = has_reference = True


class Reward(Preference):
    """A number for each text, larger for the chosen one."""

    name = "reward"
    fields = (*PAIR, Field("margin", (float, int), required=False))
    splits = False
    model_class = "transformers.AutoModelForSequenceClassification"
    trainer, arguments = "trl.RewardTrainer", "trl.RewardConfig"
    adapters = "SEQ_CLS"
    pipeline_tag = "text-classification"


class Orpo(Preference):
    """Odds ratio preference optimisation: no reference."""

    name = "orpo"
    fields = PAIR
    trainer, arguments = "trl.experimental.orpo.ORPOTrainer", "trl.experimental.orpo.ORPOConfig"
    folder = "experimental/orpo"

    def complete(self, given: dict[str, Any], config: RunConfig) -> dict[str, Any]:
        return {**super().complete(given, config), "remove_unused_columns": False}

    def adapted(self, model: Any, config: RunConfig, adapt: Callable[[Any], Any]) -> Any:
        """TRL's experimental trainers leave that to PEFT: what rests in 16 bits beside a quantised base becomes
        float32, and in mixed precision adapters, embeddings and head of one in 4 bits are rounded.
        """
        section = config.model.quantization_config
        if section is None or config.model.adapter is not None:
            return adapt(model)
        from peft import prepare_model_for_kbit_training

        made = adapt(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))
        if config.training.bf16 and section.load_in_4bit:
            loaded("trl.experimental.utils.peft_module_casting_to_bf16")(made)
        return made

    def forward(self, model: Any, config: RunConfig) -> Callable[..., Any]:
        from torch.nn.functional import cross_entropy

        call, trainer = super().forward(model, config), loaded(self.trainer)

        def run(**inputs: Any) -> dict[str, Any]:
            ids, logits = inputs["input_ids"], call(**inputs, use_cache=False).logits
            half = len(ids) // 2
            known = cross_entropy(logits[:half, :-1].flatten(0, 1), ids[:half, 1:].flatten())
            return {"loss": known - trainer.get_batch_logps(logits, ids, average_log_prob=True).sum()}

        return run

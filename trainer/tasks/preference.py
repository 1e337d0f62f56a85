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
from typing import TYPE_CHECKING, Any, Literal, get_args

from deepstow.strategies.core.compose import requirements_of
from deepstow.strategies.core.install import needs
from deepstow.strategies.core.protocol import Refusal, Requirement
from deepstow.trainer.errors import DataError
from deepstow.trainer.tasks.prompts import carried
from deepstow.trainer.tasks.task import TASKS, Field, Task, loaded
from deepstow.trainer.values import OFF, WRONG, Found, Values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from deepstow.trainer.config.sections import RunConfig

# Losses of TRL's trainers; those that need further options are left out.
DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
    "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
KtoLoss = Literal["kto", "apo_zero_unpaired"]
OF_REFERENCE = ("training.beta", "training.loss_type", "training.precompute_ref_log_probs")
ANSWER = (str, list)  # a text, or a list of messages
PAIR = (
    Field("chosen", ANSWER, chats=True),
    Field("rejected", ANSWER, chats=True),
    Field("prompt", ANSWER, required=False, chats=True),
)


class Preference(Task):
    """What TRL's trainers have in common."""

    runs_once = False
    adds_adapters = True
    folder = "trainer"  # of TRL, where its trainer is
    fused = False  # the loss reads the head's weight by itself, through TRL's fused head
    rounds = True  # TRL rounds what is trained in full beside a quantised base
    splits = True  # the loss counts the answer's tokens alone
    losses: tuple[str, ...] = ()  # by TRL's names, where there are several
    keys: tuple[str, ...] = ("training.disable_dropout",)
    own_loss = "TRL's rewards"
    quantised = True

    def conflicts(self, m: Values, d: Values, t: Values) -> Found:
        if self.losses:
            if t.precompute_ref_log_probs is False and m.lora is None:
                what = "a second model as reference is not kept; leave it out, or write model.lora, whose base is one"
                yield "training.precompute_ref_log_probs", what
            if t.precompute_ref_log_probs and m.lora not in (None, WRONG):
                yield "training.precompute_ref_log_probs", "the reference is the base of model.lora; leave it out"
            if t.loss_type not in (None, WRONG) and t.loss_type not in self.losses:
                yield "training.loss_type", f"is not a loss of task {self.name}"
        if not isinstance(m.quantization_config, dict):
            return
        if t.fp16:
            what = "TRL trains adapters of a quantised base in bfloat16; write training.bf16"
            yield "training.fp16", f"task {self.name}: {what}"
        lora = m.lora if isinstance(m.lora, dict) else {}
        in_full = not self.splits or lora.get("modules_to_save") or lora.get("bias", "none") != "none"
        if self.rounds and in_full and t.bf16 in OFF and t.fp16 in OFF and m.dtype == "float32":
            what = "TRL has what is trained in full in bfloat16 beside a quantised base, and its inputs in float32"
            yield "training.bf16", f"task {self.name}: {what}; write true"

    def sequences(self, config: RunConfig) -> int:
        return 1 + any(field.name == "rejected" for field in self.fields)

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        yield from super().refusals(config)
        spec = find_spec("trl")
        if spec is None:
            yield Refusal("task", self.name, needs("trl", "tasks"))
        elif not (Path(str(spec.origin)).parent / self.folder).is_dir():
            yield Refusal("task", self.name, f"this release of TRL has no trl/{self.folder} any more; trl 1.16 has")
        precomputes = self.fused and config.model.lora is None
        if precomputes and Requirement.DEEPSPEED in requirements_of(config.strategies):
            what = "DeepSpeed's engine cannot be asked for the reference before training; write model.lora, or add"
            yield Refusal("task", self.name, f"{what} strategies.offload, whose engine can")

    def features(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, data: Any
    ) -> list[dict[str, Any] | str]:
        if tokenizer.eos_token is None:
            raise DataError("model.tokenizer: it has no eos token, with which an answer ends; name one that has")
        answers = tuple(name for name in ("chosen", "rejected", "completion") if name in rows[0])
        prepared = [carried(row, answers, needed=self.splits) for row in rows]
        mixed = "the rows are not all text, or all lists of messages"
        first = next((type(row[answers[0]]) for row in prepared if isinstance(row, dict)), None)
        return [mixed if isinstance(row, dict) and type(row[answers[0]]) is not first else row for row in prepared]

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
        peft_model = adapt(model)
        if self.has_reference and config.model.adapter is not None:
            peft_model.add_adapter("ref", peft_model.peft_config["default"])
        if config.model.quantization_config is not None:
            for parameter in peft_model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.bfloat16()
        return peft_model

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


@TASKS.add
class Dpo(Preference):
    """Direct preference optimisation."""

    name = "dpo"
    fields = PAIR
    trainer, arguments = "trl.DPOTrainer", "trl.DPOConfig"
    fused = has_reference = True
    losses = get_args(DpoLoss)
    keys = (*Preference.keys, *OF_REFERENCE)

    def complete(self, given: dict[str, Any], config: RunConfig) -> dict[str, Any]:
        given = super().complete(given, config)
        return {**given, "loss_type": [given["loss_type"]]} if "loss_type" in given else given


@TASKS.add
class Kto(Preference):
    """Answers that are good or not, one by one. The rows are read in their order."""

    name = "kto"
    fields = (Field("prompt", ANSWER, chats=True), Field("completion", ANSWER, chats=True), Field("label", (bool,)))
    trainer, arguments = "trl.KTOTrainer", "trl.KTOConfig"
    fused = has_reference = True
    losses = get_args(KtoLoss)
    keys = (*Preference.keys, *OF_REFERENCE, "training.desirable_weight", "training.undesirable_weight")

    def conflicts(self, m: Values, d: Values, t: Values) -> Found:
        yield from super().conflicts(m, d, t)
        if t.loss_type == "apo_zero_unpaired":
            return
        if t.per_device_train_batch_size == 1:
            what = "kto compares each row with others of its batch; write 2 or more"
            yield "training.per_device_train_batch_size", what
        if t.train_sampling_strategy not in (None, "sequential", WRONG):
            yield "training.train_sampling_strategy", "kto pairs rows in the order of the data; write sequential"


@TASKS.add
class Reward(Preference):
    """A number for each text, larger for the chosen one."""

    name = "reward"
    fields = (*PAIR, Field("margin", (float, int), required=False))
    splits = False
    labels = ("reward",)
    keys = (*Preference.keys, "training.center_rewards_coefficient", "model.labels")
    model_class = "transformers.AutoModelForSequenceClassification"
    trainer, arguments = "trl.RewardTrainer", "trl.RewardConfig"
    adapters = "SEQ_CLS"
    pipeline_tag = "text-classification"


@TASKS.add
class Orpo(Preference):
    """Odds ratio preference optimisation: no reference."""

    name = "orpo"
    fields = PAIR
    trainer, arguments = "trl.experimental.orpo.ORPOTrainer", "trl.experimental.orpo.ORPOConfig"
    folder = "experimental/orpo"
    rounds = False
    keys = (*Preference.keys, "training.beta")

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

        peft_model = adapt(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))
        if config.training.bf16 and section.load_in_4bit:
            loaded("trl.experimental.utils.peft_module_casting_to_bf16")(peft_model)
        return peft_model

    def forward(self, model: Any, config: RunConfig) -> Callable[..., Any]:
        from torch.nn.functional import cross_entropy

        call, trainer = super().forward(model, config), loaded(self.trainer)

        def run(**inputs: Any) -> dict[str, Any]:
            ids, logits = inputs["input_ids"], call(**inputs, use_cache=False).logits
            half = len(ids) // 2
            nll = cross_entropy(logits[:half, :-1].flatten(0, 1), ids[:half, 1:].flatten())
            return {"loss": nll - trainer.get_batch_logps(logits, ids, average_log_prob=True).sum()}

        return run

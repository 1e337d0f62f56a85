"""Which strategies, options and keys do not go together: one table, from which ``docs/compatibility.md`` is generated.

A plug-in keeps its rules in its own file, as ``RULES``. Checks that need arithmetic, such as what divides what, or the
model are code in the strategies. Rules whose key is outside of ``strategies`` are compared when a config is read, where
all of its keys are known; the others by ``refusals``, once the facts of the run are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstow.strategies.core.facts import Precision, RunFacts
from deepstow.strategies.core.formats import names_of
from deepstow.strategies.core.protocol import COMPILING, Refusal, Strategy

if TYPE_CHECKING:
    ValueOf = Callable[[str], Any]

OFF = (None, False, "none")
CLAUSES = ("which ", "whose ", "beside which ")  # a reason that begins so follows a comma, not a colon


class Rule(NamedTuple):
    """``key`` is refused if it and every term of ``beside`` hold, and no term of ``unless`` does.

    A term is a dotted key, which holds unless its value is one of ``OFF``. With values it holds if the key has one of
    them (``a.b = c|d``), or another one (``a.b != c``). ``why`` is about what ``beside`` names; without it, and where
    the key is outside of ``strategies``, about the key.
    """

    key: str
    beside: str  # terms with " and " between; empty: none
    why: str
    cure: str = ""  # what to write instead; empty: leave one of them out
    unless: str = ""  # terms with " or " between; one may be several with " and " between

    def applies(self, value_of: ValueOf) -> bool:
        terms = [self.key, *filter(None, self.beside.split(" and "))]
        spared = [alternative.split(" and ") for alternative in self.unless.split(" or ") if alternative]
        refused = all(is_on(term, value_of) for term in terms)
        return refused and not any(all(is_on(term, value_of) for term in together) for together in spared)

    def words(self, value_of: ValueOf) -> str:
        """Why, and the cure, behind the key and its value."""
        if not self.beside or not self.key.startswith("strategies."):
            return f"{self.why}; {self.cure or 'keep one of the two'}"
        shown = [_shown(term, value_of) for term in self.beside.split(" and ")]
        cure = self.cure or f"leave one of the {'two' if len(shown) == 1 else 'three'} out"
        together = f"cannot go with {' and '.join(shown)}{' together' * (len(shown) > 1)}"
        return f"{together}{', ' if self.why.startswith(CLAUSES) else ': '}{self.why}; {cure}"


def is_on(term: str, value_of: ValueOf) -> bool:
    """Whether ``term`` holds. A key that is not there, or None, never does, not even for ``!=``."""
    key, relation, values = parts_of(term)
    value = value_of(key)
    if not relation or value is None:
        return value not in OFF
    return (str(value) in values) is (relation == "=")


def parts_of(term: str) -> tuple[str, str, tuple[str, ...]]:
    """The key of a term, its relation ("=", "!=" or empty) and its values."""
    key, *comparison = term.split(" ")
    return key, comparison[0] if comparison else "", tuple(comparison[1].split("|")) if comparison else ()


def _shown(term: str, value_of: ValueOf) -> str:
    key, relation, _ = parts_of(term)
    return f"{key} = {str(value_of(key)).lower()}" if relation else key


def values_in(tree: Mapping[str, Any]) -> ValueOf:
    """What finds the value of a dotted key in ``tree``; None: it is not there."""

    def value_of(key: str) -> Any:
        value: Any = tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    return value_of


def refusals(rules: Iterable[Rule], strategies: Mapping[str, Strategy], run: RunFacts) -> Iterator[Refusal]:
    """What ``rules`` refuse of ``strategies`` in such a run. An option that was left at its default is not to blame:
    then the refusal names its section.
    """
    model = {"lora": run.adapters}
    training = {"optim": run.optim, "torch_compile": run.compiled, "gradient_checkpointing": run.recomputes}
    training |= {precision.value: run.precision is precision for precision in (Precision.BF16, Precision.FP16)}
    options = {name: strategy.model_dump() for name, strategy in strategies.items()}
    value_of = values_in({"strategies": options, "model": model, "training": training})
    for rule in rules:
        if rule.applies(value_of):
            key, *_ = parts_of(rule.key)
            value = value_of(key)
            if key.startswith("strategies."):
                _, name, option = key.split(".")
                written = strategies[name].written
                key, value = (key, written[option]) if option in written else (f"strategies.{name}", written)
            yield Refusal(key, value, rule.words(value_of))


def _of_sections(strategy: str, keys: Mapping[str, str]) -> tuple[Rule, ...]:
    """One rule for each key of another section that cannot go with ``strategy``: why, and behind "; " the cure."""
    rules = []
    for key, reason in keys.items():
        why, _, cure = reason.partition("; ")
        rules.append(Rule(key, f"strategies.{strategy}", why, cure))
    return tuple(rules)


_TENSOR = "strategies.tensor.degree"
_IN_SLICES = "strategies.tensor.sequence_parallel"
_EXPERTS = "strategies.experts.degree"
_SEQUENCE = "strategies.sequence.degree"
_STAGES = "strategies.pipeline"
_TWO_PARTS_PER_STAGE = "strategies.pipeline.schedule = interleaved|interleaved_zero_bubble|zbv|dualpipev"
_SPLIT_BACKWARD = "strategies.pipeline.schedule = interleaved_zero_bubble|zbv|dualpipev"
_SHARED = "strategies.zero.stage = 1|2|3"
_OTHER_ENGINE = "strategies.offload or strategies.pipeline"  # which do zero's work themselves
_ON_HOST = "strategies.recompute.activation_offloading = True"
_DISK = "strategies.offload.disk"
_ON_DEVICE = "strategies.offload.site = device|streamed"
_MASTERS = "strategies.offload.masters != fp32"
_MOMENTS = "strategies.offload.moments != fp32"
_DIFFERENT_ROWS = "training.train_sampling_strategy = batch_rebalance"
_OTHER_KERNELS = "eager|flash_attention_2|flash_attention_3|flash_attention_4|flex_attention|sdpa_varlen"
_MERGE = "merge it into its base, and train a new one"
_NOT_COMPARED = "it was not compared with plain training"
_KERNEL = "strategies.sequence computes attention by torch's scaled_dot_product_attention; leave it out, or write sdpa"

RULES = (
    # --- who holds which share ---
    Rule("strategies.zero.stage = 3", "strategies.tensor", "which divides weights", "write 2", "strategies.pipeline"),
    *(
        Rule("strategies.zero.stage = 0", f"strategies.tensor and training.{half}",
             "DeepSpeed clips by the norm of one rank's gradients there", "write 1 or 2", _OTHER_ENGINE)
        for half in ("bf16", "fp16")
    ),
    Rule("strategies.zero.stage = 0|3", "strategies.experts", "which has been compared with stages 1 and 2",
         "write one of them, or leave strategies.zero out"),
    Rule("strategies.zero.stage = 2|3", _STAGES, "its stages divide weights, and sum gradients of micro-batches whole",
         "leave zero out, or write stage 1: copies of a stage share the optimizer's state"),
    Rule(_TENSOR, "strategies.linear", "it replaces products of whole layers", "leave strategies.linear out"),
    Rule(_TENSOR, "strategies.cross_entropy", "it multiplies by the whole head", "leave strategies.cross_entropy out"),
    Rule(_TENSOR, f"{_STAGES} and strategies.offload", "the memory engine in stages of divided layers is not built"),
    *(Rule(_TENSOR, f"strategies.offload and {key}", _NOT_COMPARED) for key in ("model.lora", "training.fp16")),
    Rule(_TENSOR, "strategies.offload.disk", "its parts on a disk were not compared", "leave disk out"),
    Rule(_IN_SLICES, "strategies.offload", _NOT_COMPARED),
    Rule(_IN_SLICES, _STAGES, "whose stages send each other whole hidden states", "leave one out"),
    Rule(_IN_SLICES, "model.lora", _NOT_COMPARED),
    Rule(_EXPERTS, "strategies.tensor", "it has not been built to divide layers whose experts are divided"),
    Rule(_EXPERTS, _STAGES, "its stages are not wrapped by what averages gradients"),
    Rule(_EXPERTS, "strategies.offload", "its engine averages all gradients over all ranks"),
    Rule(_EXPERTS, "strategies.sequence", "it has not been built for rows whose parts are on several ranks"),
    Rule(_SEQUENCE, "strategies.tensor", "which is not built", "leave one out"),
    Rule(_SEQUENCE, _STAGES, "which is not built", "leave one out"),
    # --- what forward keeps ---
    Rule("strategies.recompute.policy = selective|auto", _SPLIT_BACKWARD,
         "it passes through a block twice in backward, and torch gives what was kept to one pass",
         "write policy: full, or schedule: 1f1b"),
    Rule("strategies.recompute.policy = selective", "training.torch_compile",
         "operators inside of compiled blocks cannot be kept one by one", "write full or auto"),
    Rule(_ON_HOST, "strategies.recompute.policy = auto", "it weighs that itself", "write auto"),
    Rule(_ON_HOST, "strategies.recompute.policy = none", "it keeps all", "write selective or full"),
    Rule(_ON_HOST, _STAGES, "the host has room for one micro-batch, and stages of a pipeline have several",
         "leave it out"),
    # --- where state rests ---
    Rule(_TWO_PARTS_PER_STAGE, "strategies.offload", "its engine trains one part in a stage, and this gives two",
         "write 1f1b or gpipe"),
    Rule("strategies.offload.weights = streamed", "strategies.zero.stage = 1|2", "it keeps all weights on each device",
         "write auto, or stage 3"),
    Rule("strategies.offload.gather = host", "", "is of parts of weights, which ranks have with strategies.zero only",
         "leave it out", _SHARED),
    Rule("strategies.offload.reduction = fast", "", "is about ranks that share the state",
         "write strategies.zero with stage 1, 2 or 3 beside it, or exact", _SHARED),
    Rule(_DISK, _ON_DEVICE, "a disk is for state that the CPU updates and a base of adapters", "write site: auto",
         "model.lora"),
    Rule(_MASTERS, "", f"goes with moments in {' or '.join(names_of('moments'))}", "write moments: int8 beside it",
         _MOMENTS),
    Rule(_MASTERS, "", "is for weights in bf16", "write training.bf16: true, or leave it out", "training.bf16"),
    Rule(_MASTERS, "model.lora", "adapters are trained in fp32", "leave it out"),
    Rule(_MOMENTS, "training.fp16", "which nobody has tried", "write training.bf16: true"),
    Rule(_MOMENTS, _DISK, "such moments are in the host's memory, not on a disk"),
    Rule(_MOMENTS, _ON_DEVICE, "such moments are for what the CPU updates", "write site: host"),
    # --- keys of other sections ---
    Rule("training.optim = adafactor", "strategies.tensor",
         "its state is of whole rows and columns, which strategies.tensor divides", "write adamw_torch_fused"),
    Rule("training.optim = adagrad", "strategies.tensor",
         "it makes its state before strategies.tensor divides the weights", "write adamw_torch_fused"),
    Rule("training.optim = adafactor", "strategies.experts",
         "its state is of whole rows and columns, which strategies.experts divides", "write adamw_torch_fused"),
    Rule("training.optim = adagrad", _SHARED,
         "strategies.zero would lose its parameter groups and with them weight decay",
         "write adamw_torch_fused, or stage 0", _OTHER_ENGINE),
    Rule("training.torch_compile", "strategies.zero.stage = 3",
         "DeepSpeed fetches weights by hooks inside of blocks, which are compiled",
         "write strategies.offload beside it, or stage 2", _OTHER_ENGINE),
    Rule("training.fp16", _STAGES, "strategies.pipeline scales no loss", "write training.bf16"),
    Rule("model.adapter", "strategies.zero.stage = 3",
         "stage 3 of strategies.zero divides weights before an adapter could be loaded", _MERGE),
    Rule("model.quantization_config", "strategies.zero",
         "strategies.zero has not been compared with quantised weights"),
    *_of_sections(
        "linear",
        {
            "quantize.qat": "strategies.linear chooses products of layers that quantize.qat replaces",
            **dict.fromkeys(COMPILING, "strategies.linear already decides how matrix products are taken"),
        },
    ),
    *(
        Rule(f"training.{key}_checkpointing", "strategies.recompute",
             "strategies.recompute already decides what is kept")
        for key in ("gradient", "activation")
    ),
    *_of_sections(
        "tensor",
        {
            _DIFFERENT_ROWS: "it gives ranks of one copy of the model different rows",
            "model.quantization_config": "strategies.tensor divides weights, and quantised ones have no parts",
            "model.adapter": f"strategies.tensor divides weights before an adapter could be loaded; {_MERGE}",
            "model.attention_mask": "strategies.tensor has not been compared with one",
            "model.lora.lora_dropout": "ranks draw the same numbers and would drop the same places of each part",
            "model.lora.use_dora": "the norms of its weights are over rows and columns that strategies.tensor divides",
            "model.lora.modules_to_save": "strategies.tensor divides layers by their names, and those get others",
            **dict.fromkeys(COMPILING, "strategies.tensor exchanges inside every layer, which is not compiled"),
        },
    ),
    *_of_sections(
        "experts",
        {
            "training.fp16": "its loss scale would follow the experts of one rank; write training.bf16",
            "model.quantization_config": "strategies.experts divides weights, and quantised ones have no parts",
            "model.lora": "strategies.experts has not been built for adapters",
            "training.use_liger_kernel": "it replaces the forward that strategies.experts replaces",
            "training.sample_prompts": "ranks generate texts of different lengths, and experts are on all of them",
            **dict.fromkeys(COMPILING, "strategies.experts exchanges inside layers, which are not compiled"),
        },
    ),
    *_of_sections(
        "pipeline",
        {
            "model.quantization_config": "strategies.pipeline cuts a model whose weights are all trained",
            "model.attention_mask": "strategies.pipeline has not been compared with one",
            "model.lora": "strategies.pipeline cuts the model's own forward, and adapters wrap it",
            _DIFFERENT_ROWS: "it gives ranks of one copy of the model different rows",
            **dict.fromkeys(COMPILING, "strategies.pipeline changes what stands in the model while it runs"),
            "training.use_liger_kernel": "strategies.pipeline has not been compared with Liger's kernels",
            "training.neftune_noise_alpha": "strategies.pipeline has no embedding in most stages to add noise to",
            "training.compute_metrics": "the last stage of strategies.pipeline sends losses of tokens, and no logits",
            "training.sample_prompts": "strategies.pipeline cuts the model into stages, which cannot generate",
            "training.include_num_input_tokens_seen": "strategies.pipeline gives every stage the same tokens",
        },
    ),
    *_of_sections(
        "sequence",
        {
            _DIFFERENT_ROWS: "it gives ranks of one row different rows",
            "training.compute_metrics": "strategies.sequence gives each rank the logits of a slice of every row",
            "training.fp16": "gradients of slices are larger, so other steps would be skipped; write training.bf16",
            "training.label_smoothing_factor": "strategies.sequence sums the loss of the model itself over the slices",
            "training.neftune_noise_alpha": "its noise depends on the length of a row, of which a rank has a slice",
            "training.use_liger_kernel": "strategies.sequence has not been compared with Liger's kernels",
            "training.include_num_input_tokens_seen": "strategies.sequence gives ranks of a row the same tokens",
            "model.attention_mask": "strategies.sequence attends by itself, over ranks",
            "model.lora.lora_dropout": "ranks of a row draw the same numbers and would drop the same places of slices",
            "model.trust_remote_code": "strategies.sequence replaces attention where a model asks Transformers for it",
            f"model.attn_implementation = {_OTHER_KERNELS}": _KERNEL,
            **dict.fromkeys(COMPILING, "strategies.sequence exchanges inside every attention, which is not compiled"),
        },
    ),
)  # fmt: skip

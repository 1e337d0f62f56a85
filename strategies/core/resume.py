"""What a resumed run may do with a key that it has otherwise than the run that saved: a rule, which stands at the key.

* ``free``: it says where, when and how much is reported, kept or moved. No bit of the result depends on it.
* ``said``: it is honoured, and the log says old and new value.
* ``fixed``: it is refused. The saved state does not fit another value, or nobody has said that it does.
* a name, such as ``moments``: the result changes. It is refused unless ``training.allow_change`` has the name.
* ``evaluations``: free, but fixed where the learning rate follows evaluations.
* ``sums``: said, with a word more where the gradients of a tied head are added in another order then.
* ``architecture``: a model's config. What shapes parameters is fixed; all else is ``dropout`` or ``model``.

A key without a rule has the one of its section or strategy. A section or strategy without one is fixed.
"""

from typing import Any, Final, Literal, get_args

from pydantic.fields import FieldInfo

Change = Literal[
    "data", "max_length", "packing", "seed", "order", "batch_size", "accumulation", "loss", "dropout", "betas",
    "weight_decay", "clipping", "precision", "kernels", "model", "pruning", "qat", "compression", "moments", "ranks",
]  # fmt: skip
Rule = Literal["free", "said", "fixed", "evaluations", "sums", "architecture"] | Change
CHANGES: Final[tuple[str, ...]] = get_args(Change)
RULES: Final[frozenset[str]] = frozenset(["free", "said", "fixed", "evaluations", "sums", "architecture", *CHANGES])


def on_resume(rule: Rule) -> dict[str, Any]:
    """The rule of a key, as pydantic's ``Field`` takes it: ``json_schema_extra=on_resume("moments")``."""
    assert rule in RULES, f"{rule} is no rule for resuming; rules are {', '.join(sorted(RULES))}"
    return {"resume": rule}


def rule_at(field: FieldInfo, around: str) -> str:
    """The rule of a key; ``around``: that of its section or strategy, which it has if it states none."""
    extra = field.json_schema_extra
    return str(extra.get("resume", around)) if isinstance(extra, dict) else around

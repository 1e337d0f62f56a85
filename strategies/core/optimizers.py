"""Optimizers by Hugging Face's names, and what each keeps for an element of a weight.

The memory engine updates pieces of parameters, wherever they lie. So it has those of torch's optimizers, and Lion of
bitsandbytes, whose update of an element needs that element of weight, gradient and state and nothing else: ``STATE``.
Not among them: factored moments (Adafactor), norms of whole tensors (LAMB, Muon), moments in 8 bits of other packages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from deepstow.strategies.core.install import needs

# By class: its names of fp32 numbers per element, in the order in which its function takes them, each with the option
# without which there is no such number.
STATE: Mapping[str, Mapping[str, str]] = {
    "Adadelta": {"square_avg": "", "acc_delta": ""},
    "Adagrad": {"sum": ""},
    "Adam": {"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    "Adamax": {"exp_avg": "", "exp_inf": ""},
    "AdamW": {"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    "Lion": {"state1": ""},
    "RAdam": {"exp_avg": "", "exp_avg_sq": ""},
    "RMSprop": {"square_avg": "", "grad_avg": "centered", "momentum_buffer": "momentum"},
    "SGD": {"momentum_buffer": "momentum"},
}
# By Hugging Face's name: the class, and what ``training.optim_args`` may say. Weight decay is a key of its own.
OPTIMIZERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "adamw_torch": ("AdamW", ()),
    "adamw_torch_fused": ("AdamW", ()),
    "adafactor": ("Adafactor", ()),
    "sgd": ("SGD", ("momentum", "nesterov")),
    "adagrad": ("Adagrad", ("lr_decay", "eps")),
    "rmsprop": ("RMSprop", ("alpha", "eps", "momentum", "centered")),
    "lion_32bit": ("Lion", ()),
}
BITSANDBYTES = ("lion_32bit",)  # those that are in that package
ELEMENTWISE = tuple(name for name, (kind, _) in OPTIMIZERS.items() if kind in STATE)
FLAGS = ("nesterov", "centered")
# Patterns of further names of Hugging Face's, and why not; the first that matches.
REFUSED: Mapping[str, str] = {
    r"_xla$|_npu_": "runs on that hardware only",
    "anyprecision": "needs torchdistx, which is no longer maintained",
    r"torch_[48]bit": "keeps moments of torchao's own type, which no plan here counts",
    "galore|apollo": "projects whole matrices, by a package that is not tested here",
    "bnb|8bit|paged|ademamix": "is updated by bitsandbytes, which keeps state of its own that no plan here counts",
    "lomo": "updates in hooks of its own while backward runs",
    "schedule_free": "evaluates and saves other weights than it trains, and has to be told which each time",
    "mini|muon|lamb|shampoo|soap|^came|sophia": "needs blocks or norms of whole matrices, and is none of Transformers'",
    "^grokadamw$|^stable_adamw$": "needs a package that is not tested here",
}


def refuse_optimizer(name: object) -> object:
    """``name``; raise ValueError if it is of a kind that cannot be had here, or of a package that is not installed."""
    if name in BITSANDBYTES and find_spec("bitsandbytes") is None:
        raise ValueError(needs("bitsandbytes", "qlora"))
    why = next((why for pattern, why in REFUSED.items() if re.search(pattern, str(name))), None)
    if why is not None:
        instead = "lion_32bit" if "lion" in str(name) else "adamw_torch_fused"
        raise ValueError(f"{why}; write {instead}, and strategies.offload if its state does not fit on the device")
    return name


def options_of(name: str, arguments: str | None) -> dict[str, float]:
    """What ``training.optim_args`` says to the optimizer of this name. Raise ValueError: it cannot be meant."""
    allowed, options = OPTIMIZERS[name][1], dict[str, float]()
    for argument in arguments.replace(" ", "").split(",") if arguments else ():
        key, _, value = argument.partition("=")
        if key not in allowed:
            keys = "adam_beta1, adam_beta2 and adam_epsilon" if "adam" in name else "learning_rate and weight_decay"
            keys = "adam_beta1 and adam_beta2" if "lion" in name else keys
            takes = f"{name} takes {', '.join(allowed)}, as in {allowed[0]}=0.9" if allowed else f"{name} takes none"
            raise ValueError(f"{takes}; training.{keys} are keys of their own")
        try:
            number = float({"true": "1", "false": "0"}[value] if key in FLAGS else value)
        except (KeyError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise ValueError(f"{key} must be {'true or false' if key in FLAGS else 'a number >= 0'}")
        options[key] = number
    if options.get("nesterov") and not options.get("momentum"):
        raise ValueError("nesterov=true needs a momentum, as in momentum=0.9")
    return options


def state_names(kind: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Torch's names of the state that its optimizer ``kind`` keeps for each element, with these ``options``."""
    return tuple(name for name, option in STATE.get(kind, {}).items() if not option or options.get(option))


def moments_of(name: str, arguments: str | None) -> int:
    """fp32 numbers of state per element. Adafactor keeps as good as none."""
    return len(state_names(OPTIMIZERS[name][0], options_of(name, arguments)))

"""What models add to the mean over tokens in their loss, as mixtures of experts do for balanced routers; and models
whose loss is not of the next token.

Transformers' Trainer has a model divide its sum over tokens by the number of tokens of the whole update. What the model
adds to that would count once for each micro-batch and rank. Here it counts as the mean over both (``trainer.py``).
"""

from __future__ import annotations

from typing import Any

# By what a config switches such terms on; a test compares them with the code of all language models in Transformers.
SWITCHES = ("output_router_logits", "z_loss_coefficient")

# Causal models that take labels as what each token is to be, so that rows, which are their own labels, teach nothing.
# XLNet and ProphetNet, whose losses are of other kinds, are among them. The test compares these as well.
UNSHIFTED = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "gemma4_assistant",
    "gemma4_unified_assistant", "marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper", "xlm",
    "xlnet",
)  # fmt: skip


def switched_on(config: Any) -> str | None:
    """The key by which the model of this config adds a term to its loss; None: it adds none."""
    configs = (config, config.get_text_config())
    return next((key for key in SWITCHES if any(getattr(section, key, None) for section in configs)), None)

"""Layers first on 300 random cases: models, what is trained of them, plans, windows. The bits of plain training."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from deepstow.strategies.core.protocol import MemoryRefusal
from deepstow.strategies.engine.forward.checkpointing import recompute
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.engine import checkpointing, differences, plain, plan_of, stowed
from tests.helpers.grid import DRAWING, NORMS, TRANSFERS
from tests.helpers.marks import rarely
from tests.helpers.models import VOCAB, build

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
CASES, QUICK = 300, 4
ADAPTED = {"llama": ["q_proj", "v_proj", "down_proj"], "qwen3": ["k_proj", "up_proj"], "gpt2": ["c_attn"]}
Batch = dict[str, torch.Tensor]


class Case:
    """The one of this number; the same each time."""

    def __init__(self, number: int) -> None:
        self._dice = dice = random.Random(number)
        self.model = dice.choice(["llama", "qwen3", "bloom", "mixtral", "experts", *DRAWING])
        self.dtype = dice.choice([torch.float32, torch.bfloat16])
        self.trained = dice.choice(["all", "some", *(["adapters"] if self.model in ADAPTED else [])])
        self.drops = self.model in DRAWING or (self.trained == "adapters" and dice.random() < 0.5)
        self.accumulation = dice.randint(2, 16)
        clips = ["in-backward", "passing", "off", "tight", "loose"]
        self.clip = dice.choice([clip for clip in clips if (self.model, clip) != ("experts", "passing")])
        self.groups = dice.choice([1, 2])
        self.transfer = dice.choice(list(TRANSFERS))
        self.is_planned = dice.random() < 0.4 and self.groups == 1 and self.clip != "passing"
        self.is_planned &= self.model != "experts"  # whose forward looks at values, so it cannot be counted
        self.recompute = dice.choice(["none", "later"])
        self.batches = list(self._batches(self.accumulation + dice.randint(1, 2 * self.accumulation)))
        self._seed = dice.random()

    def _batches(self, number: int) -> Any:
        """Of up to three lengths, with labels that are left out; few tokens for experts, so that one may get none."""
        generator = torch.Generator().manual_seed(self._dice.randrange(1 << 30))
        lengths = [self._dice.randint(2, 8) for _ in range(3)]
        rows = 1 if self.model in ("mixtral", "experts") else 2
        for index in range(number):
            ids = torch.randint(2, VOCAB, (rows, self._dice.choice(lengths)), generator=generator)
            labels = ids.clone()
            labels[:, : index % 2] = -100
            yield {"input_ids": ids, "labels": labels}

    def build(self) -> nn.Module:
        """The model, with what is not trained of it frozen."""
        model, dice = build(self.model, dtype=self.dtype), random.Random(self._seed)
        if self.trained == "adapters":
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(3)
            given = {"r": 4, "target_modules": ADAPTED[self.model], "init_lora_weights": False}
            get_peft_model(model, LoraConfig(**given, lora_dropout=0.2 * self.drops), autocast_adapter_dtype=False)  # type: ignore[arg-type]
        if self.trained == "some":
            params = list(model.parameters())
            for param in dice.sample(params, dice.randint(1, len(params) // 2)):
                param.requires_grad_(False)
        return model

    def plan(self, model: nn.Module) -> Any:
        """One of the planner's at a budget that moves something, or one that has it in no way."""
        dice, norm = random.Random(self._seed), NORMS[self.clip]
        if not self.is_planned:
            checkpointing(model, self.recompute)
            how: dict[str, Any] = {
                "site": dice.choice(["host", "streamed", "mixed", "device"]),
                "weights": dice.choice(["travelling", "some", "resident"]),
                "bucket": dice.choice(["one", "several", "half"]),
                "prefetch": dice.choice([0, 1, 2, 5]),
            }
            how["park"] = "device" if how["site"] == "device" else dice.choice(["host", "device"])
            early, passing = self.clip in ("in-backward", "passing"), self.clip == "passing"
            return plan_of(model, max_norm=norm, groups=self.groups, in_backward=early, passing=passing, **how)
        options: dict[str, Any] = {
            "max_grad_norm": norm or None, "accumulation": self.accumulation, "order": "layers", "eval_rows": 0,
            "batch": max(self.batches, key=lambda batch: batch["labels"].numel()), "debug": True,
            "recompute": {
                "policy": dice.choice(["none", "selective", "full", "auto"]),
                "activation_offloading": dice.random() < 0.5,
            },
        }  # fmt: skip
        if options["recompute"]["policy"] in ("none", "auto"):
            del options["recompute"]["activation_offloading"]
        with pytest.raises(MemoryRefusal) as refused:
            plan_for(model, gpu_memory="1KiB", **options)
        plan = plan_for(model, gpu_memory=int(refused.value.needed * dice.choice([1, 1.2, 2])), **options)
        assert plan.facts.run.draws is self.drops
        recompute(model, plan)
        return plan


@pytest.mark.parametrize("number", [*range(QUICK), *map(rarely, range(QUICK, CASES))])
def test_random_case(number: int) -> None:
    case = Case(number)
    loop: dict[str, Any] = {"accumulation": case.accumulation, "max_norm": NORMS[case.clip], "groups": case.groups}
    wanted_of, found_of = case.build(), case.build()
    if not case.is_planned:
        checkpointing(wanted_of, case.recompute)
    wanted = plain(wanted_of, case.batches, **loop)
    ours = partial(stowed, layers=True, draws=case.drops, transfer=TRANSFERS[case.transfer]())
    assert differences(wanted, ours(found_of, case.plan(found_of), case.batches, **loop)) == []

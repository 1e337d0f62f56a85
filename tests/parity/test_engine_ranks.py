"""The engine on two real ranks: a step is skipped by all or by none, and weights stay the same everywhere."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from strategies.runtime import AdamW, stow
from tests.helpers.models import build, tokens
from trainer.memory import plan_for
from trainer.ranks import Ranks
from trainer.worlds import run_world

pytestmark = pytest.mark.ranks


def one_bad_rank(ranks: Ranks, max_norm: float) -> dict[str, Any]:
    """Three steps; in the second, one rank alone has a gradient that is not finite.

    Nobody says that there are two ranks, and they begin with different weights.
    """
    model: Any = build("llama")
    if ranks.rank == 1:
        torch.nn.init.normal_(model.lm_head.weight)
    plan = plan_for(model, max_grad_norm=max_norm, site="host", weights="streamed", prefetch=1)
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    with pytest.raises(ValueError, match="averages gradients over the ranks itself: do not wrap it"):
        torch.nn.parallel.DistributedDataParallel(model)
    start = model.state_dict()["lm_head.weight"].clone()
    weights = []
    for step, batch in enumerate(tokens("llama", 3)):
        loss = model(**batch).loss
        (loss * float("inf") if step == 1 and ranks.rank == 1 else loss).backward()
        if max_norm:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    flat = torch.cat([value.reshape(-1) for value in weights[-1].values()])
    both = [torch.empty_like(flat) for _ in range(ranks.world_size)]
    dist.all_gather(both, flat)
    return {
        "started as the first": bool(torch.equal(start, build("llama").state_dict()["lm_head.weight"])),
        "skipped": optimizer.skipped,
        "alike": bool(torch.equal(*both)),
        "kept": all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]),
        "trained": any(not torch.equal(weights[1][name], weights[2][name]) for name in weights[0]),
        "finite": bool(flat.isfinite().all()),
    }


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_one_rank_that_is_not_finite_stops_the_step_of_all(max_norm: float) -> None:
    found = run_world(2, one_bad_rank, max_norm)
    assert found.pop("skipped") == 1
    assert all(found.values()), found

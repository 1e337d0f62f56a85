"""Memory of the engine comes from the arenas: by what it maps and pins while it trains."""

import mmap
from typing import Any

import pytest
import torch

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Item
from deepstow.strategies.engine import stow
from deepstow.strategies.engine.forward.checkpointing import recompute, room_of
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.memory import arena as module
from deepstow.trainer.planning.plan_for import plan_for
from tests.memory.test_engine import MODELS, model_of
from tests.unit.test_arena import Driver


@pytest.mark.parametrize("offload", [True, False])
def test_training_maps_and_pins_nothing_after_the_start(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, mapped, former = Driver(), list[int](), mmap.mmap

    def mapping(number: int, size: int, **options: Any) -> Any:
        mapped.append(size)
        return former(number, size, **options)

    monkeypatch.setattr(module.mmap, "mmap", mapping)
    monkeypatch.setitem(accelerator.TABLE, "cpu", accelerator.Row(driver))
    model, ids = model_of(MODELS["llama"]), torch.arange(16).view(2, 8)
    options = {"policy": "selective", "activation_offloading": True}
    plan: Any = plan_for(model, batch=(2, 8), max_grad_norm=1.0, site="host", recompute=options)
    if not offload:
        plan = type(plan)(
            plan.facts, {slot: at for slot, at in plan.answers.items() if slot[0] not in ("Stow", "Place")}
        )
    recompute(model, plan)
    optimizer: Any = stow(model, plan, device="cpu") if offload else torch.optim.AdamW(model.parameters())
    room: Any = room_of(model)
    planned = plan.addresses.num_bytes(Tier.HOST) if offload else plan.hosted_bytes()
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert mapped == list(driver.ranges.values()) == [planned]
    assert min(room.traffic) > 0 and room.num_refused == 0
    start = room._memory.data_ptr() - next(iter(driver.ranges))
    assert start == (plan.addresses.of("", Item.SAVED).offset if offload else 0)
    if offload:
        optimizer.close()
        assert driver.ranges == {} and room._memory is None
        sent = room.traffic
        model(input_ids=ids, labels=ids).loss.backward()
        assert room.traffic == sent


def test_a_graph_outlives_the_arena_of_its_saved_tensors() -> None:
    """Backward over a graph that was made before ``close``."""
    torch.manual_seed(0)
    grads, options = [], {"policy": "full", "activation_offloading": True}
    plan = plan_for(model_of(MODELS["llama"]), batch=(2, 8), max_grad_norm=None, recompute=options)
    for closes in (False, True):
        model, ids = model_of(MODELS["llama"]), torch.arange(16).view(2, 8)
        recompute(model, plan)
        optimizer = stow(model, plan, device="cpu")
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=x, labels=ids).loss
        if closes:
            optimizer.close()
        grads.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*grads)

"""Memory of the engine comes from the arenas: by its syntax trees, and by what it maps and pins while it trains."""

import ast
import mmap
from pathlib import Path
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

ENGINE = Path(__file__).resolve().parents[2] / "strategies/engine"
FUNCTIONS = {"empty_strided", "empty_permuted", "tensor", "arange", "linspace", "eye", "frombuffer", "from_numpy"}
FUNCTIONS |= {name + like for name in ("empty", "zeros", "ones", "full", "rand", "randn") for like in ("", "_like")}
FUNCTIONS |= {"Tensor", "FloatTensor", "UntypedStorage"}
METHODS = {"pin_memory", "mmap", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"}

# Who else makes memory, with what, and why. Results of operators (``clone``, ``stack``) belong to torch's allocator.
ALLOWED: dict[str, dict[str, str]] = {
    "memory/accelerator.py": {
        "zeros": "one number, whose failure clears CUDA's last error",
        "empty": "a few bytes, before any other, with which the driver shows that segments expand",
    },
    "memory/common_host.py": {"frombuffer": "16 bytes that tell a rank's memory from any other file"},
    "memory/scratch_file.py": {
        "mmap": "views of frozen weights in the disk tier's file, whose pages are the system's: no memory of the plan",
        "frombuffer": "likewise",
    },
    "forward/activations.py": {"empty_strided": "a saved tensor that is back: counted as saved there"},
    "forward/chunked_loss.py": {
        "empty": "one number per token, the losses; and a tensor of none, which shows how many hold a storage",
        "empty_like": "the gradient of logits that others hold, as autograd makes one; counted as temporary",
        "tensor": "a few numbers for the comparison with Transformers' loss",
        "arange": "likewise",
    },
    "forward/distilled_loss.py": {
        "empty": "one number per token, the losses; and a teacher's answers, before the model is stowed",
        "empty_like": "the gradient of logits that others hold, as autograd makes one; counted as temporary",
    },
    "forward/token_slices.py": {"new_empty": "the shape of a slice on fake tensors, when a model is counted"},
    "updating/clipping.py": {"ones_like": "one number: no clipping"},
    "transfer/transfer.py": {
        "empty_like": "two numbers per step that the worker reads",
        "pin_memory": "of these two numbers; torch's pinned allocator uses the same block again",
    },
    "engine.py": {
        "full": "one NaN per dtype, which absent weights show",
        "zeros_like": "one gradient that a loop of one's own has zeroed between backward and step",
    },
    "buckets/bucket_state.py": {"empty": "one weight that is rounded from its master, as ``to`` makes one"},
    "updating/norms.py": {
        "pin_memory": "one number per gradient of a bucket; torch's pinned allocator uses the same block again",
        "zeros": "one number: the norm of no gradients",
    },
    "ranks/replicas.py": {
        "tensor": "one number per flag, where ranks agree on who was touched",
        "new_empty": "what ranks send of a gradient, machine by machine; in the plan of strategies.collectives",
    },
    "ranks/shares.py": {
        "empty": "one number per rank: the digest of its path",
        "tensor": "one number: the digest of a path",
        "zeros": "one number: the norm that another rank knows",
    },
    "saving/state_dict.py": {"new_empty": "nothing, in place of what another rank reads"},
    "forward/routed_linear.py": {"empty": "the transposed copy of a weight, which is in the plan"},
    "saving/state_file.py": {"empty": "one weight at a time, while a checkpoint is loaded"},
    "tensors/loans.py": {"new_empty": "nothing, beside the count of writes to what was handed out"},
    "tensors/parameters.py": {
        "full": "one NaN per parameter that is given its value later",
        "UntypedStorage": "none is made: the type of one that is there",
    },
    "updating/updates.py": {"empty": "the CPU update's scratch of fixed size, pageable, allocated once"},
}


def allocations(tree: ast.AST) -> set[str]:
    """Names of functions that make memory, called or passed on, and pinning by keyword."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names |= {node.attr} & FUNCTIONS - {"Tensor"}
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            names.add(node.arg)
        elif isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute)
            names |= {getattr(node.func, "attr", "")} & METHODS if is_method else set()
            names |= {getattr(node.func, "id", "")} & FUNCTIONS
    return names


def test_only_the_arena_allocates() -> None:
    found = {
        str(path.relative_to(ENGINE)): sorted(allocations(ast.parse(path.read_text())))
        for path in sorted(ENGINE.rglob("*.py"))
        if path.relative_to(ENGINE) != Path("memory/arena.py")
    }
    assert {name: used for name, used in found.items() if used} == {name: sorted(why) for name, why in ALLOWED.items()}


def test_allocations_are_seen() -> None:
    for code in ("torch.empty(3)", "make = torch.zeros", "x.pin_memory()", "f(pin_memory=True)", "mmap.mmap(-1, 8)"):
        assert allocations(ast.parse(code)), code
    assert not allocations(ast.parse("x: torch.Tensor = y.view(3).copy_(z)"))


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
    grads = []
    for closes in (False, True):
        model, ids = model_of(MODELS["llama"]), torch.arange(16).view(2, 8)
        options = {"policy": "full", "activation_offloading": True}
        plan = plan_for(model, batch=(2, 8), max_grad_norm=None, recompute=options)
        recompute(model, plan)
        optimizer = stow(model, plan, device="cpu")
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=x, labels=ids).loss
        if closes:
            optimizer.close()
        grads.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*grads)

"""The public interface: ``stow`` hooks a model in place and returns an ordinary optimizer.

    optimizer = stow(model, plan)
    model(**batch).loss.backward()
    optimizer.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()

It differs from a plain optimizer in this:
    gradients   are taken off the parameters as they land; ``param.grad`` stands for them until ``step`` takes them.
                It can be read and written to, and clipped by ``torch.nn.utils`` or ``accelerator.clip_grad_norm_``.
                After ``step``, ``zero_grad`` has to be called (``gradient_state.py``)
    weights     can be read anywhere (``parameters.py``), written under ``present`` and by ``load_state_dict``. Other
                writes are kept or refused by name (``docs/engine.md``)
    clipping    to the plan's norm by ``step``, unless the loop has clipped or multiplied gradients
    skipping    a step whose gradients are not finite changes nothing; ``skipped`` counts them, and the third in a row
                is an error. A plan that updates in backward (only without clipping) skips from the first such bucket on
    fp16        ``torch.amp.GradScaler`` decides which steps are skipped; plan with ``update_in_backward=False``
    ranks       gradients are averaged here: over the default process group if there is one, or the one given
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepstow.strategies.core.applied import log_stowed
from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Addresses, Layout
from deepstow.strategies.core.validate import check
from deepstow.strategies.engine.engine import Engine, Runtime
from deepstow.strategies.engine.forward import chunked_loss
from deepstow.strategies.engine.forward.checkpointing import room_of
from deepstow.strategies.engine.layers_first import LayersFirst
from deepstow.strategies.engine.memory.accelerator import device_of
from deepstow.strategies.engine.model_checks import mismatches, not_in_kernels, refuse_over_ranks, unlike
from deepstow.strategies.engine.ranks.two_level import exchange_of
from deepstow.strategies.engine.saving import state_file
from deepstow.strategies.engine.saving.state_dict import Place, State, StateAccess, without_values
from deepstow.strategies.engine.tensors.parameters import STOWED, move_buffers
from deepstow.strategies.engine.tensors.quantised import Adopted
from deepstow.strategies.engine.transfer.transfer import Transfer, transfer_for
from deepstow.strategies.engine.updating.norms import TotalNorm, norm_of_all
from deepstow.strategies.engine.updating.optim import AdamW, UpdateRule

if TYPE_CHECKING:
    from deepstow.strategies.core.plan import Plan

Saved = list[tuple[nn.Parameter, Mapping[str, Any]]]
Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def stow(
    model: nn.Module,
    plan: Plan,
    params: Params | None = None,
    rule: UpdateRule | None = None,
    *,
    device: torch.device | str | None = None,
    process_group: dist.ProcessGroup | None = None,
    total_norm: TotalNorm = norm_of_all,
    transfer: Transfer | None = None,
    beside: bool | None = None,
) -> StowOptimizer:
    """Move ``model`` into the memory that ``plan`` gives it and return the optimizer that drives it.

    Args:
        model: on the CPU. The dtype of its parameters is the dtype of compute; bf16 gets fp32 masters.
        plan: with a layout and addresses, as ``plan_for`` or a config with ``offload`` makes it.
        params: parameters or groups, as for any torch optimizer; the same as the plan was made with.
        rule: the update rule and its hyperparameters; by default AdamW with torch's defaults.
        device: the one to train on; by default the accelerator, if there is one.
        process_group: ranks that train together, each with the whole model; by default all. They start with the
            weights of the first.
        total_norm: the norm of all gradients from that of each; where ``model`` is a part, also of the other parts'.
        transfer: makes the copies; for tests.
        beside: run host updates in a worker thread; None: unless the device is the CPU.

    Raises:
        ValueError: the plan does not fit the model or the ranks, or the model is stowed already.
        OutOfMemoryError: the machine has less memory than the plan needs.
    """
    where, rule = device_of(device), rule or AdamW()
    if stowed_by(model) is not None:
        raise ValueError("this model is stowed already; close() its optimizer first")
    run = plan.facts.run
    alone = run.adding_copies < run.copies  # and exchange weights now and then (``plugins/local_steps.py``)
    if process_group is None and dist.is_available() and dist.is_initialized() and not alone:
        process_group = dist.group.WORLD
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    if ranks != run.adding_copies:
        raise ValueError(
            f"the plan is for {run.adding_copies} ranks, and {ranks} train together: give plan_for their "
            f"number as world_size, or stow a process_group of those that do"
        )
    layout = plan.layout
    place = plan.place
    hosted_bytes = plan.hosted_bytes()
    if layout is None or place is None:
        raise ValueError("the plan has no layout: switch strategies.offload on")
    check(layout, place.addresses, hosted_bytes=hosted_bytes)
    if ranks > 1:
        refuse_over_ranks(layout)
    runtime = Runtime(
        device=where,
        transfer=transfer or transfer_for(where),
        beside=where.type != "cpu" if beside is None else beside,
        group=process_group if ranks > 1 else None,
        two_level=exchange_of(plan, process_group),
        total_norm=total_norm,
        debug=place.debug,
    )
    optimizer = StowOptimizer(model, layout, place.addresses, params, rule, runtime, hosts=hosted_bytes > 0)
    if run.layerwise > 1:
        optimizer.set_layerwise(keeps_heads=run.loss_reads_blocks, draws=run.draws)
    model.__dict__[STOWED] = optimizer
    chunked_loss.set_by_plan(model, plan)
    model.__dict__[DDP_ASKS] = _NotForDdp()
    return optimizer


def stowed_by(model: nn.Module) -> StowOptimizer | None:
    """The optimizer that drives ``model``, if one does."""
    optimizer: StowOptimizer | None = model.__dict__.get(STOWED)
    return optimizer


# DistributedDataParallel iterates over this attribute of a module before it wraps the module.
DDP_ASKS = "_ddp_params_and_buffers_to_ignore"
NOT_FOR_DDP = (
    "this model is stowed, and its optimizer averages gradients over the ranks itself: do not wrap it in "
    "DistributedDataParallel"
)


class _NotForDdp:
    def __iter__(self) -> Iterator[str]:
        raise ValueError(NOT_FOR_DDP)


class StowOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose parameters, gradients and state live where a plan says. See ``stow``."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        addresses: Addresses,
        params: Params | None,
        rule: UpdateRule,
        runtime: Runtime,
        *,
        hosts: bool,
    ) -> None:
        chosen: Any = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
        self._ready = self._closed = False
        super().__init__(chosen, rule.defaults())
        complaints = list(mismatches(model, layout, self.param_groups, rule))
        if complaints:
            raise ValueError("the plan was made for something else:\n  " + "\n  ".join(complaints[:8]))
        move_buffers(model, runtime.device)
        self._quantised = Adopted(model, runtime.device)
        self.engine = Engine(model, layout, addresses, rule, lambda: self.param_groups, runtime)
        self.scaled_loss = self.engine.ranks.scaled_loss  # for a backward of which the loss is divided by what it gives
        self._room = room_of(model) if hosts else None
        if self._room is not None:
            self._room.use(self.engine.arena, transfer_for(runtime.device))
        self._name_of = {id(param): name for name, param in model.named_parameters()}
        self.access = StateAccess(model, self.engine)
        self.layers: LayersFirst | None = None  # of a plan whose micro-batches take turns in each layer
        self._model = model
        self._first_look = model.register_forward_pre_hook(self._look_once)
        self._planned = self._members()
        self._step_supports_amp_scaling = rule.flagged  # says to a GradScaler that ``step`` skips, as torch's fused do
        self._ready = True
        log_stowed(layout)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Before a forward that does not call the model itself, as that of a pipeline's part."""
        self.access.keep_edits()
        self.engine.begin_forward()

    def set_layerwise(self, *, keeps_heads: bool, draws: bool) -> None:
        """``backward_all`` lets micro-batches take turns in each layer; ``layers_first.py`` has the arguments."""
        self.layers = LayersFirst(self._model, self.engine, self._room, keeps_heads=keeps_heads, draws=draws)

    def backward_all(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Compute the losses of a step's micro-batches, and their gradients, in the order that the plan says: one after
        the other through the model, or all of them through a layer before the next (``accumulation: layers``).

            count = len(batches)
            losses = optimizer.backward_all([lambda batch=batch: model(**batch).loss / count for batch in batches])

        Raises:
            RuntimeError: the model cannot be run layer by layer; the message names the reason. No gradient has landed.
        """
        layers = self.layers
        with self.scaled_loss() as ranks:

            def work(loss_of: Callable[[], Tensor]) -> Tensor:
                loss = loss_of()
                scaled = loss / ranks if ranks > 1 else loss
                if layers is None:
                    scaled.backward()
                else:
                    layers.backward(scaled)
                return loss.detach()

            works = [partial(work, loss_of) for loss_of in losses]
            return [compute() for compute in works] if layers is None else layers.run(works)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The norm of all gradients before clipping, on the device; ``step`` applies the clipping."""
        return self.engine.clipping_after_backward().clip(max_norm)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Submit the updates. They are computed during the next forward, each before its weights are used."""
        if closure is not None:
            raise ValueError("closures are not supported: weights are updated while the next forward runs")
        self._refuse_closed()
        self.access.refuse_loans("step()")
        self.access.keep_edits()
        self._refuse_strangers()
        self._refuse_edits()
        loss_scale = getattr(self, "grad_scale", None)  # by a GradScaler that has not unscaled the gradients
        if loss_scale is not None:
            self.engine.clipping_after_backward().unscale(1 / loss_scale)
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero; those that were not stepped with are discarded."""
        self._refuse_closed()
        self.engine.zero(to_none=set_to_none)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this optimizer is closed; stow the model again to go on training")

    def _look_once(self, module: nn.Module, inputs: Any) -> None:
        active = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        if active is not None and active.module is module:  # wrapped before it was stowed
            raise ValueError(NOT_FOR_DDP)
        if module is not self._model:
            raise RuntimeError("a stowed model cannot be replicated by DataParallel: start one process for each GPU")
        self._refuse_strangers()
        self._first_look.remove()

    def _refuse_strangers(self) -> None:
        """Raise RuntimeError if there are other parameters than at ``stow``, or others are trainable."""
        trained, bucket_of = self.engine.trained, self.engine.bucket_of
        for param in self._model.parameters():
            if param.requires_grad and id(param) not in trained:
                name = next(name for name, other in self._model.named_parameters() if other is param)
                raise RuntimeError(
                    f"{name} requires a gradient and is not in the optimizer: what changes a model (adapters, "
                    f"resizing, freezing) has to be done before it is planned and stowed; functional_call with other "
                    f"parameters cannot be done"
                )
            bucket_of[id(param)]  # raises if it has taken the place of another

    def _refuse_edits(self) -> None:
        """Raise RuntimeError if groups have other parameters than planned, or ask for another kind of update."""
        if self._members() != self._planned:
            raise RuntimeError("parameters were moved in param_groups: close(), change, plan and stow again")
        for complaint in not_in_kernels(self.param_groups, self.engine.rule):
            raise RuntimeError(complaint)

    def _members(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's during construction; RuntimeError later, since the plan has no memory for more parameters."""
        if self._ready:
            raise RuntimeError("parameters cannot be added to a stowed model: close(), change, plan and stow again")
        super().add_param_group(param_group)

    # --- reading and writing -----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Complete all updates that are under way. Afterwards only offloaded weights are absent."""
        self.access.drain()

    @contextmanager
    def present(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Make ``params`` plain parameters on the device, with their newest values, and keep what is written to them.

        The model and state dicts use what was written. ``param.data`` of offloaded parameters, taken inside, is a copy
        afterwards. Refused inside: ``step``, ``close``, and a backward that updates.
        """
        self.access.end_module_loans()
        lent = self.access.lend(params)
        try:
            yield
        finally:
            self.access.give_back(lent)

    def gathered(self, *, keep: bool, place: Place | None = None, base: bool = True) -> dict[str, Any]:
        """The model's state dict, where it ``makes_copies``: whole on ranks that ``keep`` it, without values on the
        others. A collective. ``place``: puts a weight where it stays. Without its ``base`` no encoded weight is
        made whole.
        """
        return self.access.state_dict(place if keep else without_values, base=base)

    @property
    def skipped(self) -> int:
        """Steps skipped because a gradient was not finite, as far as known without waiting."""
        return self.engine.skipped_steps.skipped

    @property
    def is_shared(self) -> bool:
        """Whether each rank has a span of the state. State dicts, ``present``, ``drain``, ``close`` are collectives."""
        return self.engine.ranks.shared

    @property
    def makes_copies(self) -> bool:
        """Whether a state dict copies weights: of some each rank holds a span, or they are encoded."""
        return self.engine.shares_weights or any(bucket.codes for bucket in self.engine.buckets)

    @property
    def device_bytes(self) -> int:
        """Size of the arena on the device."""
        return self.engine.arena.num_bytes(Tier.DEVICE)

    @property
    def host_bytes(self) -> int:
        """Size of the arena on the host."""
        return self.engine.arena.num_bytes(Tier.HOST)

    @property
    def transfers(self) -> list[Transfer]:
        """Who makes the copies, for a profile."""
        return [*filter(None, (self.engine.transfer, self._room.transfer if self._room else None))]

    def state_of(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Views of a trained parameter's state by torch's names, and ``master`` in mixed precision; drains first."""
        self.drain()
        return self.access.state_of(param)

    @property
    def state(self) -> Any:
        """As torch's: the state of each parameter that was updated, as views. Deleting a parameter resets its state."""
        return State(self.access)

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready and value:
            raise RuntimeError("the state of a stowed model is planned: use load_state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's: saved parameters are matched in order of the groups. State is copied into the arenas.

        Raises:
            ValueError: other groups, or state that the update cannot continue with. Nothing has changed then.
        """
        self.drain()
        state: Saved = []
        last = self.register_load_state_dict_pre_hook(lambda _, given: self._take_state(given, state))
        first = self.register_load_state_dict_post_hook(lambda _: self._put_state(state), prepend=True)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            last.remove()
            first.remove()

    def _take_state(self, given: Mapping[str, Any], state: Saved) -> dict[str, Any]:
        """Check the parameters' state and move it into ``state``; torch gets the rest, and checks the groups."""
        groups = [{"fused": self.defaults.get("fused"), **group} for group in given["param_groups"]]
        complaints = list(not_in_kernels(groups, self.engine.rule))
        ours = [param for group in self.param_groups for param in group["params"]]
        params = dict(zip([key for group in groups for key in group["params"]], ours, strict=False))
        state += [(param, given["state"][key]) for key, param in params.items() if given["state"].get(key)]
        for param, saved in state:
            complaints += unlike(self._name_of[id(param)], saved, self.access.state_of(param), self.engine.rule)
        if complaints:
            raise ValueError(complaints[0])
        return {**given, "state": {}, "param_groups": groups}

    def _put_state(self, state: Saved) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.access.forget_state(param)
        for param, saved in state:
            self.access.set_state(param, saved)

    # --- on disk -----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write state and hyperparameters atomically into ``folder``, which has no other files; drains first.

        No second copy is made in memory. Gradients that wait for a step are not saved, nor are weights: save those with
        ``model.save_pretrained`` or from ``model.state_dict()``. Ranks have the same state, so one of them saves.

        Raises:
            ValueError: a hyperparameter cannot be written as JSON.
            RuntimeError: ranks share the state.
            OSError: writing failed; an earlier save in ``folder`` is intact.
        """
        self._refuse_shared("save")
        self.drain()
        state_file.save(state_file.EngineState(self.access), Path(folder))

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Read what ``save`` wrote, under any layout; in mixed precision weights are rounded from their masters.

        The state in a checkpoint of any strategy is in the same format. Gradients that wait for a step are discarded.
        Load the weights of the same moment as well.

        Raises:
            ValueError: all reasons, if it is of another model or rule, or damaged. Nothing has changed then.
        """
        self._refuse_shared("load")
        self.drain()
        state_file.load(state_file.EngineState(self.access), Path(folder), self.param_groups)

    def _refuse_shared(self, what: str) -> None:
        if self.is_shared:
            raise RuntimeError(f"{what}: ranks share this state, and each has a part; use the run's checkpoints")

    def close(self) -> None:
        """Move the weights back to ordinary memory on the CPU and remove all hooks. Closing twice does nothing."""
        if self._closed:
            return
        self.access.refuse_loans("close()")
        self.engine.drain()
        if self._room is not None:
            self._room.use(None)
        self.engine.close()
        self.access.release()
        for on_disk in (self.engine.disk, self.engine.disk_weights):
            if on_disk is not None:  # last: weights may be rounded from masters that are there
                on_disk.close()
        move_buffers(self._model, torch.device("cpu"))
        self._quantised.release()
        self._first_look.remove()
        chunked_loss.set_native(self._model)
        for name in (STOWED, DDP_ASKS):
            del self._model.__dict__[name]
        self._closed = True

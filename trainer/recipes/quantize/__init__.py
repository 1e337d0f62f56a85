"""The trained model in 8 or 4 bits as well, with training that knows it (QAT)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from deepstow.strategies.core.install import needs
from deepstow.strategies.core.protocol import COMPILE_KEYS, Refusal
from deepstow.trainer.config.arguments import NonEmpty, Section, option
from deepstow.trainer.config.recipe import RECIPES, Exact, Recipe, Writer, whole_weights
from deepstow.trainer.values import KEEP_ONE, Found, Values

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.run.session import Session


class QuantizeSection(Section):
    """Export the trained model in 8 or 4 bits as well, after training (deepstow docs quantize). Needs
    bitsandbytes, or torchao for the formats by group.
    """

    formats: Annotated[list[Literal["int8", "nf4", "fp4", "int8_group", "int4_group"]], Field(min_length=1)] = option(
        "One export each, in export-FORMAT: 8 bits with a scale for each output, or 4 with one for each 64 weights; "
        "by torchao, 8 or 4 with one for each group.",
        ["nf4"],
    )
    group_size: Annotated[int, Field(ge=2)] = option(
        "int8_group, int4_group: weights of an output that have a scale together.", 128, resume="qat"
    )
    bnb_4bit_use_double_quant: bool = option("Quantise the scales of 4-bit weights as well.", False)
    llm_int8_skip_modules: list[NonEmpty] | None = option(
        "Modules that are not quantised, in any format; not set means the head."
    )
    qat: Literal["int8_group", "int4_group"] | None = option(
        "Quantisation-aware training: forward rounds the weights as this one of formats does; not set: it does not.",
        resume="qat",
    )


@RECIPES.add
class Quantize(Recipe):
    """Exports in few bits, and layers that round their weights in forward."""

    name = "quantize"
    section = QuantizeSection
    resume = "free"
    language = True
    merges = True

    def conflicts(self, sections: Mapping[str, Values]) -> Found:
        q, d = sections["quantize"], sections["data"]
        if isinstance(q.formats, list) and len(set(q.formats)) != len(q.formats):
            yield "quantize.formats", "must be names, all different"
        if q.qat:
            yield from _trained_for(q, sections)
        if d.eval_fraction == 0 and d.eval_path is None and d.eval_split is None:
            what = "quantize says what it costs on held-out rows; write a fraction, data.eval_split or data.eval_path"
            yield "data.eval_fraction", what

    def refusals(self, config: RunConfig, world_size: int, *, installed: bool) -> Iterator[Refusal]:
        section = self.options(config)
        if section.qat is not None:
            yield from whole_weights(config, world_size, "quantize.qat", section.qat)
        for package, extra in (("bitsandbytes", "qlora"), ("torchao", "torchao")) if installed else ():
            formats = [name for name in section.formats if name.endswith("_group") == (package == "torchao")]
            if formats and find_spec(package) is None:
                yield Refusal("quantize.formats", formats, needs(package, extra))

    def refuse(self, config: RunConfig) -> None:
        if any(name.endswith("_group") for name in self.options(config).formats):
            from deepstow.trainer.recipes.quantize import few_bits

            few_bits.refuse(config, self.options(config))

    def not_timed(self, config: RunConfig) -> str:
        return "blocks are timed without the rounding of quantize.qat" if self.options(config).qat is not None else ""

    def counted_by(self, config: RunConfig) -> Any:
        return self.options(config).qat and self.options(config).group_size

    def counted(self, model: Any, config: RunConfig) -> Any:
        from deepstow.trainer.recipes.quantize import qat

        return qat.counted(model, config, self.options(config))

    def apply(self, model: Any, config: RunConfig) -> None:
        if self.options(config).qat is not None:
            from deepstow.trainer.recipes.quantize import few_bits

            few_bits.round_in_forward(model, config, self.options(config))

    def after_training(self, model: Any, config: RunConfig) -> None:
        if self.options(config).qat is not None:
            from torchao.quantization.qat.linear import disable_linear_fake_quant

            model.apply(disable_linear_fake_quant)

    def sentence(self, session: Session) -> str:
        if (qat := self.options(session.config).qat) is None:
            return ""
        return f"Forward rounded weights as {qat} does (QAT), also in evaluations; these are the exact ones."

    def changes(self, key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
        return any(section.get("qat") for section in (saved, now))

    def exports(self, config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
        section = self.options(config)
        return dict.fromkeys(section.formats, section.model_dump(exclude={"formats"}))

    def writer(self, config: RunConfig, exact: Exact) -> Writer:
        from deepstow.trainer.recipes.quantize import few_bits

        return few_bits.Report(config, self.options(config), exact)


def _trained_for(q: Values, sections: Mapping[str, Values]) -> Found:
    """What has not been compared with weights that are rounded in forward."""
    m, t = sections["model"], sections["training"]
    if isinstance(q.formats, list) and q.qat not in q.formats:
        yield "quantize.qat", "must be one of quantize.formats, which are exported; write it there, too"
    if q.llm_int8_skip_modules:
        yield "quantize.llm_int8_skip_modules", f"cannot go with quantize.qat, which leaves the head out; {KEEP_ONE}"
    values: dict[str, Any] = {f"training.{key}": t[key] for key in (*COMPILE_KEYS, "use_liger_kernel", "fp16")}
    values |= {name: sections[name] for name in ("prune", "distill")}
    values |= {f"model.{key}": m[key] for key in ("lora", "quantization_config")}
    for key, value in values.items():
        if value:
            yield key, f"has not been compared with quantize.qat; {KEEP_ONE}"

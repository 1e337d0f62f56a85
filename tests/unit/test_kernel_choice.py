"""``attn_implementation: auto``: the kernel that a run takes, what is passed over, and that nothing later sees auto."""

from typing import Any

import pytest

from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import attention
from deepstow.trainer.planning.from_config import check_options
from deepstow.trainer.planning.kernel_choice import settled
from tests.helpers.tiny import LLAMA, run_config

AUTO = {"attn_implementation": "auto"}
FLASH = "flash_attention_2"
LLAMA4 = {
    "model_type": "llama4_text", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 64, "num_local_experts": 2, "intermediate_size_mlp": 64,
}  # fmt: skip


def taken(monkeypatch: pytest.MonkeyPatch, config: Any, *, world_size: int = 1, here: bool = True) -> tuple[Any, str]:
    """The kernel, on a machine with FlashAttention's package and no GPU, and what is said."""
    monkeypatch.setattr(attention, "installed_flash", lambda: iter([FLASH]))
    said: list[str] = []
    config = settled(config, world_size, here=here, say=said.append)
    return config.model.attn_implementation, *said


@pytest.mark.parametrize(
    ("hf_config", "given", "world_size", "expected"),
    [
        (LLAMA, {"data": {"packing": True}}, 1, "sdpa_varlen"),
        (LLAMA, {}, 1, None),  # a row is one document
        (LLAMA4, {"data": {"packing": True}}, 1, None),  # the model's masks say more
        pytest.param(LLAMA, {"data": {"packing": True}, "torch_compile": True}, 1, None, marks=pytest.mark.slow),
        (LLAMA, {"model": AUTO | {"attention_mask": {"window": 4}}}, 1, "sdpa_varlen"),
        (LLAMA, {"model": AUTO | {"attention_mask": {"window": 4, "strided": {"block": 4, "every": 2}}}}, 1, None),
        (LLAMA, {"data": {"packing": True}, "strategies": {"sequence": {"degree": 2}}}, 2, None),
        # another thing is wrong with it: that is said later
        (LLAMA, {"data": {"packing": True}, "strategies": {"tensor": {"degree": 2}}}, 3, "sdpa_varlen"),
    ],
)
def test_the_first_that_nothing_refuses(
    hf_config: Any, given: dict[str, Any], world_size: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = taken(monkeypatch, run_config(hf_config, **{"model": AUTO, **given}), world_size=world_size)
    assert found == expected
    assert said.startswith(f"model.attn_implementation = auto: {expected or 'the model'}")


@pytest.mark.slow
def test_flash_attention_comes_first_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, in 16 bits; it is not assumed of another machine."""
    refusals = attention.refusals
    monkeypatch.setattr(attention, "refusals", lambda config, on_cpu: refusals(config, on_cpu=False))
    for number in (2, 3):
        monkeypatch.setattr(f"transformers.utils.import_utils.is_flash_attn_{number}_available", lambda: True)
    assert list(attention.installed_flash()) == ["flash_attention_3", FLASH]
    config = run_config(model=AUTO, data={"packing": True}, bf16=True)
    assert taken(monkeypatch, config)[0] == FLASH
    assert taken(monkeypatch, run_config(model=AUTO, bf16=True))[0] == FLASH
    assert taken(monkeypatch, run_config(model=AUTO, data={"packing": True}))[0] == "sdpa_varlen"  # fp32
    assert taken(monkeypatch, config, here=False)[0] == "sdpa_varlen"


def test_what_was_written_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(model={"attn_implementation": "eager"}, data={"packing": True})
    assert taken(monkeypatch, config) == ("eager",)


def test_nothing_later_takes_auto() -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(run_config(model=AUTO), 1)
    (line,) = caught.value.lines
    assert line == 'model.attn_implementation = "auto": is for a run of a config file; write the kernel here'

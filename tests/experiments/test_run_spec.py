"""Optima of arms that were not tuned."""

import pytest

from lightning_sv.experiments.run_spec import tuned_keys
from lightning_sv.experiments.spec import Tuned
from lightning_sv.scale.strategy import ScaleStrategy

LR = "model.optim.lr"
ARMS = {
    "llama": 1.0,
    "hg+dnp+or+iwd": 2.0,
    "hg+dnp+or+iwd[lm_head=dp]": 3.0,
    "hg+dp+or": 4.0,
    "hg+dp+or[lm_head=dp]": 5.0,
}
TUNED = Tuned("tiny-1", "s", "adamw", "cos", 64, {name: {LR: lr} for name, lr in ARMS.items()})


@pytest.mark.parametrize(("scale", "exceptions", "of"), [
    ("unified", "", "hg+dnp+or+iwd"),
    ("unified", "[lm_head=dp]", "hg+dnp+or+iwd[lm_head=dp]"),
    ("unified", "[lm_head=dp,share_heads=k_proj+q_proj]", "hg+dnp+or+iwd[lm_head=dp]"),
    ("unified", "[share_heads=k_proj+q_proj]", "hg+dnp+or+iwd"),
    ("unified", "[lm_head=ap]", "hg+dnp+or+iwd"),
    ("hg+dnp", "[lm_head=dp]", "hg+dnp+or+iwd"),
    ("hg+ap", "", "hg+dp+or"),
    ("hg+iwd", "", "llama"),
])  # fmt: skip
def test_tuned_keys_untuned_arm_has_values_of_a_related_arm(scale: str, exceptions: str, of: str) -> None:
    """That of the same strategy with most of its exceptions and no other; else by placement."""
    strategy = ScaleStrategy.parse(scale)
    label = f"{strategy}{exceptions}"
    values, note = tuned_keys(TUNED, strategy, label, 64)
    assert values == {LR: ARMS[of]}
    assert note == ("" if of == label else f"{label} is not tuned itself: it has the values of {of}.")


def test_tuned_keys_arm_without_related_arm_refused() -> None:
    with pytest.raises(ValueError, match="tiny-1.yaml"):
        tuned_keys(TUNED, ScaleStrategy.parse("nop"), "nop", 64)

"""Whose optimum an arm takes that was not tuned itself."""

import pytest

from lightning_sv.experiments.sources.from_yaml import tuned_keys
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
def test_the_nearest_kin_is_taken(scale: str, exceptions: str, of: str) -> None:
    """Of the same strategy the one with most of the arm's exceptions, and none of its own; else by placement."""
    strategy = ScaleStrategy.parse(scale)
    label = f"{strategy}{exceptions}"
    values, note = tuned_keys(TUNED, strategy, label, 64)
    assert values == {LR: ARMS[of]}
    assert note == ("" if of == label else f"{label} is not tuned itself: it has the values of {of}.")


def test_an_arm_without_kin_is_named() -> None:
    with pytest.raises(ValueError, match="tiny-1.yaml"):
        tuned_keys(TUNED, ScaleStrategy.parse("nop"), "nop", 64)

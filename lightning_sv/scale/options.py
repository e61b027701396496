"""Options of scale vectors that the paper leaves open."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lightning_sv.errors import ConfigError, expect, expect_known, expect_types
from lightning_sv.scale.strategy import (
    FOLDED,
    PLACEMENTS,
    PRESET_PLACEMENTS,
    PRESETS,
    ScaleStrategy,
    preset_name,
)
from lightning_sv.scale.vector import ROLES

SIDES = ("scale_in", "scale_out", "scale")


@dataclass(frozen=True)
class ScaleOptions:
    """Options that the paper leaves open; the label lists those that differ from their defaults.

    Attributes:
        placement_at: placement of single branches, site -> token, for instance {lm_head: dp}, or
            {router: bp} for router logits without an output-side vector. Tokens are those of
            strategies, plus `np` and `anp`, the results of folding `dnp`. o_proj and down_proj
            (shared_down_proj, expert_down_proj) have scale vectors only if they are listed here,
            with bp, ap or dp
        role_at: role of single vectors, 'site.scale_in' or 'site.scale_out' -> 'input' | 'output',
            for instance {v_proj.scale_out: input} to decay the output side of v under `iwd`
        share_scale_out: False; earlier versions could share one output-side vector between branches
        freeze_input_beta: do not train beta of scale_in if the branch's output is normalized; the
            loss does not depend on it, but Adam changes it
        share_heads: branches whose heads share one output-side vector of head width, for instance
            [q_proj, k_proj]; with `dnp` for them, this is the Q/K-norm of Qwen 3, and Qwen 3's code
            can run the model
        initial_gamma_out: output-side gamma at initialization; the beta of `or`, exp(beta) of `er`
    """

    placement_at: dict[str, str] = field(default_factory=dict)
    role_at: dict[str, str] = field(default_factory=dict)
    share_scale_out: bool = False
    freeze_input_beta: bool = False
    share_heads: list[str] = field(default_factory=list)
    initial_gamma_out: float = 1.0

    def __post_init__(self) -> None:
        expect_types("scale_options", self)
        if self.share_scale_out:
            hint = "share_heads shares a vector between the heads of a branch."
            raise ConfigError(f"scale_options.share_scale_out is True; expected False. {hint}")
        gamma = self.initial_gamma_out
        expect(
            0 < gamma <= 1e12,
            "scale_options.initial_gamma_out",
            gamma,
            "a number above 0, up to 1e12.",
        )
        for site, token in self.placement_at.items():
            is_own = ":" in str(token)  # 'package.module:Name'; imported when the model is built
            if not is_own:
                expect_known(f"scale_options.placement_at.{site}", token, PLACEMENTS | FOLDED)
        for vector, role in self.role_at.items():
            _check_role(vector, role)

    def label(self) -> str:
        """Return '' or '[key=value,...]' with the options that differ from their defaults.

        >>> ScaleOptions(placement_at={"lm_head": "dp"}, freeze_input_beta=True).label()
        '[lm_head=dp,freeze_input_beta]'
        """
        words = ",".join(self._label_words())
        return f"[{words}]" if words else ""

    def _label_words(self) -> Iterator[str]:
        for site, token in sorted(self.placement_at.items()):
            yield f"{site}={token}"
        for vector, role in sorted(self.role_at.items()):
            yield f"{vector}={role}"
        if self.freeze_input_beta:
            yield "freeze_input_beta"
        if self.share_heads:
            yield f"share_heads={'+'.join(sorted(set(self.share_heads)))}"
        if self.initial_gamma_out != 1:
            yield f"initial_gamma_out={self.initial_gamma_out:g}"


def _check_role(vector: str, role: str) -> None:
    _, _, side = vector.rpartition(".")
    if role not in ROLES or side not in SIDES:
        expected = "SITE.scale_in or SITE.scale_out with the role 'input' or 'output'."
        raise ConfigError(f"scale_options.role_at is {vector!r}: {role!r}; expected {expected}")


def expand_preset(
    scale: str | ScaleStrategy, options: ScaleOptions
) -> tuple[str | ScaleStrategy, ScaleOptions]:
    """Return words and options instead of a preset that places the vectors of single matrices.

    Anything else is returned as it is. The given options have precedence over those of the preset.

    >>> scale, options = expand_preset("unified-head-dp", ScaleOptions())
    >>> scale, options.placement_at
    ('hg+dnp+or+iwd', {'lm_head': 'dp'})
    """
    if not isinstance(scale, str) or preset_name(scale) not in PRESET_PLACEMENTS:
        return scale, options
    name = preset_name(scale)
    placements = {**PRESET_PLACEMENTS[name], **options.placement_at}
    return PRESETS[name], replace(options, placement_at=placements)

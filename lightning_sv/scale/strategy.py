"""Scale-vector strategies as short validated strings, with one word per axis of the paper.

`hg+dnp+or+iwd` is the Python argument, the YAML value, the command-line override, the run's name
and the label in a figure. The four tables below are the axes. Extend them with a row, or with a
word `package.module:Name` that names your own `Placement`, `Decay` or `ScaleVector` subclass; the
module is imported when the string is parsed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from lightning_sv.errors import ConfigError, did_you_mean, expect_known
from lightning_sv.own_code import import_name
from lightning_sv.scale.validate import check_parameterization
from lightning_sv.scale.vector import (
    ROLES,
    DirectScale,
    ExponentialScale,
    OffsetScale,
    OriginalSpaceScale,
    Role,
    ScaleVector,
)


@dataclass(frozen=True)
class Placement:
    """Parts of `y = [scale_out] * [Norm](W ([scale_in] * xhat))` present in a branch."""

    scale_in: bool
    norm_out: bool
    scale_out: bool
    summary: str

    @property
    def has_vectors(self) -> bool:
        """True if there is a scale vector on any side."""
        return self.scale_in or self.scale_out


@dataclass(frozen=True)
class Decay:
    """Roles whose scale vectors take part in weight decay."""

    roles: frozenset[Role]
    summary: str

    def __post_init__(self) -> None:
        for role in self.roles:
            expect_known("role of a Decay", role, ROLES)


#: if True, each branch has its own input-side gamma (heterogeneity); otherwise the branches of a
#: norm share one
SHARINGS = {"shared": False, "hg": True}
PLACEMENTS: dict[str, Placement] = {
    #                in     norm   out
    "nop": Placement(False, False, False, "no scale vector: W xhat"),
    "bp": Placement(True, False, False, "before the matrix, the standard Llama: W (gb * xhat)"),
    "ap": Placement(False, False, True, "after the matrix: ga * (W xhat)"),
    "dp": Placement(True, False, True, "dual: ga * (W (gb * xhat))"),
    "dnp": Placement(True, True, True, "dual normalized: ga * Norm(W (gb * xhat))"),
}
#: results of folding `dnp`, in `ScaleOptions.placement_at` only: the norm after the matrix, with or
#: without a vector
FOLDED: dict[str, Placement] = {
    "anp": Placement(False, True, True, "after, normalized: ga * Norm(W xhat)"),
    "np": Placement(False, True, False, "normalized: Norm(W xhat)"),
}
PARAMETERIZATIONS: dict[str, type[ScaleVector]] = {
    "direct": DirectScale,
    "offset": OffsetScale,
    "or": OriginalSpaceScale,
    "er": ExponentialScale,
}
DECAYS: dict[str, Decay] = {
    "wd": Decay(frozenset({"input", "output"}), "every scale vector decays"),
    "iwd": Decay(frozenset({"input"}), "only Input-Norm scale vectors decay"),
    "owd": Decay(frozenset({"output"}), "only Output-Norm scale vectors decay"),
    "nowd": Decay(frozenset(), "no scale vector decays"),
}
PRESETS: dict[str, str] = {
    "llama": "shared+bp+direct+wd",
    "unified": "hg+dnp+or+iwd",
    "unified-head-dp": "hg+dnp+or+iwd",
}
#: presets that also place the vectors of single matrices, as `ScaleOptions.placement_at`.
#: A strategy has no field for that, so `options.expand_preset` replaces them by words and options.
PRESET_PLACEMENTS: dict[str, dict[str, str]] = {"unified-head-dp": {"lm_head": "dp"}}

#: axis (field of `ScaleStrategy`) -> its table; the order is the canonical order of the words.
AXES: dict[str, Mapping[str, Any]] = {
    "sharing": SHARINGS,
    "placement": PLACEMENTS,
    "parameterization": PARAMETERIZATIONS,
    "decay": DECAYS,
}
_WORD = "the strategy's word"


@dataclass(frozen=True)
class ScaleStrategy:
    """A point on the four axes; it builds no modules.

    Attributes:
        sharing: 'shared' or 'hg' (paper, Section 3.1)
        placement: 'nop', 'bp', 'ap', 'dp' or 'dnp' (Section 3.2)
        parameterization: 'direct', 'or', 'er' (Section 3.3), or 'offset' (Gemma's 1 + w)
        decay: 'wd', 'iwd', 'owd' or 'nowd' (Section 2.2)

    >>> str(ScaleStrategy.parse("iwd+or+hg+dnp"))
    'hg+dnp+or+iwd'
    >>> str(ScaleStrategy.parse("bp+direct"))
    'llama'
    """

    sharing: str = "shared"
    placement: str = "bp"
    parameterization: str = "direct"
    decay: str = "wd"

    def __post_init__(self) -> None:
        for axis in AXES:
            _check_word(axis, getattr(self, axis))
        if self.placement in FOLDED:
            expected = f"a name other than {' '.join(FOLDED)}. Rename the row."
            raise ConfigError(f"PLACEMENTS has {self.placement!r}; expected {expected}")
        if self.vector_class.__module__ != ScaleVector.__module__:
            check_parameterization(self.vector_class)

    @classmethod
    def parse(cls, text: "str | ScaleStrategy") -> "ScaleStrategy":
        """Parse words joined by '+' in any order, at most one per axis, or a preset.

        Raises:
            ConfigError: an unknown word (the message lists the known ones), two words of one axis,
                or a preset that needs `expand_preset`
        """
        if isinstance(text, ScaleStrategy):
            return text
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(
                f"the strategy is {text!r}; expected words joined by '+', {_known()}."
            )
        name = preset_name(text)
        if name in PRESET_PLACEMENTS:
            raise ConfigError(
                f"the strategy is {text!r}; expected {PRESETS[name]!r} here, with "
                f"placement_at={PRESET_PLACEMENTS[name]} in the options, because a strategy has no "
                "single matrices."
            )
        return cls(**_words_by_axis(text))

    def __str__(self) -> str:
        words = []
        for field in fields(self):
            word = getattr(self, field.name)
            if word != field.default:
                words.append(word)
        return "+".join(words) or "llama"

    @property
    def per_branch(self) -> bool:
        """True if each branch owns its input-side scale vector."""
        return SHARINGS[self.sharing]

    @property
    def placement_row(self) -> Placement:
        """Row of `PLACEMENTS` for the placement."""
        return _row("placement", self.placement)

    @property
    def vector_class(self) -> type[ScaleVector]:
        """Class of the parameterization."""
        return _row("parameterization", self.parameterization)

    @property
    def decayed_roles(self) -> frozenset[Role]:
        """Roles whose scale vectors decay."""
        return _row("decay", self.decay).roles

    def canonical(self, roles: frozenset[Role], *, shared_groups: bool = True) -> "ScaleStrategy":
        """Return the simplest strategy that builds and trains the same model.

        Args:
            roles: the roles that scale vectors have in the model as built
            shared_groups: if True, a norm with a scale_in has several branches, so `hg` differs
                from `shared`
        """
        default = ScaleStrategy()
        return ScaleStrategy(
            sharing=self.sharing if shared_groups else default.sharing,
            placement=self.placement,
            parameterization=self.parameterization if roles else default.parameterization,
            decay=decay_of(self.decayed_roles & roles, roles),
        )


def decay_of(decayed: frozenset[Role], roles: frozenset[Role]) -> str:
    """Return the word under which exactly `decayed` decay, out of the roles that a model has.

    'wd' and 'nowd' come first: they are the clearest names for "everything" and "nothing".
    """
    words = ("wd", "nowd", *DECAYS)
    return next(word for word in words if DECAYS[word].roles & roles == decayed)


def branch_placement(word: str) -> Placement:
    """Return the row of a single branch's placement, which may be one of `FOLDED`."""
    if word in FOLDED:
        return FOLDED[word]
    return ScaleStrategy(placement=word).placement_row


def own_words(text: str) -> frozenset[str]:
    """Return the words of a strategy that differ from llama's, without importing any module.

    >>> sorted(own_words("bp+hg+my_module:MyScale"))
    ['hg', 'my_module:MyScale']
    """
    return frozenset(_words(text)) - set(PRESETS["llama"].split("+"))


def preset_name(text: str) -> str:
    """Return a strategy as the presets are spelled."""
    return text.strip().lower()


def _words(text: str) -> list[str]:
    """Return the words of a strategy or of a preset, without checking them."""
    preset = PRESETS.get(preset_name(text), text)
    words = []
    for part in preset.split("+"):
        word = part.strip()
        is_own = ":" in word  # names of Python code are case-sensitive
        words.append(word if is_own else word.lower())
    return words


def _words_by_axis(text: str) -> dict[str, str]:
    """Return axis -> its word in a strategy, at most one."""
    chosen: dict[str, str] = {}
    for word in _words(text):
        axis = _axis_of(word, text)
        if axis in chosen:
            both = f"{chosen[axis]!r} and {word!r}"
            raise ConfigError(f"the strategy {text!r} sets {axis} twice, to {both}; keep one.")
        chosen[axis] = word
    return chosen


def _row(axis: str, word: str) -> Any:
    """Return the row of a word in the table of its axis, or your own `package.module:Name`."""
    if ":" in word:
        return import_name(word, _WORD)
    return AXES[axis][word]


def _check_word(axis: str, word: str) -> None:
    """Raise ConfigError if the word is unknown, or if your own row belongs to a different axis."""
    if ":" not in word:
        expect_known(axis, word, AXES[axis])
        return
    if _axis_of_row(import_name(word, _WORD)) != axis:
        raise ConfigError(f"word {word!r} of the strategy is not a {axis}; {_known()}.")


def _axis_of(word: str, text: str) -> str:
    """Return the axis of a word of the strategy `text`."""
    if ":" in word:
        return _axis_of_row(import_name(word, _WORD))
    for axis, table in AXES.items():
        if word in table:
            return axis

    if word in PRESETS:
        raise ConfigError(
            f"preset {word!r} in {text!r} sets all four axes; remove the other words."
        )
    hint = did_you_mean(word, [*chain.from_iterable(AXES.values()), *PRESETS])
    raise ConfigError(f"word {word!r} of the strategy {text!r} is unknown; {_known()}.{hint}")


def _axis_of_row(row: Any) -> str:
    if isinstance(row, Placement):
        return "placement"
    if isinstance(row, Decay):
        return "decay"
    if isinstance(row, type) and issubclass(row, ScaleVector):
        return "parameterization"
    expected = "'package.module:Name' of a Placement, a Decay or a subclass of ScaleVector."
    raise ConfigError(f"{row!r} is not supported in a scale strategy; expected {expected}")


def _known() -> str:
    axes = "; ".join(f"{axis}: {' '.join(table)}" for axis, table in AXES.items())
    return f"known: {axes}; presets: {' '.join(PRESETS)}"

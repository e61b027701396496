"""The strategy string: round trips, order, errors, a user's own rows."""

import itertools
import random
import sys
import types
import warnings
from unittest import mock

import pytest

from lightning_sv import Backbone, BackboneConfig, ScaleOptions, ScaleStrategy
from lightning_sv.errors import ConfigError
from lightning_sv.scale import Decay, DirectScale, Placement
from lightning_sv.scale.strategy import AXES, PARAMETERIZATIONS, PLACEMENTS


def test_parse_words_in_any_order_round_trip() -> None:
    for tokens in map(list, itertools.product(*AXES.values())):
        text = "+".join(tokens)
        strategy = ScaleStrategy.parse(text)
        assert ScaleStrategy.parse(str(strategy)) == strategy
        random.Random(text).shuffle(tokens)
        assert ScaleStrategy.parse(" + ".join(tokens).upper()) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hg+dpn", f"'dpn'.*placement: {' '.join(PLACEMENTS)}"),
        ("hg+or+er", "parameterization twice.*'or' and 'er'"),
        ("", "the strategy is ''"),
        ("hg++or", "word '' of the strategy"),
        ("no.such.module:Thing", "cannot be imported"),
        ("math:pi", "scale strategy"),
    ],
)
def test_parse_wrong_strategy_names_word_and_known_words(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScaleStrategy.parse(text)


@pytest.mark.filterwarnings("ignore:scale strategy")
def test_parse_custom_rows_are_imported_from_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_ideas")

    class Halved(DirectScale):
        def forward(self):
            return 0.5 * super().forward()

        def set_gamma(self, gamma):
            super().set_gamma(2 * gamma)

    norm_only = Placement(False, True, False, "normalize the output, no vector")
    none = Decay(frozenset(), "as nowd")
    vars(module).update(Halved=Halved, NORM_ONLY=norm_only, NONE=none)
    monkeypatch.setitem(sys.modules, "my_ideas", module)
    text = "hg+dp+my_ideas:Halved+my_ideas:NONE"
    strategy = ScaleStrategy.parse(text)
    assert str(strategy) == text and strategy.decayed_roles == frozenset()
    config = BackboneConfig(d_model=16, n_layer=1, n_head=1, vocab_size=16)
    assert isinstance(Backbone(config, text).head.lm_head.scale_out, Halved)
    assert Backbone(config, "my_ideas:NORM_ONLY").head.lm_head.norm_width == 16
    options = ScaleOptions(placement_at={"lm_head": "my_ideas:NORM_ONLY"})
    assert Backbone(config, "llama", options).head.lm_head.norm_width == 16


def test_rows_of_your_own_are_checked(config: BackboneConfig) -> None:
    class Doubled(DirectScale):
        def forward(self):
            return 2 * super().forward()

    with (
        mock.patch.dict(PARAMETERIZATIONS, doubled=Doubled),
        pytest.raises(ConfigError, match="returns 2 after"),
    ):
        Backbone(config, "hg+doubled")
    bnp = Placement(True, True, False, "before, normalized")
    with mock.patch.dict(PLACEMENTS, np=bnp), pytest.raises(ConfigError, match="PLACEMENTS"):
        ScaleStrategy.parse("np")
    with mock.patch.dict(PLACEMENTS, bnp=bnp):
        assert Backbone(
            config, "llama", ScaleOptions(placement_at={"lm_head": "bnp"})
        ).head.lm_head.norm_width


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("hg+ap", "ap"),
        ("iwd", "llama"),
        ("owd", "nowd"),
        ("nop+or+hg+nowd", "nop"),
        ("ap+iwd", "ap+nowd"),
        ("unified", "hg+dnp+or+iwd"),
    ],
)
def test_backbone_equal_models_have_one_canonical_strategy(
    text: str, canonical: str, config: BackboneConfig
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert str(Backbone(config, text).canonical) == canonical
    assert len(caught) == (ScaleStrategy.parse(text) != ScaleStrategy.parse(canonical))


def test_preset_with_placements_builds_the_model_of_its_options() -> None:
    config = BackboneConfig(d_model=16, n_layer=1, n_head=1, vocab_size=16)
    by_name = Backbone(config, "unified-head-dp")
    by_options = Backbone(config, "unified", ScaleOptions(placement_at={"lm_head": "dp"}))
    assert str(by_name) == str(by_options)
    assert by_name.strategy == by_options.strategy

    kept = Backbone(config, "unified-head-dp", ScaleOptions(placement_at={"lm_head": "bp"}))
    assert kept.head.lm_head.scale_out is None  # the given option has precedence


def test_preset_with_placements_is_not_a_strategy_alone() -> None:
    with pytest.raises(ConfigError, match="lm_head"):
        ScaleStrategy.parse("unified-head-dp")

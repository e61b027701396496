"""Configurations of Section 4 and Appendix B: layers of conf/ have the learning rates and tokens of the paper."""

import pytest

from lightning_sv.settings.parse import parse_run
from tests.conftest import config_args, thinned

# model, optimizer, schedule, strategy: learning rate, tokens a step, billions of tokens (None: 100 a parameter)
RECIPES = [
    ("llama-0.12b", "adamw", "cos", "llama", 4e-3, 1024, None),  # Table 4
    ("llama-0.12b", "adamw", "cos", "unified", 4e-3, 1024, None),
    ("llama-0.12b", "adamw", "cos", "nop", 2e-3, 1024, None),  # Appendix B.2.1
    ("llama-0.12b-large", "adamw", "cos", "llama", 4e-3, 1024, None),  # Appendix B.1.3
    ("llama-0.25b", "adamw", "cos", "unified", 2e-3, 1024, None),
    ("llama-0.5b", "adamw", "cos", "unified", 2e-3, 4096, None),
    ("llama-0.75b", "adamw", "cos", "unified", 2e-3, 4096, None),
    ("llama-1b", "adamw", "cos", "unified", 1e-3, 4096, None),
    ("moe-0.25b", "adamw", "cos", "unified", 3e-3, 1024, None),  # Table 5
    ("moe-0.5b", "adamw", "cos", "unified", 2e-3, 1024, None),
    ("moe-0.8b", "adamw", "cos", "unified", 2e-3, 4096, None),
    ("moe-1b", "adamw", "cos", "unified", 1e-3, 4096, None),
    ("moe-2b", "adamw", "cos", "unified", 6e-4, 4096, None),
    ("llama-0.12b", "muon", "cos", "unified", 5e-3, 1024, None),  # Appendix B.1.2
    ("moe-0.5b", "muon", "cos", "unified", 4e-3, 1024, None),
    ("llama-0.12b", "adamw", "wsd", "unified", 3e-3, 1024, None),
    ("moe-0.5b", "adamw", "wsd", "unified", 2e-3, 1024, None),
    ("gemma-0.5b", "muon", "cos", "wd", 4e-3, 4096, 10),  # Appendix B.2.2
    ("gemma-0.5b", "muon", "cos", "iwd", 4e-3, 4096, 10),
    ("gemma-0.5b", "muon", "cos", "owd", 4e-3, 4096, 10),
    ("gemma-0.5b", "muon", "cos", "nowd", 4e-3, 4096, 10),
]


@pytest.mark.parametrize(
    ("model", "optim", "schedule", "scale", "lr", "seq_len", "billions"),
    thinned(RECIPES, RECIPES[1:3] + RECIPES[4:17:3] + RECIPES[-2:], several=True),
)
def test_recipe_of_the_paper_is_parsed(
    model: str, optim: str, schedule: str, scale: str, lr: float, seq_len: int, billions: float | None
) -> None:
    layers = ("base", f"optim/{optim}", f"schedule/{schedule}", "trainer/gpu", "data/fineweb-edu", f"model/{model}")
    module, data, trainer = parse_run([*config_args(*layers), "--model.scale", scale], check_corpus=False)
    assert (module.lr, data.seq_len, data.global_batch) == (lr, seq_len, 480)
    optimizer = module.optim
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.muon_momentum) == (0.9, 0.95, 0.1, 0.95)
    assert module.schedule.final == {"cos": 0.05, "wsd": 0.0}[schedule]
    if billions is None:
        assert trainer.get("max_steps", -1) == -1
        tokens = module.steps_for_budget(data.tokens_per_step) * data.tokens_per_step
        assert tokens == pytest.approx(100 * module.n_activated, rel=1e-3)
    else:
        assert trainer["max_steps"] * data.tokens_per_step == pytest.approx(billions * 1e9, rel=0.02)

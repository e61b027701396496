"""transformers' own Trainer: groups, saving and going on, and the example that the documentation names."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lightning_sv.interop import apply_strategy, decayed_names, weight_decay_roles
from tests.conftest import thinned
from tests.interop.test_apply import ROUNDING, named
from tests.interop.test_groups import qwen3, shrunk, truth

#: what other people's packages warn of is theirs
pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLE = Path(__file__).parents[2] / "examples/hf_trainer.py"


class IwdTrainer(Trainer):
    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model, "iwd", roles=weight_decay_roles(model))


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    ids = torch.randint(4, 64, (16, 8), generator=torch.Generator().manual_seed(3))
    arguments = TrainingArguments(
        folder, weight_decay=0.5, learning_rate=0.1, max_steps=4, save_steps=2, report_to=[], use_cpu=True,
        logging_strategy="no", disable_tqdm=True, per_device_train_batch_size=4, **options,
    )  # fmt: skip
    return IwdTrainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])


def test_trainer_decayed_names_shrink(tmp_path: Path) -> None:
    model = qwen3()
    assert shrunk(model, trainer(model, tmp_path).create_optimizer()) == truth(model)
    applied = named("llama")
    apply_strategy(applied, "hg+dp+or+iwd")
    # without gradients and with 1 - lr wd = 0.95, a decayed 0 and a frozen parameter do not change
    trained = {name for name, p in applied.named_parameters() if p.requires_grad and p.any()}
    found = shrunk(applied, trainer(applied, tmp_path).create_optimizer())
    assert found == {name for name in trained if "scale_out" not in name}
    assert any("scale_in" in name for name in found) and any("scale_out" in name for name in trained)


@pytest.mark.parametrize("strategy", thinned(["hg+dp+or+iwd", "unified"], ["unified"]))
def test_trainer_resumed_run_same_bits(strategy: str, tmp_path: Path) -> None:
    """With scale vectors, and with norms behind the matrices; a plain model's ends so too."""

    def model() -> nn.Module:
        made = named("llama")
        apply_strategy(made, strategy)
        return made

    whole, resumed = model(), model()
    start = state(whole)
    trainer(whole, tmp_path).train()
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    end = state(whole)
    assert end.keys() == state(resumed).keys()
    assert all(torch.equal(value, end[name]) for name, value in state(resumed).items())
    changed = {name for name, p in whole.named_parameters() if p.requires_grad}
    assert changed == {name for name in start if not torch.equal(start[name], end[name])}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_own_model_page_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/own-model.md").read_text().partition("### FSDP2")[0]
    uses = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(uses) == 3 and all(len(use.split("\n\n")[-1].splitlines()) <= 3 for use in uses)
    model, ids = named("llama"), torch.arange(4, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        exec("".join(uses), {"torch": torch, "model": model, "tokens": ids})
        again = AutoModelForCausalLM.from_pretrained("plain").eval()
        assert (again(ids).logits - before).norm() < ROUNDING * before.norm()


def test_example_hf_trainer_loads_plain_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plain"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "6", "--out", str(out)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    plain, applied, *rest = (line for line in capsys.readouterr().out.splitlines() if not line.startswith("{"))
    assert plain.startswith("plain, iwd:") and applied.startswith(
        "hg+dp+or+iwd: 32 scale vectors; the function is preserved"
    )
    losses = [float(line.split(":")[1].split()[0]) for line in (plain, rest[0])]
    assert all(loss < 5.0 for loss in losses)  # ln(256) = 5.55 before
    assert rest[1] == "folded, loaded as plain LlamaForCausalLM: logits differ by 0.0e+00"
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM" and not any(info.values())

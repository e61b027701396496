"""Groups and names for optimizers, and transformers' Trainer: the documentation's code, run in the
frameworks."""

import copy
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lightning_sv import Backbone, BackboneConfig, interop
from lightning_sv.errors import ConfigError
from lightning_sv.interop import (
    ModelParameter,
    Roles,
    apply_strategy,
    decayed_names,
    param_groups,
    weight_decay_roles,
)
from lightning_sv.interop.groups import unwrapped
from tests.conftest import ROOT, thinned
from tests.interop.test_apply import ROUNDING, named, state
from tests.roles.families import find

#: what other people's packages warn of is theirs
FOREIGN = pytest.mark.filterwarnings("ignore")
POLICIES = {"wd": "input output", "iwd": "input", "owd": "output", "nowd": ""}


def qwen3() -> nn.Module:
    """Vectors of both sides: Q/K-norms, and norms before matrices."""
    return find("qwen3").build()


def shrunk(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of parameters that a step without gradients makes smaller."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def truth(model: nn.Module, policy: str = "iwd") -> set[str]:
    """Names that decay, by hand: all but the norms of the other side."""
    names = {name for name, _ in model.named_parameters()}
    for side, pattern in (("output", "[qk]_norm"), ("input", "layernorm|model.norm")):
        if side not in POLICIES[policy]:
            names = {name for name in names if not re.search(pattern, name)}
    return names


@pytest.mark.parametrize("policy", POLICIES)
def test_param_groups_each_policy_decays_its_roles(policy: str) -> None:
    model = qwen3()
    groups = param_groups(model, lr=0.1, weight_decay=0.5, policy=policy)
    assert {group["lr"] for group in groups} == {0.1}
    optimizer = torch.optim.AdamW(groups, lr=9.0)
    assert shrunk(model, optimizer) == truth(model, policy)
    assert set(decayed_names(model, policy)) == truth(model, policy)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_param_groups_frozen_left_out_foreign_roles_refused() -> None:
    model = qwen3()
    roles = weight_decay_roles(model)
    model.lm_head.requires_grad_(False)
    decayed, spared = param_groups(model, 0.1, 0.5, roles=roles)
    params = [*decayed["params"], *spared["params"]]
    assert len(params) == len(list(model.parameters())) - 1
    assert all(p.requires_grad for p in params)
    with pytest.raises(ValueError, match=r"roles has no 0.weight \(1 of 1 names"):
        param_groups(nn.Sequential(nn.Linear(2, 2, bias=False)), 0.1, 0.5, roles=roles)


def test_param_groups_plain_norms_of_16_bits_warn() -> None:
    with pytest.warns(UserWarning, match="norm.weight are in torch.bfloat16"):
        param_groups(qwen3().bfloat16(), 0.1, 0.5)
    model = qwen3()
    roles = weight_decay_roles(model)
    model.lm_head.to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param_groups(model, 0.1, 0.5, roles=roles)


class Wrapper(nn.Module):
    """What DDP, FSDP and a LightningModule do to names: the model below one attribute of theirs."""

    def __init__(self, word: str, model: nn.Module):
        super().__init__()
        self.add_module(word, model)


WRAPPERS = ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]


@pytest.mark.parametrize("words", [*zip(WRAPPERS), ("module", "_orig_mod")])
def test_decayed_names_wrapped_model_matches_roles(words: tuple[str, ...]) -> None:
    holder: Any = qwen3()
    roles = weight_decay_roles(holder)
    decayed = truth(holder)
    holder.model.norm = Wrapper(words[-1], holder.model.norm)  # a part too
    for word in reversed(words):
        holder = Wrapper(word, holder)
    found = {unwrapped(name) for name in decayed_names(holder, roles=roles)}
    assert found == {unwrapped(name) for name in decayed}
    holder.register_parameter("own", nn.Parameter(torch.ones(2)))
    for other in (holder, Wrapper("net", qwen3())):  # such as a LightningModule
        with pytest.raises(ConfigError, match="roles has no "):
            decayed_names(other, roles=roles)


def test_decayed_names_equal_without_wrappers_refused() -> None:
    model = nn.Module()
    model.register_module("module", nn.RMSNorm(4))
    model.register_parameter("weight", nn.Parameter(torch.ones(4)))
    rows = (ModelParameter("module.weight", (4,), "input"), ModelParameter("weight", (4,), "bias"))
    for roles in (Roles(rows), Roles(rows[1:])):
        with pytest.raises(ConfigError, match="parts of wrappers"):
            decayed_names(Wrapper("_orig_mod", model), roles=roles)


def test_decayed_names_multipliers_follow_output_side() -> None:
    model = find("mamba2").build()
    decayed = {policy: set(decayed_names(model, policy)) for policy in POLICIES}
    name = "backbone.layers.0.mixer.A_log"
    assert [policy for policy in POLICIES if name in decayed[policy]] == ["wd", "owd"]
    assert not any(decayed_name.endswith("bias") for decayed_name in decayed["wd"])


@pytest.mark.parametrize(
    "build", [lambda: find("llama").build(), lambda: Backbone(BackboneConfig(16, 1, 2, 48))]
)
def test_decayed_names_of_compiled_model_needs_no_example(build: Any) -> None:
    model = build()
    found = decayed_names(torch.compile(model))
    assert list(map(unwrapped, found)) == decayed_names(model)


def code_of_page(heading: str) -> list[str]:
    """Return the Python code of docs/own-model.md after a heading."""
    page = (ROOT / "docs/own-model.md").read_text().partition(heading)[2]
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_own_model_page_prints_parameters_whose_decay_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, *_ = code_of_page("*Which parameters does my")
    model = qwen3()
    all_decay = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    by_role = torch.optim.AdamW(param_groups(model, 1e-3, 0.1))
    undecayed = [name for name, _ in model.named_parameters() if name not in truth(model)]
    for optimizer, differing in ((all_decay, undecayed), (by_role, [])):
        exec(code, {"model": model, "optimizer": optimizer, "tokens": None})
        assert capsys.readouterr().out.split() == differing


def test_own_model_page_example_for_muon_chooses_by_role() -> None:
    """The vectors of stacked experts have two axes, like matrices."""
    code, *_ = code_of_page("### Rules by number of axes")
    model = find("qwen3_moe").build()
    with pytest.warns(UserWarning, match="gate_up_proj"):
        report = apply_strategy(model, "hg+dp+or+iwd")
    names: dict[str, Any] = {"torch": torch, "model": model, "tokens": None}
    exec(code, names)
    (of_muon,) = names["muon"].param_groups
    decayed, spared = names["adamw"].param_groups
    with_decay = {id(p) for p in [*of_muon["params"], *decayed["params"]]}
    expected = {id(model.get_parameter(name)) for name in decayed_names(model, "iwd")}
    assert with_decay == expected
    assert with_decay | {id(p) for p in spared["params"]} == {id(p) for p in model.parameters()}
    vectors: set[int] = set()
    for name in report.vectors:
        vectors.update(map(id, model.get_submodule(name).parameters()))
    assert report.stacked and not vectors & {id(p) for p in of_muon["params"]}


@pytest.mark.parametrize("word", ["", "+iwd", "+owd", "+nowd"])
def test_param_groups_of_applied_strategy_have_its_decay(word: str) -> None:
    model = find("llama").build()
    assert decayed_names(model) == decayed_names(model, "iwd")
    apply_strategy(model, f"hg+dp{word}")
    wrapper = Wrapper("_orig_mod", model)
    roles = weight_decay_roles(model)
    assert decayed_names(wrapper, roles=roles) == decayed_names(
        wrapper, word[1:] or "wd", roles=roles
    )


def test_param_groups_of_different_strategies_need_a_policy() -> None:
    teacher = find("llama").build()
    student = find("llama").build()
    apply_strategy(teacher, "hg+wd")
    apply_strategy(student, "hg+nowd")
    both = Pair(teacher, student)
    example = (torch.arange(4, 8)[None],)
    with pytest.raises(ConfigError, match="^policy is None"):
        decayed_names(both, example=example)


class Pair(nn.Module):
    """Two models in one, as for distillation."""

    def __init__(self, teacher: nn.Module, student: nn.Module):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.student(ids).logits - self.teacher(ids).logits  # type: ignore[no-any-return]


def test_param_groups_wrong_policy_refused() -> None:
    """Before the model is looked at."""
    for policy in ("idw", "hg+iwd", "nomodule:Name"):
        with pytest.raises(ConfigError, match="^policy "):
            param_groups(nn.Linear(2, 2), 0.1, 0.1, policy)


def three_lines() -> dict[str, str]:
    """Return framework -> the code of its row in the page's first table."""
    page = (ROOT / "docs/own-model.md").read_text()
    rows = re.findall(r"^\| ([\w, ']+[^|]*) \| (`[^|]+`) \|", page, re.MULTILINE)
    lines = {}
    for name, code in rows:
        if "<br>" in code:
            lines[name] = "\n".join(re.findall(r"`(.+?)`(?:<br>|$)", code))
    return lines


def run_row(framework: str, **names: Any) -> dict[str, Any]:
    """Run the code of a row with the functions of this package."""
    names |= {name: getattr(interop, name) for name in interop.__all__} | {"torch": torch}
    exec(three_lines()[framework], names)
    return names


def own() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 64, bias=False))


IDS = torch.arange(4, 20)[None]


def exported_by_transformers() -> tuple[nn.Module, nn.Module]:
    model = named("llama")
    before = copy.deepcopy(model)
    assert len(run_row("transformers", model=model)["optimizer"].param_groups) == 2
    return before, AutoModelForCausalLM.from_pretrained("plain").eval()


def exported_by_own_module() -> tuple[nn.Module, nn.Module]:
    before = own()
    plain = own()
    nn.init.normal_(before[1].weight)
    model = copy.deepcopy(before)
    names = run_row("your own module, e.g. nanoGPT's", model=model, tokens=IDS)
    assert len(names["optimizer"].param_groups) == 2
    plain.load_state_dict(torch.load("plain.pt"))
    return before, plain


def exported_by_peft() -> tuple[nn.Module, nn.Module]:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = named("llama")
    before = copy.deepcopy(model)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    merged = run_row("PEFT", model=model, peft=peft, lora=lora)["merged"]
    assert type(merged) is type(before)
    return before, merged


EXPORTS = {
    "transformers": exported_by_transformers,
    "your own module, e.g. nanoGPT's": exported_by_own_module,
    "PEFT": exported_by_peft,
}


@FOREIGN
@pytest.mark.parametrize("framework", EXPORTS)
def test_own_model_page_table_exports_the_same_function(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    before, after = EXPORTS[framework]()
    with torch.no_grad():
        expected, found = (getattr(model(IDS), "logits", model(IDS)) for model in (before, after))
    assert (found - expected).norm() < ROUNDING * expected.norm()


def test_own_model_page_table_has_the_tested_frameworks() -> None:
    assert three_lines().keys() == EXPORTS.keys() | {"litgpt", "torchtitan"}
    assert all(code.count("\n") < 3 for code in three_lines().values())


@FOREIGN
def test_own_model_page_table_litgpt_decays_input_side() -> None:
    pytest.importorskip("litgpt", reason="litgpt is not installed (requirements/bench.txt)")
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import instantiate_torch_optimizer

    needed = {"instantiate_torch_optimizer": instantiate_torch_optimizer}
    plain: dict[str, Any] = {
        "n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "intermediate_size": 48,
        "vocab_size": 64, "padded_vocab_size": 64, "block_size": 16, "bias": False,
        "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "rotary_percentage": 1.0,
        "parallel_residual": False,
    }  # fmt: skip
    of_qwen3 = {"norm_qk": True}
    of_gemma2 = {"post_attention_norm": True, "post_mlp_norm": True}
    outputs = re.compile("norm_q|norm_k|post_attention_norm|post_mlp_norm")
    for kind in (of_qwen3, of_gemma2):
        model = GPT(Config(**plain, **kind))
        tokens = torch.randint(0, 64, (1, 16))
        optimizer = run_row("litgpt", model=model, tokens=tokens, **needed)["optimizer"]
        names = {name for name, _ in model.named_parameters()}
        output = set(filter(outputs.search, names))
        assert output and shrunk(model, optimizer) == names - output


@FOREIGN
def test_own_model_page_table_torchtitan_decays_input_side() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed (requirements/bench.txt)")
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw

    model = qwen3()
    config = SimpleNamespace(optimizer=default_adamw(lr=1e-3, weight_decay=0.1))
    names: dict[str, Any] = {"config": config, "ParamGroupConfig": ParamGroupConfig}
    run_row("torchtitan", model=model, tokens=None, **names)
    assert shrunk(model, OptimizersContainer(config.optimizer, model_parts=[model])) == truth(model)


@FOREIGN
def test_weight_decay_roles_peft_adapters_are_matrices() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = peft.get_peft_model(qwen3(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    roles = weight_decay_roles(model)
    for p in roles.parameters:
        if "lora_" in p.name:
            assert p.role == "matrix" and p.trained, p.name
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(decayed_names(model, roles=roles)) == trained


def test_interop_import_loads_no_lightning() -> None:
    slow = {"lightning", "transformers", "torch._dynamo"}
    program = f"import sys, lightning_sv.interop; assert not {slow} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


class IwdTrainer(Trainer):
    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model, "iwd", roles=weight_decay_roles(model))


def trainer(model: nn.Module, folder: Path) -> Trainer:
    ids = torch.randint(4, 64, (16, 8), generator=torch.Generator().manual_seed(3))
    arguments = TrainingArguments(
        folder, weight_decay=0.5, learning_rate=0.1, max_steps=4, save_steps=2, report_to=[], use_cpu=True,
        logging_strategy="no", disable_tqdm=True, per_device_train_batch_size=4,
    )  # fmt: skip
    return IwdTrainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )


@FOREIGN
def test_trainer_decayed_names_shrink(tmp_path: Path) -> None:
    model = qwen3()
    assert shrunk(model, trainer(model, tmp_path).create_optimizer()) == truth(model)
    applied = named("llama")
    apply_strategy(applied, "hg+dp+or+iwd")
    # without gradients and with 1 - lr wd = 0.95, a decayed 0 and a frozen parameter do not change
    trained = {name for name, p in applied.named_parameters() if p.requires_grad and p.any()}
    found = shrunk(applied, trainer(applied, tmp_path).create_optimizer())
    assert found == {name for name in trained if "scale_out" not in name}
    assert any("scale_in" in name for name in found)
    # transformers' own rule goes by name, see docs/own-model.md
    default = Trainer.get_decay_parameter_names(trainer(applied, tmp_path), applied)
    assert any("scale_out" in name for name in default)


@FOREIGN
@pytest.mark.parametrize("strategy", thinned(["hg+dp+or+iwd", "unified"], ["unified"]))
def test_trainer_resumed_run_same_bits(strategy: str, tmp_path: Path) -> None:
    """With scale vectors, and with norms behind the matrices; a plain model's ends so too."""
    whole = named("llama")
    resumed = named("llama")
    for model in (whole, resumed):
        apply_strategy(model, strategy)
    start = state(whole)
    trainer(whole, tmp_path).train()
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    end = state(whole)
    assert end.keys() == state(resumed).keys()
    assert all(torch.equal(value, end[name]) for name, value in state(resumed).items())
    changed = {name for name, p in whole.named_parameters() if p.requires_grad}
    assert changed == {name for name in start if not torch.equal(start[name], end[name])}


@FOREIGN
def test_own_model_page_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    uses = code_of_page("# ")[: -len(code_of_page("### Fold before"))]
    assert len(uses) == 4 and all(len(use.split("\n\n")[-1].splitlines()) <= 3 for use in uses)
    model = named("llama")
    ids = IDS
    with torch.no_grad():
        before = model(ids).logits
        exec("".join(uses), {"torch": torch, "model": model, "tokens": ids})
        again = AutoModelForCausalLM.from_pretrained("plain").eval()
        assert (again(ids).logits - before).norm() < ROUNDING * before.norm()


@FOREIGN
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "mixtral"])
def test_own_model_page_loads_an_unfolded_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, *_ = code_of_page("### Fold before")
    model = named(name)
    apply_strategy(model, "unified")
    model.save_pretrained("unfolded")
    names: dict[str, Any] = {"model": model, "apply_strategy": apply_strategy}
    exec(code, names)
    assert torch.equal(names["again"].eval()(IDS).logits, model(IDS).logits)


@FOREIGN
def test_example_hf_trainer_loads_plain_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plain"
    example = str(ROOT / "examples/hf_trainer.py")
    monkeypatch.setattr(sys, "argv", [example, "--steps", "6", "--out", str(out)])
    runpy.run_path(example, run_name="__main__")
    plain, applied, *rest = (
        line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")
    )
    preserved = "hg+dp+or+iwd: 32 scale vectors; the function is preserved"
    assert plain.startswith("plain, iwd:") and applied.startswith(preserved)
    losses = [float(line.split(":")[1].split()[0]) for line in (plain, rest[0])]
    assert all(loss < 5.0 for loss in losses)  # ln(256) = 5.55 before
    assert rest[1] == "folded, loaded as plain LlamaForCausalLM: logits differ by 0.0e+00"
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM" and not any(info.values())

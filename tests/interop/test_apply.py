"""A strategy on existing models: the same function, trained under the strategy, and folded
again."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_sv.callbacks import branch_norms, scale_vector_figures
from lightning_sv.callbacks.sharpness import parameter_subsets
from lightning_sv.errors import ConfigError
from lightning_sv.interop import apply_strategy, fold_applied, weight_decay_roles
from lightning_sv.interop.apply.outputs import relative_difference
from lightning_sv.interop.apply.weights import OutputNorm, ScaledWeight
from lightning_sv.roles.example_inputs import example_of
from tests.conftest import thinned
from tests.roles.families import FAMILIES, Family, find

pytestmark = pytest.mark.filterwarnings("ignore:apply_strategy has:UserWarning")
#: families of every run: pre-norm, fused, 1 + w, LayerNorm's biases, experts, latents, state
#: spaces, no vectors
FEW = {
    "llama",
    "gpt2",
    "gemma3_text",
    "phi3",
    "qwen3_moe",
    "deepseek_v3",
    "mamba2",
    "olmo",
    "nanochat",
}
#: of outputs in float32, relative: measured are 1e-7 to 1.4e-6, on one CPU; a vector that is lost
#: changes them by 1e-2
ROUNDING = 64 * torch.finfo(torch.float32).eps


def trained(family: Family, std: float = 0.7) -> nn.Module:
    """The tiny model with scale vectors that are not 1, negative entries among them."""
    model = family.build()
    generator = torch.Generator().manual_seed(1)
    for row in weight_decay_roles(model, family.example).parameters:
        if row.role in ("input", "output"):
            with torch.no_grad():
                parameter = model.get_parameter(row.name)
                parameter += std * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def named(name: str, std: float = 0.7) -> nn.Module:
    return trained(find(name), std)


def logits(model: nn.Module, example: dict[str, Any] | None = None) -> Tensor:
    args, kwargs = example_of(model, example)
    with torch.no_grad():
        out: Tensor = model(*args, **kwargs)[0]
    return out


def is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Move the scale vectors that a strategy has put there."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "parametrizations" in name and not name.endswith(".original"):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def unchanged(model: nn.Module, *, values: bool = True) -> Iterator[None]:
    """Check that afterwards a model has the same keys, classes and trained parameters, and the same
    values."""

    def kept() -> list[Any]:
        trains = [parameter.requires_grad for parameter in model.parameters()]
        return [list(model.state_dict()), [type(module) for module in model.modules()], trains]

    before = kept()
    numbers = state(model)
    yield
    assert kept() == before
    assert not values or all(
        torch.equal(value, numbers[name]) for name, value in model.state_dict().items()
    )


def cases_of_families() -> Iterator[Any]:
    """Yield (strategy, family); few of them in a short run."""
    for strategy, family in itertools.product(("hg+dp+or+iwd", "hg+ap", "hg+er"), FAMILIES):
        is_first = strategy == "hg+dp+or+iwd"
        is_slow = family.id == "kimi_linear"  # its pass is a loop over tokens
        is_short = family.id == "llama" or (is_first and family.id in FEW)
        if is_first or not is_slow:
            marks = [] if is_short else [pytest.mark.long]
            yield pytest.param(strategy, family, id=f"{family.id}-{strategy}", marks=marks)


@pytest.mark.parametrize(("strategy", "family"), list(cases_of_families()))
def test_apply_strategy_any_family_keeps_outputs_and_folds(strategy: str, family: Family) -> None:
    # er refuses negative scale vectors, so they stay close to 1
    model = trained(family, 0.05 if "er" in strategy else 0.7)
    before = logits(model, family.example)
    with unchanged(model, values=False):
        report = apply_strategy(model, strategy, family.example)
        assert report.same_function
        assert report.difference < ROUNDING
        assert (logits(model, family.example) - before).norm() < ROUNDING * before.norm()
        perturb(model)
        applied = logits(model, family.example)
        with FlopCounterMode(display=False):  # as Lightning's ModelSummary does
            assert (logits(model, family.example) - applied).norm() < ROUNDING * applied.norm()
        assert (applied - before).norm() > 1e-3 * before.norm() or not report.vectors
        assert fold_applied(model) is model
    assert torch.equal(logits(model, family.example), applied)


@pytest.mark.parametrize(("strategy", "noted"), [
    ("hg+dp+or+iwd", ["model.embed_tokens.weight"]),
    ("nop", ["model.norm.weight"]),
    ("hg", []),
])  # fmt: skip
def test_apply_strategy_tied_head_without_vector_noted(strategy: str, noted: list[str]) -> None:
    report = apply_strategy(named("qwen2-tied"), strategy)
    assert [name for name, _ in report.notes] == noted
    assert not any("lm_head" in name for name in report.vectors)


@pytest.mark.parametrize("strategy", ["or", "dp", "hg+dp+or", "ap+er"])
@pytest.mark.parametrize(
    "name", thinned(["llama", "phi3", "gemma3_text", "gpt2", "qwen3_moe"], ["llama", "qwen3_moe"])
)
def test_apply_strategy_callbacks_read_every_matrix_and_vector(name: str, strategy: str) -> None:
    plain = named(name, 0.1)
    model = named(name, 0.1)
    apply_strategy(plain, "llama")
    apply_strategy(model, strategy)
    before = branch_norms(plain)
    after = branch_norms(model)
    for key, norm in before.items():
        if "/effective" in key:  # the function is the same
            torch.testing.assert_close(after[key], norm, rtol=1e-4, atol=0)

    subsets = parameter_subsets(model)
    vectors: dict[str, set[int]] = {"input": set(), "output": set()}
    for row in weight_decay_roles(model).parameters:
        if row.trained and row.role in vectors:
            vectors[row.role].add(id(model.get_parameter(row.name)))
    for role, ids in vectors.items():
        assert set(map(id, subsets[f"scale_{role}"])) == ids


def test_imbalance_of_an_applied_strategy_is_left_out_behind_its_output_norms() -> None:
    model = named("llama", 0.1)
    apply_strategy(model, "hg+dnp", dp_at="lm_head")
    figures = scale_vector_figures(model)
    of_q = {name for name in figures if name.startswith("layer0/q_proj/")}
    assert "layer0/q_proj/imbalance_in" in of_q and "layer0/q_proj/imbalance_out" not in of_q
    assert "head/lm_head/imbalance_out" in figures


def test_branch_norms_of_branches_with_one_name_have_their_paths() -> None:
    model = named("t5", 0.1)
    apply_strategy(model, "hg+dp")
    norms = branch_norms(model)
    matrix = model.get_submodule("encoder.block.0.layer.0.SelfAttention.q").weight
    norm = norms["layer0/encoder_block_layer_0_SelfAttention_q/effective"]
    torch.testing.assert_close(norm, matrix.norm())  # type: ignore[operator]
    assert "layer0/decoder_block_layer_1_EncDecAttention_q/effective" in norms


@pytest.mark.parametrize(("name", "words"), [
    ("phi3", {"qkv_proj"}),
    ("gpt_neox", {"query_key_value"}),
    ("gpt2", {"c_attn"}),
    ("qwen3_moe", {"gate_up_proj"}),
    ("deepseek_v3", {"kv_a_proj_with_mqa", "kv_b_proj"}),
    ("qwen3_5_text", {"q_proj"}),
    ("qwen2_moe", {"shared_expert_gate"}),
    ("qwen3", {"q_proj", "k_proj"}),  # which it normalizes itself
])  # fmt: skip
def test_apply_strategy_dnp_outside_plain_linear_is_dp(name: str, words: set[str]) -> None:
    """Several matrices in a weight, Conv1D, experts and a single output have an output-side vector
    without a norm."""
    model = named(name)
    model.set_attn_implementation("eager")  # in which queries and keys meet before the values
    report = apply_strategy(model, "hg+dnp")
    noted = {weight.removesuffix(".weight") for weight, _ in report.notes}
    assert words <= {layer.rpartition(".")[2] for layer in noted}
    without = {weight for weight, note in report.notes if note.startswith("dp instead of dnp")}
    scaled = {module.plain_name for module in model.modules() if isinstance(module, ScaledWeight)}
    assert without <= scaled
    normed = {module.plain_name for module in model.modules() if isinstance(module, OutputNorm)}
    assert noted.isdisjoint(normed)
    assert report.same_function == (not normed)


def test_apply_strategy_generation_with_cache_same_tokens() -> None:
    for name in ("llama", "gemma2"):
        model = named(name)
        ids = torch.arange(4, 12)[None]
        plain = model.generate(ids, max_new_tokens=10, do_sample=False)
        apply_strategy(model, "hg+dp+or+iwd")
        assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False), plain)
        uncached = model.generate(ids, max_new_tokens=10, do_sample=False, use_cache=False)
        assert torch.equal(uncached, plain)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    "how", thinned(["reentrant", "non-reentrant", "compiled"], ["reentrant", "non-reentrant"])
)
def test_apply_strategy_checkpointed_or_compiled_same_gradients(how: str) -> None:
    """The compiled model is one graph, with the norms that dnp puts behind matrices."""
    model = named("llama", 0.3)
    ids = torch.arange(4, 20)[None]
    apply_strategy(model.train(), "unified" if how == "compiled" else "hg+dp+or+iwd")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(run: Any) -> list[Tensor]:
        model.zero_grad()
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr]

    plain = gradients(model)
    if how == "compiled":
        changed = gradients(torch.compile(model, backend="eager", fullgraph=True))
    else:
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(
                checkpoint, use_reentrant=how == "reentrant"
            )
        changed = gradients(model)
    # some of the compiled model's are zero but for rounding
    largest = max(gradient.norm() for gradient in plain)
    tolerance = float(ROUNDING * largest) if how == "compiled" else 0.0
    torch.testing.assert_close(changed, plain, rtol=0, atol=tolerance)
    assert all(gradient.any() for gradient in plain)


@pytest.mark.parametrize(("name", "strategy"), [
    ("llama", "hg+dp+or+iwd"),
    ("llama", "dnp"),
    ("qwen3_moe", "hg"),
])  # fmt: skip
def test_apply_strategy_state_loads_but_not_into_plain_model(
    name: str, strategy: str, tmp_path: Path
) -> None:
    load = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    read_tensors = pytest.importorskip("safetensors.torch").load_file
    model: Any = named(name)
    other: Any = named(name)
    for applied_model in (model, other):
        apply_strategy(applied_model, strategy)
    perturb(model)
    copied = copy.deepcopy(model)
    perturb(copied)
    model.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "state", state_dict=model.state_dict())
    copied.save_pretrained(tmp_path / "copy")
    for folder in ("model", "state", "copy"):
        with pytest.raises(RuntimeError, match=r"mismatch|shape"):
            load(tmp_path / folder)
    with torch.no_grad():
        for parameter in filter(is_trained, other.parameters()):
            parameter.zero_()
    for folder, source in (("state", model), ("copy", copied)):  # as Trainer resumes
        other.load_state_dict(read_tensors(tmp_path / folder / "model.safetensors"), strict=False)
        assert torch.equal(logits(other), logits(source))
    with pytest.raises(RuntimeError, match="Missing key"):
        named(name).load_state_dict(model.state_dict())
    # torch.distributed.checkpoint reads keys as attributes
    owned = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    assert model.state_dict().keys() <= dict(owned).keys()


class Savable(nn.Sequential):
    """A model whose `save_pretrained` has no options and reads its own state dict."""

    def save_pretrained(self) -> dict[str, Tensor]:
        return self.state_dict()


def test_apply_strategy_any_save_pretrained_is_used_and_restored() -> None:
    """That of the class, or one of the model itself."""
    of_class = Savable(nn.RMSNorm(4), nn.Linear(4, 4))
    own: Any = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4))
    own.save_pretrained = own.state_dict
    for model in (of_class, own):
        plain_save = model.save_pretrained
        model[0].weight.data[0] = -1
        with pytest.raises(ConfigError, match="cannot represent"):
            apply_strategy(model, "hg+er", torch.ones(2, 4))
        assert model.save_pretrained == plain_save
        apply_strategy(model, "hg+dp", torch.ones(2, 4))
        saved = model.save_pretrained()
        model.load_state_dict(saved)
        with pytest.raises(RuntimeError, match="size mismatch"):
            nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4)).load_state_dict(saved, strict=False)
        assert fold_applied(model).save_pretrained == plain_save


def test_apply_strategy_dp_at_leaves_the_output_without_norm() -> None:
    model = named("llama")
    for strategy, name in (("unified", "head"), ("hg+dp", "lm_head")):
        with pytest.raises(ConfigError, match="dp_at"):
            apply_strategy(model, strategy, dp_at=[name])
    preset = copy.deepcopy(model)
    apply_strategy(preset, "unified-head-dp")
    report = apply_strategy(model, "unified", dp_at=["lm_head"])
    assert str(report).startswith("hg+dnp+or+iwd[lm_head=dp]")
    assert torch.equal(logits(preset), logits(model))
    assert hasattr(model.model.layers[0].mlp.up_proj, "output_norm")
    assert not hasattr(model.lm_head, "output_norm")
    assert any("lm_head" in name and "scale_out" in name for name, _ in model.named_parameters())


def test_apply_strategy_dnp_normalizes_linear_layers() -> None:
    model = named("llama")
    plain = weight_decay_roles(model)
    report = apply_strategy(model, "unified")
    for row in weight_decay_roles(model).parameters:
        name = row.name.removesuffix(".original").replace("parametrizations.", "")
        if name.endswith(("proj.weight", "lm_head.weight")):
            assert row.role == plain[name].role
    assert not report.same_function
    assert report.difference > 1e-3
    assert "the function changes" in str(report)
    layer = model.model.layers[0].self_attn
    seen = []
    layer.k_proj.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    logits(model)
    ((x, out),) = seen
    heads = nn.functional.linear(x, layer.k_proj.weight).unflatten(-1, (2, 8))
    heads = heads * (heads.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
    assert (out - heads.flatten(-2)).norm() < ROUNDING * out.norm()
    with pytest.raises(ValueError, match="dnp normalizes"):
        fold_applied(model)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


def test_difference_of_outputs_that_are_nan_is_infinite() -> None:
    assert relative_difference([torch.ones(2)], [torch.tensor([1.0, torch.nan])]) == torch.inf


@torch.no_grad()
def test_scaled_weight_changes_refused() -> None:
    model = named("llama")
    apply_strategy(model, "hg+dp+or+iwd")
    changes: list[Callable[[Any], object]] = [
        lambda weight: setattr(weight, "data", weight + 1),
        lambda weight: weight.data.normal_(),
        lambda weight: weight.data.__setitem__(0, 1.0),
        lambda weight: weight.__iadd__(1.0),
        lambda weight: weight.chunk(2)[1].zero_(),
        nn.init.ones_,
    ]
    weight = model.model.layers[0].self_attn.v_proj.weight
    with unchanged(model):
        for change in changes:
            with pytest.raises(RuntimeError, match="fold_applied"):
                change(weight)
        for result in (weight.clone(), weight * 1, weight[torch.tensor([0, 2])], weight[[1]]):
            result.zero_()


@pytest.fixture
def one_device() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_scaled_weight_replacements_refused_until_folded(one_device: DeviceMesh) -> None:
    model = named("llama")
    apply_strategy(model, "hg+dp+or+iwd")
    layer = model.model.layers[0].self_attn.v_proj

    def tensor_parallel() -> None:
        parallelize_module(layer, one_device, ColwiseParallel())

    def quantized() -> None:
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))

    for replace in (tensor_parallel, quantized):
        with unchanged(model), pytest.raises(KeyError):
            replace()
    layer.register_parameter("bias", None)
    fold_applied(model)
    tensor_parallel()
    assert type(layer.weight.data).__name__ == "DTensor"


def test_scaled_weight_is_itself_for_autograd_and_its_results_are_plain() -> None:
    x = torch.randn(2, 3, 8)
    model: Any = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 6))
    apply_strategy(model, "hg+dp+or", x)
    weight = model[1].weight
    for result in (model(x), torch.einsum("bti,oi->bto", x, weight)):  # the bias makes a view
        assert type(result) is Tensor
        result += 1
    called = []
    weight.register_hook(called.append)
    loss = nn.functional.linear(x, weight).square().sum()
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    weight.retain_grad()
    loss.backward()
    torch.testing.assert_close(weight.grad, gradient)
    assert called
    with torch.no_grad():
        nn.Parameter(weight.detach()).zero_()


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # PEFT's calls
def test_fold_applied_lora_merge_refused_before_right_after() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = named("llama")
    apply_strategy(model, "hg+dp+or+iwd")
    perturb(model)
    targets = ["q_proj", "v_proj", "up_proj"]
    lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, lora).eval()
    before = logits(wrapped)
    for merge in (
        wrapped.merge_and_unload,
        lambda: wrapped.merge_and_unload(safe_merge=True),
        wrapped.merge_adapter,
    ):
        with pytest.raises(RuntimeError, match="cannot assign"):
            merge()
        assert torch.equal(logits(wrapped), before)
    merged = fold_applied(wrapped).merge_and_unload()
    assert (logits(merged) - before).norm() < ROUNDING * before.norm()


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_fold_applied_lora_base_with_a_trained_head_stays_frozen() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = named("llama")
    apply_strategy(model, "hg+dp+or+iwd")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    fold_applied(peft.get_peft_model(model, lora))
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert norms and not any(norm.requires_grad for norm in norms)


def test_apply_strategy_stacked_rows_of_experts_have_own_vectors() -> None:
    model = named("qwen3_moe")
    with pytest.warns(UserWarning, match="gate_up_proj") as warned:
        report = apply_strategy(model, "hg+dp")
    assert "\n" not in str(warned[0].message)
    axes = {
        name: max(p.ndim for p in model.get_submodule(name).parameters()) for name in report.vectors
    }
    assert set(report.stacked) == {name for name, count in axes.items() if count > 1} != set()
    assert not report.notes
    (experts,) = model.model.layers[0].mlp.experts.parametrizations.gate_up_proj
    assert experts.widths == (16, 16) and experts.parts[0].scale_in.gamma.shape == (8, 32)

"""What a probe is taken on, its budget, and that it leaves the training alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_sv import Backbone, BackboneConfig, PretrainModule
from lightning_sv.callbacks import Sharpness, sharpness
from lightning_sv.callbacks.curvature_batch import (
    GRAPH,
    MOST_ATTENTION,
    MOST_TOKENS,
    PLANNED,
    PRODUCT,
    fitting_length,
    fitting_sequences,
    log_spaced,
    parameter_subsets,
    plain_copy,
)
from lightning_sv.callbacks.probe_memory import probe_bytes
from lightning_sv.curvature import DifferenceProduct, HessianProduct, Product, lanczos
from lightning_sv.errors import ConfigError
from lightning_sv.nn import meta_backbone, next_token_loss
from lightning_sv.nn.cross_entropy import CHUNK
from lightning_sv.scale import ScaleOptions, ScaleVector
from lightning_sv.scale.row_chunks import CHUNK_ELEMENTS, unchunked
from tests.conftest import GEMMA, MOE, perturbed, thinned
from tests.launch import launch
from tests.plan.test_memory import allocated


def names_of(model: Backbone, members: Sequence[Tensor]) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    assert len({id(p) for p in members}) == len(members)
    return {names[id(p)] for p in members}


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
@pytest.mark.parametrize("family", ["llama", "gemma", "moe"])
def test_subsets_hold_what_their_names_say(text: str, family: str, config: BackboneConfig) -> None:
    if (text, family) == ("unified", "gemma"):
        text = "hg+dp"  # q and k would be normalized twice
    model = Backbone(replace(config, **{"llama": {}, "gemma": GEMMA, "moe": MOE}[family]), text)
    every = dict(model.named_parameters())
    subsets = {name: names_of(model, members) for name, members in parameter_subsets(model).items()}
    assert subsets["all"] == set(every)
    roles = ("matrix", "router", "head", "embedding", "scale_input", "scale_output")
    assert sum(len(subsets[role]) for role in roles) == len(every)
    assert set().union(*(subsets[role] for role in roles)) == set(every)
    vectors = [(path, module) for path, module in model.named_modules() if isinstance(module, ScaleVector)]
    for role in ("input", "output"):
        assert subsets[f"scale_{role}"] == {name for name in every for v, m in vectors if m.role == role and v in name}
    assert subsets["layer1"] == {name for name in every if name.startswith("layers.1.")}
    own = {name for name in every if ".q_proj." in name}
    shared = {name for name in every if ".qkv.norm." in name}
    assert subsets["q_proj"] == own | shared and subsets.get("attn_norm", set()) == shared
    assert subsets["o_proj"] == {name for name in every if ".o_proj." in name}
    if family == "gemma" and text != "nop":
        assert subsets["k_norm"] == {name for name in every if ".k_norm." in name}
    if family == "moe":
        assert subsets["expert_down_proj"] == {name for name in every if ".expert_down_proj." in name}
        assert {name for name in every if ".expert_up_proj." in name} <= subsets["expert_up_proj"]


def test_frozen_parameters_are_in_no_subset(config: BackboneConfig) -> None:
    model = Backbone(config, "unified", ScaleOptions(freeze_input_beta=True))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    for members in parameter_subsets(model).values():
        assert not frozen & names_of(model, members)


def test_steps_and_batch_follow_from_the_plan(config: BackboneConfig) -> None:
    assert log_spaced(1200, 9) == [0, 12, 23, 45, 86, 167, 322, 622, 1200]
    assert log_spaced(1, 9) == [0, 1] and log_spaced(70, 2) == [0, 70]
    for total in (3, 40, 999, 10**6):
        steps = log_spaced(total, 9)
        assert steps[0] == 0 and steps[-1] == total and len(steps) <= 9
    sizes = replace(config, d_model=512, n_head=8, vocab_size=1024)
    n = fitting_sequences(sizes, 128, work=5_000, probes=8, subsets=["all"], products=10)
    assert 0.9 < 8 * n * (GRAPH + 10 * PRODUCT) / (PLANNED * 5_000) < 1
    assert fitting_sequences(sizes, 128, work=1e9, probes=8, subsets=["all"], products=10) == MOST_TOKENS // 128
    assert fitting_sequences(sizes, 128, work=1, probes=8, subsets=["all"], products=10) == 1
    # attention's memory grows with the square of the length: of a long sequence an exact probe reads the beginning
    assert fitting_length(sizes, 128) == 128
    large = replace(config, d_model=1792, n_layer=22, n_head=28)
    assert fitting_length(large, 4096) == 1024 and 22 * 28 * 1024**2 <= MOST_ATTENTION < 22 * 28 * 2048**2
    assert fitting_sequences(large, 1024, work=1e9, probes=8, subsets=["all"], products=10) == 1


class Harness:
    """A run without its training: the parts of Trainer, module and data that the callback reads."""

    def __init__(self, config: BackboneConfig, text: str, steps: int, **arguments: Any):
        self.written: list[tuple[int, dict[str, float]]] = []
        self.now = 100.0
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(3)
        blocks = torch.randint(0, config.vocab_size, (4, 9), generator=generator)
        logger = SimpleNamespace(log_metrics=lambda values, step: self.written.append((step, values)))
        batches = SimpleNamespace(
            tokens_per_step=64, seq_len=8, global_batch=8, validations=2, val_sequences=4, held_out=lambda n: blocks[:n]
        )
        data = SimpleNamespace(batches=batches, held_out=batches.held_out)
        strategy = SimpleNamespace(broadcast=lambda value: value, barrier=lambda: None)
        self.trainer: Any = SimpleNamespace(
            max_steps=steps, estimated_stepping_batches=steps, global_step=0, is_global_zero=True, world_size=1,
            datamodule=data, strategy=strategy, loggers=[logger], callbacks=[],
        )  # fmt: skip
        self.module = PretrainModule(config, text, lr=0.1)
        self.module.backbone = perturbed(Backbone(config, text))
        self.callback = Sharpness(**arguments)
        self.callback.clock = lambda: self.now
        self.products: list[Product] = []
        made = self.callback._products

        def products(*given: Any) -> dict[str, Product]:
            found = made(*given)
            self.products += found.values()
            return found

        self.callback._products = products

    def run(self, seconds_a_step: float) -> None:
        self.callback.setup(self.trainer, self.module, "fit")
        self.callback.on_train_start(self.trainer, self.module)
        for step in range(1, self.trainer.max_steps + 1):
            self.trainer.global_step = step
            self.now += seconds_a_step
            for micro_batch in range(2):
                self.callback.on_train_batch_end(self.trainer, self.module, {}, None, micro_batch)
        self.callback.on_train_end(self.trainer, self.module)


@pytest.mark.parametrize("seconds", [0.5, 10.0, 40.0, 1000.0])
def test_the_budget_is_kept_by_skipping(
    seconds: float, config: BackboneConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1,000 steps of 1 s with 5%: room for 52 s of probes, of which there are 9."""
    harness = Harness(config, "llama", 1000)

    def measure(*_: object) -> dict[str, float]:
        harness.now += seconds
        return {"all/trace": 1.0}

    monkeypatch.setattr(harness.callback, "_measure", measure)
    with caplog.at_level("INFO"):
        harness.run(seconds_a_step=1.0)
    probed = [step for step, values in harness.written if "sharpness/all/trace" in values]
    skipped = [values["sharpness/skipped"] for _, values in harness.written if len(values) == 1]
    assert probed[0] == 0 and probed[-1] == 1000 and len(probed) + len(skipped) == 9
    assert skipped == list(range(1, len(skipped) + 1))
    assert len(probed) == {0.5: 9, 10.0: 5, 40.0: 2, 1000.0: 2}[seconds]
    share = len(probed) * seconds / (1000 + len(probed) * seconds)
    assert share <= 0.05 or len(probed) == 2
    assert f"{len(probed)} probes" in (said := caplog.text) and f"{share:.1%}" in said


@pytest.mark.parametrize("method", ["exact", "difference"])
def test_a_probe_leaves_the_run_as_it_was(method: str, config: BackboneConfig) -> None:
    harness = Harness(config, "unified", 10, method=method, sequences=2, probes=2)
    net = harness.module.net
    torch.manual_seed(7)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    grads = [p.grad.clone() for p in net.parameters()]
    random = torch.get_rng_state()
    harness.run(seconds_a_step=1.0)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), grads, strict=True))
    (_, first), (_, last) = harness.written
    assert {k: v for k, v in first.items() if k != "sharpness/seconds"} == {
        k: v for k, v in last.items() if k != "sharpness/seconds"
    }
    assert first["sharpness/all/lambda_max"] > 0 and first["sharpness/products"] >= 3 * (2 + 2)


@pytest.mark.parametrize("text", ["llama", "unified"])
def test_differences_agree_with_exact_products(text: str, config: BackboneConfig) -> None:
    figures = []
    for method in ("exact", "difference"):
        harness = Harness(config, text, 1, method=method, sequences=4, lanczos_steps=20, probes=2)
        harness.run(seconds_a_step=1.0)
        figures.append(harness.written[0][1])
    for name in ("all", "scale_input", *(["scale_output"] if text == "unified" else [])):
        for figure in ("lambda_max", "fro2"):
            key = f"sharpness/{name}/{figure}"
            assert figures[1][key] == pytest.approx(figures[0][key], rel=0.02), key
    assert ("sharpness/scale_output/trace" in figures[0]) == (text == "unified")


@pytest.mark.parametrize("exact", thinned([True, False], [False]))
def test_the_memory_of_a_probe_is_counted(exact: bool) -> None:
    """Against what the CPU's allocator gives out, with everything cut as on a GPU."""
    sizes = BackboneConfig(d_model=192, n_layer=3, n_head=3, vocab_size=1024)
    tokens = torch.zeros(2, 128, dtype=torch.long)

    def probe() -> float:
        model = meta_backbone(sizes, "unified").to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        of = HessianProduct if exact else DifferenceProduct
        product = of(lambda: next_token_loss(model(tokens), tokens), tuple(model.parameters()))
        return lanczos(product, 5, rtol=0).largest.value

    with unchunked(CHUNK_ELEMENTS, CHUNK):
        real = allocated(probe)
    assert probe_bytes(meta_backbone(sizes, "unified"), (2, 128), ["all"], 5, exact=exact) == pytest.approx(
        real, rel=0.1
    )


@pytest.mark.long
def test_a_probe_takes_the_products_that_fit(
    config: BackboneConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def needed(exact: bool) -> int:
        return probe_bytes(meta_backbone(config, "unified"), (2, 8), ["all"], 7, exact=exact)

    assert needed(exact=True) > needed(exact=False)
    for free, exact in ((needed(exact=True), True), (needed(exact=False), False)):
        monkeypatch.setattr(sharpness, "free_bytes", lambda *given, free=free: free)
        harness = Harness(config, "unified", 1, sequences=2, probes=2)
        caplog.clear()
        harness.run(seconds_a_step=1.0)
        assert ("differences of gradients instead" in caplog.text) is not exact
        kinds = {type(product) for product in harness.products}
        assert kinds == {HessianProduct if exact else DifferenceProduct}
    monkeypatch.setattr(sharpness, "free_bytes", lambda *given: needed(exact=False) - 1)
    with pytest.raises(ConfigError, match="Sharpness"):
        Harness(config, "unified", 1, sequences=2, probes=2).run(seconds_a_step=1.0)


def test_a_diverged_model_ends_no_run(config: BackboneConfig) -> None:
    harness = Harness(config, "llama", 1)
    with torch.no_grad():
        harness.module.net.embed.weight.fill_(float("nan"))
    harness.run(seconds_a_step=1.0)
    assert harness.written[0][1]["sharpness/loss"] != harness.written[0][1]["sharpness/loss"]
    assert "sharpness/all/trace" not in harness.written[0][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0.0}, "budget of Sharpness is 0.0"),
        ({"probes": 1}, "probes of Sharpness is 1"),
        ({"hutchinson_probes": 1}, "at least 2"),
        ({"subsets": []}, "subsets of Sharpness is empty"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sharpness(**arguments)


def gather_from_two() -> None:
    """On each of two ranks: a sharded model is copied whole on the first, and only there."""
    torch.distributed.init_process_group("gloo")
    rank, config = torch.distributed.get_rank(), BackboneConfig(d_model=32, n_layer=2, n_head=2, vocab_size=48)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(perturbed(Backbone(config, "unified")))
    whole, model = models
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model.embed.weight, DTensor) and model.embed.weight.to_local().shape != whole.embed.weight.shape
    made = plain_copy(model, meta_backbone(config, model.strategy), torch.device("cpu"), keep=rank == 0)
    assert (made is None) == (rank == 1)
    if made is not None:
        for name, value in whole.state_dict().items():
            assert torch.equal(made.state_dict()[name], value), name
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_sharded_weights_are_gathered(tmp_path: Path) -> None:
    ended = launch("tests.callbacks.test_sharpness", logs=tmp_path, seconds=120)
    assert ended.fine, ended


if __name__ == "__main__":  # of a rank
    gather_from_two()

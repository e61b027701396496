"""Runs with conf/probes/sharpness.yaml: their figures, unchanged training, and resuming."""

import contextlib
import io
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_sv.callbacks import scale_vector_figures
from lightning_sv.callbacks.sharpness import parameter_subsets
from lightning_sv.corpus import Manifest, open_split
from lightning_sv.curvature import HessianProduct, hutchinson, lanczos
from lightning_sv.nn import document_ids, next_token_loss
from lightning_sv.runs.checkpoint import load_backbone
from lightning_sv.runs.events import Run, read_run
from tests.conftest import Refused, argv, write_run_args
from tests.lit.runs import differences, drawn_charts, leaving, load, run_fit, same_curves

CONFIG = Path(__file__).parents[2] / "conf/probes/sharpness.yaml"
#: a probed run, the same run after a kill in step 3, and the output
Probed = tuple[Path, Path, str]


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    words = "--model.mask_documents true --model.optim.lr 6e-3 --data.micro_batch 2"
    return [*write_run_args(corpus, tmp_path_factory.mktemp("plain")), *argv(words)]


@pytest.fixture(scope="module")
def probed(plain: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The keys of conf/probes/sharpness.yaml, and two more probes."""
    text = CONFIG.read_text().replace("sequences: 1 ", "sequences: 3 ")
    text = text.replace("every_n_steps: 100", "every_n_steps: 5").replace("points: 9", "points: 4")
    config = tmp_path_factory.mktemp("probed") / "probes.yaml"
    config.write_text(text)
    words = ["--config", str(config)]
    for name in ("CopyingMonitor", "ResidualMonitor"):
        words += argv(
            f"--trainer.callbacks+=lightning_sv.callbacks.{name}"
            " --trainer.callbacks.points 3 --trainer.callbacks.sequences 4"
        )
    return [*plain, *words]


@pytest.fixture(scope="module")
def probed_run(probed: list[str], tmp_path_factory: pytest.TempPathFactory) -> Probed:
    folder = tmp_path_factory.mktemp("runs")
    said = io.StringIO()
    with contextlib.redirect_stderr(said), leaving(folder / "killed", 3):
        assert run_fit([*probed, "--checkpoint.every_n_steps", "3"], folder / "run") == 0
    return folder / "run", folder / "killed", said.getvalue()


def assert_figures_are_those_of_the_checkpoint(run: Run, corpus: Path) -> None:
    """By hand: three sequences spread over the validation split, a Hessian for each subset."""
    model = load_backbone(run.dir)
    split = open_split(corpus, "val", seq_len=32)
    manifest = Manifest.load(corpus)
    n = manifest.val.sequences(32)
    blocks = torch.stack([split[i] for i in (0, n // 3, 2 * n // 3)])
    documents = None
    if run.config["model"]["mask_documents"]:
        documents = document_ids(blocks[:, :-1], manifest.eot)
    subsets = parameter_subsets(model)
    loss = lambda: next_token_loss(model(blocks[:, :-1], documents), blocks[:, 1:])  # noqa: E731
    for name in ("all", "scale_input", "scale_output"):
        product = HessianProduct(loss, subsets[name])
        moments = hutchinson(product, 2)
        estimates = {
            "lambda_max": lanczos(product, 12, rtol=1e-2),
            "trace": moments.trace,
            "fro2": moments.squared_frobenius,
        }
        for key, estimate in estimates.items():
            for tag, value in ((key, estimate.value), (f"{key}_error", estimate.error)):
                tokens, values = run.curve(f"sharpness/{name}/{tag}")
                assert tokens.tolist() == [0, 128, 3 * 128, 12 * 128], (name, tag)
                assert values[-1] == pytest.approx(value, rel=2e-4, abs=2e-5), (name, tag)


def test_fit_probed_trains_as_without_and_logs_the_checkpoint(
    probed_run: Probed, plain: list[str], corpus: Path, tmp_path: Path
) -> None:
    run, _, said = probed_run
    without_probes = tmp_path / "plain"
    assert "3 held-out sequences; math attention" in said
    assert run_fit(plain, without_probes) == 0
    assert differences(load(run)["state_dict"], load(without_probes)["state_dict"]) == []
    record = read_run(run)
    without = read_run(without_probes)
    assert record.curve("train/loss").values.tolist() == without.curve("train/loss").values.tolist()
    probes = ("sharpness/", "scale_vector/", "copying/", "residual/")
    assert not any(tag.startswith(probes) for tag in without.curves)
    assert set(record.curves) >= set(without.curves)

    for tag in ("copying/second_minus_first", "residual/mean/attn/ratio"):
        assert record.curve(tag).tokens.tolist() == [4 * 128, 8 * 128, 12 * 128]
    assert_figures_are_those_of_the_checkpoint(record, corpus)
    assert (record.curve("sharpness/seconds").values > 0).all()
    for key, figure in scale_vector_figures(load_backbone(run)).items():
        logged = record.curve(f"scale_vector/{key}").values[-1]
        assert logged == pytest.approx(figure.item(), rel=1e-5, abs=1e-6), key
    charts = drawn_charts(run)
    assert charts["sharpness: trace"] == [
        f"sharpness/{subset}/trace" for subset in ("all", "scale_input", "scale_output")
    ]
    assert "scale_vector/mean/q_proj/drift_in" in charts["scale vectors: drift_in, mean"]
    without_charts = drawn_charts(without_probes)
    assert without_charts.items() <= charts.items()
    assert not any(chart.startswith(("sharpness", "scale")) for chart in without_charts)


@pytest.mark.long
def test_fit_probed_and_resumed_has_equal_figures(probed_run: Probed, probed: list[str]) -> None:
    whole, killed, _ = probed_run
    resume = argv("--checkpoint.every_n_steps 3 --ckpt_path last")
    assert run_fit([*probed, *resume], killed) == 0
    assert len(same_curves(whole, killed)["sharpness/all/lambda_max"].tokens) == 4
    assert differences(load(whole)["state_dict"], load(killed)["state_dict"]) == []


def test_fit_probe_with_an_unknown_subset_is_refused(
    plain: list[str], tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "probes.yaml").write_text(CONFIG.read_text().replace("- scale_input", "- layer2"))
    words = argv(f"--config {tmp_path / 'probes.yaml'} --run_dir {tmp_path / 'refused'}")
    assert "subset of Sharpness 'layer2'" in refused("fit", *plain, *words)
    assert not (tmp_path / "refused/config.yaml").exists()  # so the directory can be used again


@pytest.mark.long
def test_sharpness_compiled_bf16_run_uses_float32_weights(
    probed: list[str],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend is aot_eager, because Inductor takes half a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    words = "--trainer.precision bf16-mixed --model.compile block --model.mask_documents false"
    assert run_fit([*probed, *argv(words)], tmp_path / "run") == 0
    assert capsys.readouterr().err.count("sharpness: 3 held-out sequences") == 1
    assert_figures_are_those_of_the_checkpoint(read_run(tmp_path / "run"), corpus)

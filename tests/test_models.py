"""The table of docs/models.md against conf/model and the counted parameters."""

from pathlib import Path

import yaml

from lightning_sv.nn import BackboneConfig
from lightning_sv.optim import tuned_lr
from lightning_sv.plan.parameters import PAPER_FIGURES, count_parameters
from lightning_sv.scale import ScaleStrategy

ROOT = Path(__file__).parent.parent
HEAD = (
    "model", "d_model", "layers", "heads", "d_ff", "experts", "vocabulary", "sequence", "batch", "parameters",
    "activated", "peak lr", "the paper prints",
)  # fmt: skip


def row(path: Path) -> list[str]:
    """One line of the table: parameters of `llama`, the learning rate of AdamW and cos."""
    content = yaml.safe_load(path.read_text())
    config = BackboneConfig(**content["model"]["backbone"])
    counted = count_parameters(config, "llama").figures
    experts = f"{config.n_expert_active} of {config.n_expert} of {config.expert_width:,}" if config.n_expert else ""
    if config.n_expert and config.n_expert_shared:
        experts += f" + 1 of {config.ffn_width:,}"
    try:
        lr = f"{tuned_lr(config.name, 'adamw', 'cos', ScaleStrategy.parse('llama')):g}"
    except ValueError:
        lr = ""
    sizes = {f.computed: f.printed for f in PAPER_FIGURES if (f.model, f.scale) == (config.name, "llama")}
    return [
        f"`{config.name}`", f"{config.d_model:,}", str(config.n_layer), str(config.n_head),
        "" if config.n_expert else f"{config.ffn_width:,}", experts, f"{config.vocab_size:,}",
        f"{content['data']['seq_len']:,}", str(content["data"]["global_batch"]), f"{counted['total']:,}",
        f"{counted['activated']:,}" if config.n_expert else "", lr,
        ", ".join(sizes[key] for key in ("total", "activated") if key in sizes),
    ]  # fmt: skip


def test_table_of_models_page_equals_the_configs() -> None:
    text = (ROOT / "docs/models.md").read_text()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert found[0] == list(HEAD)
    made = {line[0]: line for line in map(row, sorted((ROOT / "conf/model").glob("*.yaml")))}
    assert {line[0]: line for line in found[2:]} == made
    smallest_first = [int(line[9].replace(",", "")) for line in found[2:] if line[0].startswith("`llama")]
    assert smallest_first == sorted(smallest_first)

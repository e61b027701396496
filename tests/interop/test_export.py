"""A run as a folder: what engines load, the same logits, text and end; refusals leave nothing
behind."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib import pyplot
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.__main__ import main
from lightning_sv.corpus.tokenizer import Tokenizer
from lightning_sv.errors import ConfigError, RunError
from lightning_sv.interop import foldable, to_hugging_face
from lightning_sv.interop.hf import save
from lightning_sv.interop.hf.card import model_card
from lightning_sv.interop.hf.tokenizer import fast_tokenizer
from lightning_sv.runs.checkpoint import load_backbone
from tests.conftest import GEMMA, MOE, ROOT, Answer, Refused


def no_card(kind: str, load: str) -> str:
    return ""


def test_export_plain_run_is_llama_with_same_text(
    runs: dict[str, Path], tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    said = answer("export", str(runs["plain"]), "--to", "hf", str(out))
    assert (said["kind"], said["own_code"]) == ("LlamaForCausalLM", False)
    assert said["difference"] < 1e-5
    assert not list(out.glob("*.py")) and not list(tmp_path.glob(".*"))
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert type(model) is LlamaForCausalLM and model.config.max_position_embeddings == 32
    end = tokenizer.eos_token_id
    settings = model.generation_config
    assert settings.eos_token_id == settings.pad_token_id == end  # the token at which it stops
    assert tokenizer("def f(x):\n")["input_ids"][0] == end
    words = ["--prompt", "def f", "--max_new_tokens", "9", "--temperature", "0"]
    expected = answer("generate", str(runs["plain"]), *words)["text"]
    pipe = pipeline("text-generation", model=str(out))
    (found,) = pipe("def f", max_new_tokens=9, do_sample=False)
    assert found["generated_text"] == "def f" + expected
    text = (out / "README.md").read_text()
    summary = json.loads((runs["plain"] / "summary.json").read_text())
    for words_of_card in ("hg+dp+or", f"{summary['val_loss']:.4f}", "`LlamaForCausalLM`"):
        assert words_of_card in text
    capsys.readouterr()
    for page in (text, (ROOT / "docs/export.md").read_text()):
        code = page.partition("```python\n")[2].partition("```")[0]
        exec(code.replace("path/to/this/folder", str(out)).replace('"exported"', repr(str(out))))
        assert "def " in capsys.readouterr().out


#: run without lightning_sv: load by name, compare, generate with and without the cache
ALONE = """
import sys, torch
sys.modules["lightning_sv"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, tokens, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
ids = torch.load(tokens)
text = AutoTokenizer.from_pretrained(folder)("def f", return_tensors="pt")
said = [model.generate(**text, max_new_tokens=8, do_sample=False, use_cache=cache).tolist() for cache in (True, False)]
assert said[0] == said[1], said
with torch.no_grad():
    torch.save(model(ids).logits, out)
"""


def test_export_unified_runs_without_lightning_sv(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "exported"
    assert main(["export", str(runs["own"]), "--to", "hf", str(out)]) == 0
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoConfig.from_pretrained(out, trust_remote_code=False)
    tokens = torch.randint(0, 300, (2, 20))
    torch.save(tokens, tmp_path / "tokens.pt")
    files = [str(out), str(tmp_path / "tokens.pt"), str(tmp_path / "logits.pt")]
    command = [sys.executable, "-c", ALONE, *files]
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = load_backbone(str(runs["own"] / "checkpoints/last.ckpt"))(tokens)
    found = torch.load(tmp_path / "logits.pt")
    assert float((found - expected).norm()) <= save.TOLERANCE * float(expected.norm())


def test_export_refused_nothing_written(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    used = tmp_path / "used"
    plain = str(runs["plain"])
    used.mkdir()
    (used / "mine.txt").write_text("mine")
    assert "used is not empty" in refused("export", plain, str(used))
    assert [path.name for path in used.iterdir()] == ["mine.txt"]
    new = str(tmp_path / "new")
    monkeypatch.chdir(used)
    assert "is the current directory" in refused("export", plain, ".")
    assert "is not a folder" in refused("export", str(tmp_path / "no"), new)
    assert "--to" in refused("export", plain, "--to", "gguf", new)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "make install-hf, or pip install 'transformers>=5'" in refused("export", plain, new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]


def test_checked_difference_of_other_logits_refused(config: BackboneConfig) -> None:
    model = Backbone(config)
    theirs: Any = to_hugging_face(model)
    theirs.model.norm.weight.data[0] += 0.1
    with pytest.raises(ConfigError, match="logits of LlamaForCausalLM"):
        save.checked_difference(model, theirs, 16)


@pytest.mark.parametrize("sizes", [{}, GEMMA, MOE | {"n_expert_shared": 0, "qk_norm": True}])
def test_export_folder_has_version_4_keys(
    sizes: dict[str, Any], config: BackboneConfig, corpus: Path, tmp_path: Path
) -> None:
    """Without the keys version 4 takes its defaults in silence; `make test-hf4` runs it."""
    model = Backbone(replace(config, **sizes, vocab_size=300, rope_theta=5e5))
    save.export(model, Tokenizer.load(corpus), tmp_path / "command", context=16, card=no_card)
    to_hugging_face(model).save_pretrained(tmp_path / "function")
    for folder in ("command", "function"):
        written = json.loads((tmp_path / folder / "config.json").read_text())
        assert written["rope_theta"] == 5e5 and written.get("num_experts") == sizes.get("n_expert")
        assert written.get("rope_local_base_freq") == (5e5 if sizes is GEMMA else None)
    tokenizer = json.loads((tmp_path / "command/tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_export_full_disk_leaves_nothing(
    config: BackboneConfig, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **named: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(RunError, match=str(tmp_path / "out")):
        model = Backbone(replace(config, vocab_size=300))
        save.export(model, Tokenizer.load(corpus), tmp_path / "out", context=16, card=no_card)
    assert not list(tmp_path.iterdir())


def test_fast_tokenizer_any_text_same_ids(tmp_path: Path) -> None:
    """Also if the name of the end-of-text token has spaces, and if merges are dropped."""
    text = Path(os.__file__).read_text()
    settings = json.loads(Tokenizer.train([text], 400).content)
    settings["model"]["dropout"] = 0.5
    end = "<|end of a text|>"
    raw = json.dumps(settings).replace("<|endoftext|>", end)
    tokenizer = Tokenizer(raw.encode(), "changed", end)
    fast_tokenizer(tokenizer, 64).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for words in (text[:4000], "", " the  thing\n\n\n it's 12 345", "naïve 你好 🙂\t\r\n"):
        ids = theirs(words)["input_ids"]
        assert ids == [tokenizer.eot, *tokenizer.encode(words)]
        assert theirs.decode(ids, skip_special_tokens=True) == words
    assert fast_tokenizer(tokenizer, 64, masked=True)(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.model_max_length == 64
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eot


@pytest.fixture
def masked(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A run whose documents do not attend to those before them."""
    run = shutil.copytree(runs["plain"], tmp_path / "masked")
    config = (run / "config.yaml").read_text()
    changed = config.replace("mask_documents: false", "mask_documents: true")
    (run / "config.yaml").write_text(changed)
    return run


def test_export_of_a_checkpoint_of_masked_documents_claims_what_is_known(
    masked: Path, tmp_path: Path
) -> None:
    """No end of a text before a prompt; no folders, which name a user; no results, which are those
    of the last checkpoint."""
    config = yaml.safe_load((masked / "config.yaml").read_text())
    config["model"]["init_from"] = "/home/ann/runs/start"
    (masked / "config.yaml").write_text(yaml.safe_dump(config))
    earlier = (masked / "checkpoints/last.ckpt").rename(masked / "checkpoints/step-2.ckpt")
    out = tmp_path / "out"
    assert main(["export", str(earlier), str(out)]) == 0
    expected = Tokenizer.load(masked).encode("def f")
    assert AutoTokenizer.from_pretrained(out)("def f")["input_ids"] == expected
    card = (out / "README.md").read_text()
    assert "attends to one text only" in card
    assert "| initialized from | start |" in card and "| text | files:" in card
    assert "/home" not in card and sysconfig.get_path("stdlib") not in card
    assert "| checkpoint | step-2.ckpt |" in card and "| seed |" in card
    assert "validation loss" not in card and "training tokens" not in card


def test_export_ragged_experts_load_as_card_says(
    tmp_path: Path, config: BackboneConfig, corpus: Path
) -> None:
    """A width of 21: their grouped product refuses it, and a config.json does not keep which
    product to use."""
    model = Backbone(replace(config, n_expert=6, n_expert_active=2, vocab_size=300), "hg+dp")
    hostile = "a|{kind}\n<b>[x](y)"
    made = partial(model_card, f"mixture {hostile}", "a`b", {"text": hostile}, foldable(model))
    done = save.export(model, Tokenizer.load(corpus), tmp_path / "out", context=16, card=made)
    assert done.kind == "Qwen2MoeForCausalLM" and done.difference < 1e-5
    card = (tmp_path / "out/README.md").read_text()
    assert 'from_pretrained("path/to/this/folder", experts_implementation="eager")' in card
    escaped = "a\\|{kind} &lt;b&gt;\\[x\\](y)"
    # neither Markdown nor a placeholder
    assert f"# mixture {escaped}\n" in card and f"| text | {escaped} |" in card
    assert "ends with `` a`b ``," in card


EXAMPLES = ROOT / "examples"


def test_example_export_and_generate_same_text_of_masked_documents(
    masked: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["export_and_generate.py", str(masked), str(tmp_path / "out"), "--tokens", "9"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(EXAMPLES / words[0]), run_name="__main__")
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM" in printed and "the run says the same" in printed


def code_cells(notebook: str) -> list[dict[str, Any]]:
    cells = json.loads((EXAMPLES / notebook).read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_notebook_look_at_a_run_draws(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells in order, as a kernel runs them. The generated text is not stored, because it may
    repeat the corpus."""
    monkeypatch.setenv("RUN", str(runs["own"]))
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    code = code_cells("look_at_a_run.ipynb")
    assert len(code) > 3 and not code[-1]["outputs"]
    assert json.dumps(code).count('"image/png"') == 3
    seen: dict[str, Any] = {}
    pyplot.switch_backend("agg")
    for cell in code:
        exec("".join(cell["source"]), seen)
        if "plt.xlabel" in "".join(cell["source"]):
            axes = pyplot.gca()
            assert len(axes.lines) >= 2 and axes.get_xlabel()
            pyplot.close()
    assert seen["run"].label == "hg+dnp+or+iwd" and seen["text"]
    sides = {key.rpartition(".")[2] for key in seen["vectors"]}
    assert {"q_proj in", "q_proj out", "lm_head out"} <= sides


def test_notebook_strategy_on_transformers_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of its steps; the stored outputs are those of all."""
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    code = code_cells("strategy_on_transformers.ipynb")
    assert all(cell["outputs"] for cell in code[1:])
    seen: dict[str, Any] = {}
    pyplot.switch_backend("agg")
    for cell in code:
        exec("".join(cell["source"]).replace("60 * 16", "3 * 16"), seen)
    pyplot.close("all")
    assert len(seen["vectors"]) == 10 and len(seen["losses"]) == 3
    assert torch.equal(seen["folded"], seen["trained"])
    assert type(seen["plain"]) is LlamaForCausalLM

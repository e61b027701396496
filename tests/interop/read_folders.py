"""`python read_folders.py ROOT TEXT`: what transformers and CTranslate2 make of ROOT's folders, as
JSON.

It runs in the environment of `make test-hf4`, which has neither lightning_sv nor its other
requirements.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
import transformers


def off(found: torch.Tensor, folder: Path) -> float:
    """||found - expected|| / ||expected|| of the logits of `tokens.pt`."""
    expected = torch.load(folder / "logits.pt")
    return float((found.float() - expected).norm() / expected.norm())


def by_transformers(folder: Path) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        difference = off(model(torch.load(folder / "tokens.pt")).logits, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    greedy = pipe("def f", max_new_tokens=4, min_new_tokens=4, do_sample=False)[0]["generated_text"]
    generated = model.generate(
        **tokenizer("def f", return_tensors="pt"), max_new_tokens=4, min_new_tokens=4
    )
    return {
        "class": type(model).__name__,
        "difference": difference,
        "ids": tokenizer(sys.argv[2])["input_ids"],
        "continues": tokenizer.decode(generated[0], skip_special_tokens=True) == greedy != "def f",
    }


def by_ctranslate2(folder: Path) -> dict[str, Any]:
    made = folder / "ctranslate2"
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(made))
    generator = ctranslate2.Generator(
        str(made), device="cpu", compute_type="float32", intra_threads=1
    )
    logits = generator.forward_batch(torch.load(folder / "tokens.pt").tolist())
    return {"difference": off(torch.from_numpy(np.array(logits)), folder)}


def tried(reader: Any, folder: Path) -> dict[str, Any]:
    try:
        return reader(folder)
    except Exception as error:  # some tests expect it
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    found = {
        folder.name: {
            "transformers": tried(by_transformers, folder),
            "ctranslate2": tried(by_ctranslate2, folder),
        }
        for folder in sorted(Path(sys.argv[1]).iterdir())
    }
    print(json.dumps({"version": transformers.__version__, "folders": found}))

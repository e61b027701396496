"""Export a trained run to transformers, load it there, and continue a text with both.

    make train MODEL=tiny SCALE=hg+dp+or
    python examples/export_and_generate.py runs/tiny/hg+dp+or-seed0 exported

Needs transformers, no download. A strategy with `dnp` is exported with custom code, which is loaded
too: it belongs to this project.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_sv.__main__ import main as lightning_sv
from lightning_sv.lit.generate import Sampling, generate
from lightning_sv.runs.checkpoint import load_trained
from lightning_sv.runs.events import read_run


def ours(run: Path, prompt: str, tokens: int) -> str:
    """Continue the prompt with the run, taking the most likely token."""
    model, tokenizer = load_trained(run)
    greedy = Sampling(tokens, temperature=0)
    trained = read_run(run, complete=False)
    return generate(
        model,
        tokenizer,
        prompt,
        greedy,
        context=trained.seq_len,
        mask_documents=trained.mask_documents,
    )


def theirs(folder: Path, prompt: str, tokens: int) -> str:
    """Continue the prompt with transformers, from the exported folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    has_code = any(folder.glob("*.py"))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=has_code)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    n_prompt = inputs["input_ids"].shape[1]
    return tokenizer.decode(output[0, n_prompt:], skip_special_tokens=True)


def main() -> None:
    """Export, generate twice, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="A run's directory.")
    parser.add_argument("out", type=Path, help="Output folder; new or empty.")
    parser.add_argument("--prompt", default="def ", help="Text to continue. (default: %(default)r)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=24,
        help="Maximum number of tokens, within the context. (default: %(default)s)",
    )
    options = parser.parse_args()
    if lightning_sv(["export", str(options.run), "--to", "hf", str(options.out)]):
        raise SystemExit(1)  # it has printed the reason
    found = theirs(options.out, options.prompt, options.tokens)
    expected = ours(options.run, options.prompt, options.tokens)
    print(f"transformers: {options.prompt}{found}")
    if found == expected:
        print("the run says the same")
    else:
        print(f"the run:      {options.prompt}{expected}")


if __name__ == "__main__":
    main()

"""`lightning-sv generate`: continue a prompt with a trained model."""

from pathlib import Path

from lightning_sv.json_text import json_text
from lightning_sv.lit.generate import Sampling, generate
from lightning_sv.runs.checkpoint import load_trained
from lightning_sv.runs.directory import run_of
from lightning_sv.runs.events import read_run
from lightning_sv.settings.plain_parser import PlainParser, number


def run(argv: list[str]) -> int:
    """Parse the arguments, sample, print the text; return the exit code."""
    parser = PlainParser(
        "generate", "Continue a prompt.", json="Print prompt and continuation as JSON."
    )
    parser.add_argument("run", type=Path, help="Run directory, or a checkpoint in one.")
    parser.add_argument(
        "--prompt", default="", help="Text to continue; empty for the start of a document."
    )
    tokens = number(int, 1, 1_000_000)
    parser.add_argument(
        "--max_new_tokens", type=tokens, default=120, help="Maximum number of tokens."
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 selects the most likely token."
    )
    parser.add_argument(
        "--top_k", type=number(int, 1, 10**9), default=50, help="Number of candidate tokens."
    )
    parser.add_argument(
        "--seed", type=number(int, 0, 2**32 - 1), default=0, help="Random seed, by default 0."
    )
    parser.add_trust("the run")
    options = parser.parse_args(argv)
    trained = read_run(run_of(options.run) or options.run, complete=False)
    model, tokenizer = load_trained(options.run, options.trust_module)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_k, options.seed)
    text = generate(
        model,
        tokenizer,
        options.prompt,
        sampling,
        context=trained.seq_len,
        mask_documents=trained.mask_documents,
    )
    print(
        json_text({"prompt": options.prompt, "text": text}, indent=None)
        if options.json
        else options.prompt + text
    )
    return 0

"""`lightning-sv generate`: continue a prompt with a trained model."""

import json
from pathlib import Path

from lightning_sv.lit.generate import generate
from lightning_sv.runs.checkpoint import load_trained
from lightning_sv.runs.events import read_run
from lightning_sv.settings.plain_parser import PlainParser


def run(argv: list[str]) -> int:
    """Parse the arguments of `generate`, sample, print the text; return the exit code."""
    parser = PlainParser(prog="lightning-sv generate", description="Continue a prompt.")
    parser.add_argument("run", type=Path, help="A run directory.")
    parser.add_argument("--prompt", default="", help="Text to continue; empty starts a document.")
    parser.add_argument("--tokens", type=int, default=120, help="Tokens to sample at most.")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token.")
    parser.add_argument("--top_k", type=int, default=50, help="Sample among this many tokens.")
    parser.add_argument("--seed", type=int, default=0, help="Of the sampling.")
    parser.add_argument("--allow", nargs="+", default=[], metavar="MODULE", help="Modules its strategy may import.")
    parser.add_argument("--json", action="store_true", help="Print prompt and continuation as JSON.")
    options = parser.parse_args(argv)
    trained = read_run(options.run, complete=False)
    model, tokenizer = load_trained(options.run, options.allow)
    ids = [tokenizer.eot, *tokenizer.encode(options.prompt)]
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "seed": options.seed}
    out = generate(model, ids, options.tokens, context=trained.seq_len, eot=tokenizer.eot, **sampling)
    text = tokenizer.decode(out)
    print(json.dumps({"prompt": options.prompt, "text": text}) if options.json else options.prompt + text)
    return 0

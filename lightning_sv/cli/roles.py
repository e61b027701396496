"""`lightning-sv roles`: roles of the parameters of a transformers model."""

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import cast, get_args

from lightning_sv.errors import expect
from lightning_sv.json_text import json_text
from lightning_sv.own_code import find
from lightning_sv.roles import MODEL_ROLES, ModelParameter, ModelRole, Roles, family, weight_decay_roles
from lightning_sv.roles.fake import model_from_config
from lightning_sv.roles.types import Pattern
from lightning_sv.runs.directory import printable
from lightning_sv.scale.strategy import DECAYS
from lightning_sv.settings.plain_parser import PlainParser

_LEGEND = """n: number of tensors. folds: whether matrices can absorb the vector.
to: the value that decay approaches. {policy}: whether it decays under {policy}."""


def run(argv: list[str]) -> int:
    """Parse the arguments, trace the model on fake tensors, print the roles; return the exit code."""
    text = "The role of every parameter of a transformers model, without its weights, and patterns for optimizers."
    parser = PlainParser("roles", text, json="Print roles and patterns as JSON.")
    parser.add_argument("model", type=Path, help="Folder of a model, or its config.json.")
    decay = f"Decay policy of scale vectors: {' '.join(DECAYS)}, or package.module:Name."
    parser.add_argument("--policy", default="iwd", help=decay)
    role = "Set the role of a parameter; repeatable."
    parser.add_argument("--role", action="append", default=[], metavar="NAME=ROLE", help=role)
    parser.add_argument("--trust_remote_code", action="store_true", help="Run modelling code in the model's folder.")
    options = parser.parse_args(argv)
    find(DECAYS, options.policy, "--policy")
    model = model_from_config(options.model, trust_remote_code=options.trust_remote_code)
    roles = weight_decay_roles(model, known=dict(_known(word) for word in options.role))
    regex, glob = (roles.patterns(kind, options.policy) for kind in ("regex", "glob"))  # type: ignore[arg-type]
    if options.json:
        found = {
            "policy": options.policy,
            "parameters": [asdict(p) | {"decays": p.decays(options.policy)} for p in roles.parameters],
            "undecayed": {"regex": regex, "glob": glob},
        }
        print(json_text(found))
        return 0
    print_roles(type(model).__name__, roles, options.policy)
    print_patterns(roles, options.policy)
    return 0


def _known(word: str) -> tuple[str, ModelRole]:
    name, _, role = word.partition("=")
    expect(role in MODEL_ROLES, "--role", word, f"NAME=ROLE with a role of {' '.join(MODEL_ROLES)}.")
    return name, cast(ModelRole, role)


def print_roles(name: str, roles: Roles, policy: str) -> None:
    """Print one row per kind of parameter, for all layers together, below its module."""
    same: dict[tuple[object, ...], list[ModelParameter]] = defaultdict(list)
    for p in roles.parameters:
        same[(family(p.name), p.shape, p.role, p.redundant, p.decays_to)].append(p)
    modules: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for parameters in same.values():
        p = parameters[0]
        words = family(p.name).split(".")
        folds = "" if p.redundant is None else "yes" if p.redundant else "no"
        to = "" if p.decays_to is None else f"{p.decays_to:g}"
        shape, decays = "x".join(map(str, p.shape)), "yes" if p.decays(policy) else "no"
        module = ".".join(words[:-2])
        indented = ("  " if module else "") + ".".join(words[-2:])
        modules[module].append((indented, f"{len(parameters)}", shape, p.role, folds, to, decays))
    heading = ("parameter", "n", "shape", "role", "folds", "to", policy)
    rows = [heading, *(row for some in modules.values() for row in some)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heading))]

    def line(row: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    body = [text for module, some in modules.items() for text in (*([module] if module else []), *map(line, some))]
    total = sum(p.size for p in roles.parameters)
    lines = [f"{name}, {total:,} parameters", "", line(heading), *body, "", _LEGEND.format(policy=policy), ""]
    print(printable("\n".join(lines)))


def print_patterns(roles: Roles, policy: str) -> None:
    """Print patterns that match exactly the parameters that do not decay."""
    if not roles.undecayed(policy):
        print(f"Under {policy} all parameters decay, so no pattern is needed.")
        return
    for kind in get_args(Pattern):
        print(f"Not to decay under {policy}, as {kind}:")
        for pattern in roles.patterns(kind, policy):
            print(printable(f"  {pattern}"))

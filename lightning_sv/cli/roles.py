"""`lightning-sv roles`: what each parameter of a transformers model is, and who decays it today."""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_sv.interop.frameworks import Today, today
from lightning_sv.roles import MODEL_ROLES, ModelParameter, ModelRole, Roles, family, weight_decay_roles
from lightning_sv.roles.from_config import model_from_config
from lightning_sv.scale.strategy import DECAYS
from lightning_sv.settings.plain_parser import PlainParser


def run(argv: list[str]) -> int:
    """Parse the arguments of `roles`, trace the model on fake tensors, show what was found."""
    parser = PlainParser(
        prog="lightning-sv roles",
        description="The role of every parameter of a transformers model, from its configuration alone: one forward "
        "pass without weights or memory. With patterns for optimizers, and what frameworks decay today.",
    )
    parser.add_argument("model", type=Path, help="A model's directory, or its config.json.")
    parser.add_argument("--policy", choices=list(DECAYS), default="iwd", help="Which scale vectors are to decay.")
    parser.add_argument(
        "--known", action="append", default=[], metavar="NAME=ROLE", help="A role that you know yourself; repeatable."
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="Run modelling code that lies beside it.")
    parser.add_argument("--json", action="store_true", help="Print everything as JSON.")
    options = parser.parse_args(argv)
    model = model_from_config(options.model, trust_remote_code=options.trust_remote_code)
    roles = weight_decay_roles(model, known=dict(_known(word) for word in options.known))
    frameworks = today(model, roles)
    regex, glob = (roles.patterns(kind, options.policy) for kind in ("regex", "glob"))  # type: ignore[arg-type]
    if options.json:
        found = {
            "policy": options.policy,
            "parameters": [asdict(p) | {"decays": p.decays(options.policy)} for p in roles.parameters],
            "undecayed": {"regex": regex, "glob": glob},
            "frameworks": [asdict(row) for row in frameworks],
        }
        print(json.dumps(found, indent=2))
        return 0
    console = Console()
    console.print(_roles_table(type(model).__name__, roles, options.policy))
    console.print(_frameworks_table(frameworks))
    if not regex:
        console.print(f"Under {options.policy} everything decays: no pattern is needed.")
    for name, patterns in (("regex", regex), ("glob", glob)):
        if patterns:
            console.print(f"Not to decay under {options.policy}, as {name}:")
            for pattern in patterns:
                print(f"  {pattern}")
    return 0


def _known(word: str) -> tuple[str, ModelRole]:
    name, _, text = word.partition("=")
    for role in MODEL_ROLES:
        if role == text:
            return name, role
    raise ValueError(f"--known {word}: write NAME=ROLE; roles: {' '.join(MODEL_ROLES)}")


def _roles_table(name: str, roles: Roles, policy: str) -> Table:
    """One line for the parameters of all layers that differ in numbers alone."""
    lines: dict[tuple[object, ...], list[ModelParameter]] = defaultdict(list)
    for p in roles.parameters:
        lines[(family(p.name), p.shape, p.role, p.redundant, p.decays_to)].append(p)
    total = sum(p.size for p in roles.parameters)
    table = Table(title=escape(f"{name}, {total:,} parameters"), title_justify="left")
    for column in ("parameter", "tensors", "shape", "role", "folds", "decay pulls to", f"decays ({policy})"):
        table.add_column(column, justify="right" if column == "tensors" else "left", overflow="fold")
    for (path, shape, *_), same in lines.items():
        p = same[0]
        folds = "" if p.redundant is None else "yes" if p.redundant else "no"
        to = "" if p.decays_to is None else f"{p.decays_to:g}"
        size = "x".join(map(str, shape))  # type: ignore[call-overload]
        table.add_row(escape(str(path)), f"{len(same)}", size, p.role, folds, to, "yes" if p.decays(policy) else "no")
    return table


def _frameworks_table(frameworks: list[Today]) -> Table:
    table = Table(title="What decays today", title_justify="left")
    for column in ("framework", "what it decays", "input vectors", "output vectors", "in our words"):
        table.add_column(column)
    for row in frameworks:
        counts = (f"{some} of {total}" for some, total in (row.input, row.output))
        table.add_row(row.framework, row.rule, *counts, row.policy)
    return table

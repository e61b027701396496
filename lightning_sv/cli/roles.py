"""`lightning-sv roles`: roles of the parameters of a transformers model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from lightning_sv.errors import expect
from lightning_sv.json_text import json_text
from lightning_sv.own_code import find
from lightning_sv.roles import MODEL_ROLES, ModelRole, Roles, weight_decay_roles
from lightning_sv.roles.fake import model_from_config, transformers
from lightning_sv.roles.table import parameter_table
from lightning_sv.runs.directory import printable
from lightning_sv.scale.strategy import DECAYS
from lightning_sv.settings.plain_parser import PlainParser


def run(argv: list[str]) -> int:
    """Parse the arguments, trace the model, print the roles; return the exit code."""
    text = "The role of every parameter of a transformers model, and patterns for optimizers."
    parser = PlainParser("roles", text, json="Print roles and patterns as JSON.")
    parser.add_argument("model", type=Path, help="Folder of a model, or its config.json.")
    decay = f"Decay policy of scale vectors: {' '.join(DECAYS)}, or package.module:Name."
    parser.add_argument("--policy", default="iwd", help=decay)
    role = "Set the role of a parameter; repeatable."
    parser.add_argument("--role", action="append", default=[], metavar="NAME=ROLE", help=role)
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="Run modelling code in the model's folder."
    )
    options = parser.parse_args(argv)
    find(DECAYS, options.policy, "--policy")
    transformers().logging.set_verbosity_error()  # missing kernels do not matter for a trace
    model = model_from_config(options.model, trust_remote_code=options.trust_remote_code)
    roles = weight_decay_roles(model, known=dict(_known(word) for word in options.role))
    if options.json:
        print(json_text(_as_json(roles, options.policy)))
        return 0
    print_roles(type(model).__name__, roles, options.policy)
    print_patterns(roles, options.policy)
    return 0


def _as_json(roles: Roles, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "parameters": [asdict(p) | {"decays": p.decays(policy)} for p in roles.parameters],
        "undecayed": roles.patterns(policy),
    }


def _known(word: str) -> tuple[str, ModelRole]:
    name, _, role = word.partition("=")
    expect(
        role in MODEL_ROLES, "--role", word, f"NAME=ROLE with a role of {' '.join(MODEL_ROLES)}."
    )
    return name, cast(ModelRole, role)


def print_roles(name: str, roles: Roles, policy: str) -> None:
    """Print one row per kind of parameter, for all layers together, below its module."""
    total = sum(p.size for p in roles.parameters)
    table = parameter_table(roles.parameters, policy)
    print(printable(f"{name}, {total:,} parameters\n\n{table}\n"))


def print_patterns(roles: Roles, policy: str) -> None:
    """Print patterns that match exactly the parameters that do not decay."""
    if not roles.undecayed(policy):
        print(f"Under {policy} all parameters decay, so no pattern is needed.")
        return
    print(f"Not to decay under {policy}:")
    for pattern in roles.patterns(policy):
        print(printable(f"  {pattern}"))

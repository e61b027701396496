"""Number of parameters by role, compared with the paper."""

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_sv.nn import Backbone, BackboneConfig, activated_parameters, meta_backbone
from lightning_sv.optim import OptimConfig, configured_groups, role_groups
from lightning_sv.optim.groups import PARAMETER_ROLES, SCALE_ROLES, parameter_roles
from lightning_sv.scale import ScaleOptions, ScaleStrategy, expand_preset


@dataclass(frozen=True)
class PaperNumber:
    """A printed number of the paper about a model's size, a row of paper_numbers.csv.

    Attributes:
        computed: key of `ParameterCount.numbers`
        comment: our comment
    """

    model: str
    scale: str
    what: str
    printed: str
    computed: str
    comment: str


_CSV = Path(__file__).with_name("paper_numbers.csv").read_text(encoding="utf-8")
PAPER_NUMBERS = tuple(PaperNumber(**row) for row in csv.DictReader(_CSV.splitlines()))


class RoleCount(NamedTuple):
    """Number of tensors and parameters of a role, and whether it decays."""

    role: str
    tensors: int
    parameters: int
    decays: bool


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters by role, for one model and strategy.

    Attributes:
        model: name of the model
        scale: strategy and options
        canonical: the simplest strategy that builds the same model
        roles: a row per role, in the order of the groups
        baseline: parameters of the same model under `llama`
        activated: parameters used per token; fewer than all with sparse experts
    """

    model: str
    scale: str
    canonical: str
    roles: tuple[RoleCount, ...]
    baseline: int
    activated: int

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return sum(row.parameters for row in self.roles)

    @property
    def scale_count(self) -> int:
        """Number of parameters of scale vectors."""
        return sum(row.parameters for row in self.roles if row.role in SCALE_ROLES)

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers for the comparison with the paper."""
        return {
            "total": self.total,
            "activated": self.activated,
            "scale": self.scale_count,
            "scale_share": self.scale_count / self.total,
            "increase": (self.total - self.baseline) / self.baseline,
        }

    def paper(self) -> list[PaperNumber]:
        """Return the paper's numbers for this model and strategy."""
        return [n for n in PAPER_NUMBERS if (n.model, n.scale) == (self.model, self.scale)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        roles = {}
        for row in self.roles:
            counts = row._asdict()
            roles[counts.pop("role")] = counts
        paper = []
        for number in self.paper():
            paper.append(
                {
                    "what": number.what,
                    "printed": number.printed,
                    "computed": self.numbers[number.computed],
                    "comment": number.comment,
                }
            )
        return {
            "model": self.model,
            "scale": self.scale,
            "meaning": self.canonical,
            "total": self.total,
            "activated": self.activated,
            "roles": roles,
            "scale_vectors": self.scale_count,
            "scale_share": self.numbers["scale_share"],
            "baseline_total": self.baseline,
            "increase": self.numbers["increase"],
            "paper": paper,
        }

    def print(self, console: Console) -> None:
        """Print the table and the paper's numbers."""
        console.print(self._table())
        share = 100 * self.numbers["scale_share"]
        increase = 100 * self.numbers["increase"]
        console.print(
            f"scale vectors: {self.scale_count:,}, {share:.3g}% of the model; "
            f"{self.total - self.baseline:+,} parameters against llama ({increase:+.3g}%)."
        )
        for number in self.paper():
            value = self.numbers[number.computed]
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
            comment = f" ({number.comment})" if number.comment else ""
            console.print(f"paper, {number.what}: {number.printed}; here {shown}{comment}.")

    def _table(self) -> Table:
        title = escape(f"{self.model}, {self.scale}")
        tensors = Column("tensors", justify="right")
        parameters = Column("parameters", justify="right")
        table = Table("role", tensors, parameters, "decays", title=title, title_justify="left")
        for row in self.roles:
            name = f"{row.role} scale" if row.role in SCALE_ROLES else row.role
            decays = "yes" if row.decays else "no"
            table.add_row(name, f"{row.tensors:,}", f"{row.parameters:,}", decays)
        table.add_section()
        n_tensors = sum(row.tensors for row in self.roles)
        table.add_row("total", f"{n_tensors:,}", f"{self.total:,}", "")
        if self.activated != self.total:
            table.add_row("activated per token", "", f"{self.activated:,}", "")
        return table


def count_parameters(
    config: BackboneConfig,
    scale: str | ScaleStrategy,
    options: ScaleOptions | None = None,
    optim: OptimConfig | None = None,
) -> ParameterCount:
    """Count the parameters of a model on the meta device; `optim` has the roles that decay.

    Raises:
        ConfigError: `optim` does not fit the roles of the model
    """
    strategy, scale_options = expand_preset(scale, options or ScaleOptions())
    model = meta_backbone(config, strategy, scale_options)
    return ParameterCount(
        model=config.name,
        scale=f"{model.strategy}{scale_options.label()}",
        canonical=str(model.canonical),
        roles=_role_counts(model, optim or OptimConfig()),
        baseline=sum(p.numel() for p in meta_backbone(config).parameters()),
        activated=activated_parameters(model, config),
    )


def _role_counts(model: Backbone, optim: OptimConfig) -> tuple[RoleCount, ...]:
    """Return a row per role that the model has, in the order of the groups."""
    groups = role_groups(model, model.strategy.decayed_roles)
    decayed = set()
    for group in configured_groups(groups, optim, lr=1.0):
        if group.options("", optim.weight_decay)["weight_decay"]:
            decayed.add(group.role)

    tensors = Counter[str]()
    parameters = Counter[str]()
    for named in parameter_roles(model):  # including frozen parameters
        tensors[named.role] += 1
        parameters[named.role] += named.parameter.numel()
    return tuple(
        RoleCount(role, tensors[role], parameters[role], role in decayed)
        for role in sorted(tensors, key=PARAMETER_ROLES.index)
    )

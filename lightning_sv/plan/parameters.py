"""Number of parameters by role, compared with the paper."""

from dataclasses import dataclass
from itertools import starmap
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_sv.nn import BackboneConfig, activated_parameters, meta_backbone
from lightning_sv.optim import OptimConfig, configured_groups, role_groups
from lightning_sv.optim.groups import PARAMETER_ROLES, SCALE_ROLES, parameter_roles
from lightning_sv.scale import ScaleOptions, ScaleStrategy, expand_preset


@dataclass(frozen=True)
class PaperNumber:
    """A printed number of the paper about a model's size, and our comment."""

    model: str
    scale: str
    what: str
    printed: str
    computed: str  # key of `ParameterCount.numbers`
    comment: str = ""


PAPER_NUMBERS = tuple(starmap(PaperNumber, (
    ("llama-0.12b", "llama", "size (Table 4; Section 4.4)", "0.11974B", "total"),
    ("llama-0.12b-large", "llama", "size (Section 4.4)", "0.11985B", "total", "d_ff + 8"),
    ("llama-0.12b", "hg+dnp+or+iwd", "size (Section 4.4)", "0.11985B", "total",
     "fits only with full-width scale_out on every branch, lm_head included"),
    ("llama-0.25b", "llama", "size (Table 4)", "0.25B", "total"),
    ("llama-0.5b", "llama", "size (Table 4)", "0.48B", "total"),
    ("llama-0.75b", "llama", "size (Table 4)", "0.75B", "total"),
    ("llama-1b", "llama", "size (Section 2.1)", "1,028,065,024", "total"),
    ("llama-1b", "llama", "scale vectors (Section 2.1)", "80,640", "scale"),
    ("llama-1b", "llama", "their share (Section 2.1)", "7.84e-05", "scale_share"),
    ("llama-1b", "hg+dnp+or+iwd", "increase over llama (Section 4.4)", "7.85e-05", "increase",
     "discrepancy: `or` on the norms of llama gives the printed number: (2L + 1)(d + 1) / N"),
    ("moe-0.25b", "llama", "size (Table 5)", "0.25B", "total"),
    ("moe-0.25b", "llama", "activated size (Table 5)", "0.11B", "activated"),
    ("moe-0.5b", "llama", "size (Table 5)", "0.48B", "total",
     "with d_model 768; the table prints 748, which 12 heads do not divide"),
    ("moe-0.5b", "llama", "activated size (Table 5)", "0.18B", "activated"),
    ("moe-0.8b", "llama", "size (Table 5)", "0.80B", "total"),
    ("moe-0.8b", "llama", "activated size (Table 5)", "0.28B", "activated"),
    ("moe-1b", "llama", "size (Table 5)", "1.06B", "total"),
    ("moe-1b", "llama", "activated size (Table 5)", "0.38B", "activated",
     "discrepancy: 0.355B with 4 active experts, as in the other rows; 5 would give 0.38B"),
    ("moe-2b", "llama", "size (Table 5)", "2.00B", "total"),
    ("moe-2b", "llama", "activated size (Table 5)", "0.62B", "activated"),
)))  # fmt: skip


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters by role, for one model and strategy.

    Attributes:
        model: name of the model
        scale: strategy and options
        canonical: the simplest strategy that builds the same model
        roles: (role, tensors, parameters, whether it decays), in the order of the groups
        baseline: parameters of the same model under `llama`
        activated: parameters used per token; fewer than all with sparse experts
    """

    model: str
    scale: str
    canonical: str
    roles: tuple[tuple[str, int, int, bool], ...]
    baseline: int
    activated: int

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return sum(count for _, _, count, _ in self.roles)

    @property
    def scale_count(self) -> int:
        """Number of parameters of scale vectors."""
        return sum(count for role, _, count, _ in self.roles if role in SCALE_ROLES)

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
        return {
            "model": self.model,
            "scale": self.scale,
            "meaning": self.canonical,
            "total": self.total,
            "activated": self.activated,
            "roles": {
                role: {"tensors": tensors, "parameters": count, "decays": decays}
                for role, tensors, count, decays in self.roles
            },
            "scale_vectors": self.scale_count,
            "scale_share": self.numbers["scale_share"],
            "baseline_total": self.baseline,
            "increase": self.numbers["increase"],
            "paper": [
                {"what": n.what, "printed": n.printed, "computed": self.numbers[n.computed], "comment": n.comment}
                for n in self.paper()
            ],
        }

    def print(self, console: Console) -> None:
        """Print the table and the paper's numbers."""
        columns = (Column(name, justify="right") for name in ("tensors", "parameters"))
        table = Table("role", *columns, "decays", title=escape(f"{self.model}, {self.scale}"), title_justify="left")
        for role, tensors, count, decays in self.roles:
            name = f"{role} scale" if role in SCALE_ROLES else role
            table.add_row(name, f"{tensors:,}", f"{count:,}", "yes" if decays else "no")
        table.add_section()
        table.add_row("total", f"{sum(r[1] for r in self.roles):,}", f"{self.total:,}", "")
        if self.activated != self.total:
            table.add_row("activated per token", "", f"{self.activated:,}", "")
        console.print(table)
        console.print(
            f"scale vectors: {self.scale_count:,}, {100 * self.numbers['scale_share']:.3g}% of the model; "
            f"{self.total - self.baseline:+,} parameters against llama ({100 * self.numbers['increase']:+.3g}%)."
        )
        for number in self.paper():
            value = self.numbers[number.computed]
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
            comment = f" ({number.comment})" if number.comment else ""
            console.print(f"paper, {number.what}: {number.printed}; here {shown}{comment}.")


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
    scale, options = expand_preset(scale, options or ScaleOptions())
    model, optim = meta_backbone(config, scale, options), optim or OptimConfig()
    groups = configured_groups(role_groups(model, model.strategy.decayed_roles), optim, lr=1.0)
    decayed = {group.role for group in groups if group.options("", optim.weight_decay)["weight_decay"]}
    sizes: dict[str, list[int]] = {}
    for named in parameter_roles(model):  # including frozen parameters
        sizes.setdefault(named.role, []).append(named.parameter.numel())
    label = f"{model.strategy}{options.label()}"
    present = [role for role in PARAMETER_ROLES if role in sizes]
    roles = tuple((role, len(sizes[role]), sum(sizes[role]), role in decayed) for role in present)
    baseline = sum(p.numel() for p in meta_backbone(config).parameters())
    activated = activated_parameters(model, config)
    return ParameterCount(config.name, label, str(model.canonical), roles, baseline, activated)

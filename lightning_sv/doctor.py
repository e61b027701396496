"""Check of the environment, for `make doctor`."""

import importlib.metadata as metadata
import sys
from importlib.util import find_spec

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table


def problems() -> list[str]:
    """Return one sentence per problem of the environment."""
    messages = []
    for text in metadata.requires("lightning_sv") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            messages.append(f"{requirement.name} is not installed; run 'make install'.")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            messages.append(f"{requirement.name} is {version}; expected {requirement.specifier}. Run 'make install'.")
    import torch

    if torch.version.cuda is None and find_spec("torchvision") is not None:
        messages.append(
            "torchvision is installed with a CPU build of torch and breaks 'import lightning'; run 'pip uninstall "
            "torchvision', it is not needed."
        )
    return messages


def main() -> int:
    """Print versions, devices and problems; return 1 if there is a problem."""
    import torch

    console, table = Console(), Table(show_header=False)
    rows = [("python", sys.version.split()[0])]
    rows += [(name, metadata.version(name)) for name in ("torch", "lightning", "litdata", "torchmetrics")]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows += [("devices", ", ".join(devices) or f"CPU, {torch.get_num_threads()} threads")]
    rows += [("capability", torch.backends.cpu.get_cpu_capability())]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    found = problems()
    for problem in found:
        console.print(f"problem: {problem}", markup=False)
    console.print("no problem found" if not found else f"{len(found)} problem(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

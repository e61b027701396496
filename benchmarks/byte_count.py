"""Counts of a forward and backward pass: bytes moved by kernels and eager operations, and saved bytes."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

#: operations that read only a few rows of an argument, given by its position
BY_INDEX = {"aten.embedding": 0, "aten.nll_loss_forward": 0, "aten.nll_loss_backward": 1}
MOVES_NOTHING = ("aten._unsafe_view", "aten.empty", "aten.empty_like", "aten.empty_strided")

DEFINITION = re.compile(r"^(\w+) = async_compile\.triton\('[^']*', '''(.*?)''', device_str", re.DOTALL | re.MULTILINE)
LAUNCH = re.compile(r"^\s+(\w+)\.run\(", re.MULTILINE)
EXTERN = re.compile(r"(?:extern_kernels\.|torch\.ops\.aten\.)(\w+)(?:\.\w+)?\(")


@dataclass
class Count:
    """Costs of one forward and backward pass.

    Attributes:
        generated: gigabytes per generated kernel.
        eager: gigabytes per eager operation.
        launches: launches of each generated kernel and eager operation.
        products: matrix products, attention, and other library calls of Inductor.
        saved_mib: tensors saved for backward, without parameters: activations, and bf16 copies of matrices.
    """

    generated: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    products: Counter[str] = field(default_factory=Counter)
    saved_mib: float = 0.0

    def totals(self) -> dict[str, float]:
        """Return the sums."""
        return {
            "generated_gb": sum(self.generated.values()),
            "eager_gb": sum(self.eager.values()),
            "generated_kernels": sum(self.launches[name] for name in self.generated),
            "eager_kernels": sum(self.launches[name] for name in self.eager),
            "products": sum(self.products.values()),
            "saved_mib": self.saved_mib,
        }


def add_program(count: Count, graph: str, source: str, calls: int) -> None:
    """Add the traffic of Inductor's code.

    Args:
        count: totals to update.
        graph: name of the graph, because kernels of two graphs may have the same name.
        source: code of the graph.
        calls: number of calls.

    Raises:
        ValueError: a kernel without a traffic estimate.
    """
    kernels = {}
    for name, body in DEFINITION.findall(source):
        said = re.search(r"'kernel_num_gb': ([\d.e+-]+)", body)
        if said is None:
            raise ValueError(f"Kernel {name} does not say what it moves (kernel_num_gb): it cannot be counted.")
        kernels[name] = float(said.group(1))
    for name in LAUNCH.findall(source):
        if name not in kernels:
            raise ValueError(f"Kernel {name} is launched and not defined in the same code: it cannot be counted.")
        count.generated[f"{graph} {name}"] += calls * kernels[name]
        count.launches[f"{graph} {name}"] += calls
    for name in EXTERN.findall(source):
        count.products[name] += calls


class EagerBytes(FakeTensorMode):
    """Fake tensors that count the traffic of eager operations, outside compiled code."""

    def __init__(self, count: Count):
        super().__init__(allow_non_fake_inputs=True)
        self.count, self._inside = count, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run on fake tensors, then count the outermost operation."""
        if self._inside or torch._guards.TracingContext.try_get() is not None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._inside = True
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False
        self._add(func, args, kwargs or {}, out)
        return out

    def _add(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        name = str(func.overloadpacket)
        if func.namespace != "aten" or func.is_view or name in MOVES_NOTHING:
            return
        writes = _bytes(torch.utils._pytree.tree_leaves(out))
        arguments = list(args)
        if name in BY_INDEX:
            arguments.pop(BY_INDEX[name])
        if name == "aten.embedding":
            arguments.append(out)  # as many rows of the table as the output has
        if name in ("aten.zero_", "aten.fill_"):
            arguments = []
        self.count.eager[name] += (writes + _bytes(torch.utils._pytree.tree_leaves([arguments, kwargs]))) / 1e9
        self.count.launches[name] += 1


def _bytes(values: list[Any]) -> int:
    """Return the bytes of the distinct tensors among `values`; expanded tensors count their storage."""
    tensors = {id(value): value for value in values if isinstance(value, Tensor)}.values()
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


@contextmanager
def kept(count: Count, parameters: list[Tensor]) -> Iterator[None]:
    """Count tensors saved for backward, every storage once."""
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    for parameter in parameters:
        storages.pop(parameter.untyped_storage()._cdata, None)
    count.saved_mib = sum(storage.nbytes() for storage in storages.values()) / 2**20


def extrapolated(counts: list[Count], layers: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the totals at `layers` layers and those of one layer, from passes of 2, 3 and 4 layers.

    Raises:
        ValueError: the costs of the third and fourth layer differ.
    """
    two, three, four = (count.totals() for count in counts)
    layer = {key: three[key] - two[key] for key in two}
    for key, value in four.items():
        if abs(value - three[key] - layer[key]) > 1e-9 * value:
            raise ValueError(f"{key}: a fourth layer adds {value - three[key]}, a third one {layer[key]}.")
    return {key: two[key] + (layers - 2) * layer[key] for key in two}, layer

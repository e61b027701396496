"""Inductor's kernels for an H200, generated without a GPU and recorded instead of run.

`recorded()` runs the project's code on fake CPU tensors (sizes, strides and dtypes without storage). Graphs that
`torch.compile` passes to Inductor are moved to a fake `cuda:0`, so that schedules, fusions and Triton kernels are those
of the GPU; the code is recorded and not run. It uses private names of torch 2.11 and rejects other versions.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

#: properties of the GPU that Inductor queries
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=143_771 * 2**20,
    L2_cache_size=60 * 2**20,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2_048,
    max_threads_per_block=1_024,
    warp_size=32,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    clock_rate=1_980_000,
    memory_clock_rate=3_201_000,
    memory_bus_width=6_144,
    gcnArchName="",
    is_integrated=0,
    is_multi_gpu_board=0,
)
CUDA = torch.device("cuda", 0)


@dataclass
class Program:
    """Inductor's code for one graph, with its Triton kernels, and the number of calls.

    Attributes:
        source: the code.
        calls: number of calls.
    """

    source: str
    calls: int = 0


def usable() -> str | None:
    """Return the reason why kernels cannot be generated here, or None."""
    if not torch.__version__.startswith("2.11.") or torch.version.cuda is None:
        return f"torch {torch.__version__} is installed; kernels are read from a CUDA build of 2.11, by private names."
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed: Inductor writes its GPU kernels with it."
    return None


@contextmanager
def pretend_h200() -> Iterator[None]:
    """Answer Inductor's and Triton's device queries like a machine with one H200."""
    from torch._dynamo.device_interface import CudaInterface
    from torch.utils._triton import has_triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: CUDA)
        get_current_device = staticmethod(lambda: 0)
        get_device_capability = staticmethod(lambda device=0: (9, 0))
        get_current_stream = staticmethod(lambda device=0: 0)
        get_device_interface = staticmethod(lambda: torch.cuda)

    answers: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "is_available": lambda: True,
                "device_count": lambda: 1,
                "current_device": lambda: 0,
                "get_device_properties": lambda device=None: H200,
                "get_device_capability": lambda device=None: (9, 0),
                "get_device_name": lambda device=None: H200.name,
                "is_bf16_supported": lambda including_emulation=True: True,
                "set_device": lambda device: None,
                "get_rng_state": lambda device=None: torch.get_rng_state(),
                "set_rng_state": lambda state, device=None: None,
                "_exchange_device": lambda device: 0,
                "_maybe_exchange_device": lambda device: 0,
                "_lazy_init": lambda: None,
            },
        ),
        (CudaInterface, {"get_device_properties": staticmethod(lambda device=None: H200)}),
        (CudaInterface.Worker, {"get_device_properties": staticmethod(lambda device=None: H200)}),
        # It would create a tensor on the device.
        (torch._subclasses.fake_tensor, {"init_gpu_context": lambda device: None}),
    ]
    with ExitStack() as stack:
        for target, values in answers:
            stack.enter_context(patch.multiple(target, **values))
        stack.enter_context(patch.object(driver, "_active", Driver()))
        has_triton.cache_clear()  # it may have been called before
        stack.callback(has_triton.cache_clear)
        yield


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **other: Any
) -> Tensor:
    """Call cuDNN's attention, as scaled_dot_product_attention does on an H200, whose selection queries the driver."""
    if attn_mask is not None or other:
        raise ValueError("Attention is recorded as cuDNN's causal one, without a mask or other arguments.")
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    product = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = product(query, key, value, None, torch.is_grad_enabled(), is_causal=is_causal)[0]
    return out


def _move(graph: torch.fx.GraphModule) -> None:
    """Move every tensor created in the graph to the fake GPU; other tensors follow their inputs."""
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": CUDA}
    graph.recompile()


def _outputs(graph: Any) -> list[Callable[[list[Any]], Any]]:
    """Return the source of each output of a lowered graph: an input, or an empty tensor.

    Outputs that share a buffer share a storage.
    """
    makers: list[Callable[[list[Any]], Any]] = []
    inputs = {name: i for i, name in enumerate(graph.graph_input_names)}
    for out in graph.graph_outputs:
        if not out.has_tensor_output():
            makers.append(functools.partial(lambda value, args: value, None))
            continue
        layout, name = out.get_layout(), out.get_name()
        size, stride = ([int(n) for n in axes] for axes in (layout.size, layout.stride))
        if name in inputs:
            makers.append(functools.partial(lambda i, args: args[i], inputs[name]))
        else:
            makers.append(
                functools.partial(
                    lambda shape, dtype, args: torch.empty_strided(*shape, dtype=dtype), (size, stride), layout.dtype
                )
            )
    return makers


@contextmanager
def recorded() -> Iterator[list[Program]]:
    """Record the code of `torch.compile` for an H200; calls return empty tensors of the right shapes.

    Yields:
        The programs, one per graph, forward and backward separately; the list grows as graphs are compiled.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering

    programs: list[Program] = []

    def keep(graph: GraphLowering) -> Any:
        program = Program(graph.codegen()[0].value)
        programs.append(program)
        makers = _outputs(graph)

        def call(args: list[Any]) -> list[Any]:
            program.calls += 1
            out = [make(args) for make in makers]
            args.clear()
            return out

        return SimpleNamespace(call=call, __file__="not run")

    def compile_for_h200(graph: torch.fx.GraphModule, inputs: list[Any], **settings: Any) -> Any:
        _move(graph)
        with pretend_h200():
            mode = torch._guards.detect_fake_mode(inputs)
            with mode:
                moved = [
                    torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA) if isinstance(t, Tensor) else t
                    for t in inputs
                ]
            with patch.object(GraphLowering, "compile_to_module", keep):
                return compile_fx.compile_fx_inner(graph, moved, **settings)

    torch._dynamo.reset()
    with (
        # Include traffic estimates in kernels, disable caches, and skip checks of addresses, which fakes do not have.
        config.patch(profile_bandwidth=True, compile_threads=1, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        patch.object(
            compile_fx, "compile_fx", functools.partial(compile_fx.compile_fx, inner_compile=compile_for_h200)
        ),
        patch.object(compile_fx, "get_input_idxs_to_check", lambda *inputs: ()),
        patch.object(F, "scaled_dot_product_attention", attention),
    ):
        yield programs
    torch._dynamo.reset()

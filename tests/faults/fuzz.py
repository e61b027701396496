"""Invalid inputs: Hypothesis strategies that mutate valid ones, and how each is tried."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.faults.conftest import Tally

#: values that a key of JSON or YAML did not expect
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1 << 31, 1 << 63, 1 << 64, 10**400]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["", "..", "../x", "/etc/passwd", "C:\\x", "a\\..\\..\\b", "\0", "\ud800", "${oc.env:HOME}", "os:system"]
    ),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def few_and(n: int) -> pytest.MarkDecorator:
    """Run a test with 20 inputs, and with `n` of them under the mark `faults`."""
    return pytest.mark.parametrize("n", [20, pytest.param(n, marks=pytest.mark.faults)])


def fuzz(tally: Tally, fault: str, n: int, hostile: st.SearchStrategy[Any], act: Callable[[Any], object]) -> None:
    """Count `n` inputs, the same ones in every session: accepted, or refused with a sentence, is recovered."""

    @settings(
        max_examples=n,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        # a failing input is reported as found: to shrink it would count it many times
        phases=(Phase.explicit, Phase.generate),
    )
    @given(hostile)
    def run(value: Any) -> None:
        try:
            act(value)
        except ValueError as error:
            tally(fault, bool(str(error).strip()), "a refusal without a word")
        else:
            tally(fault, True)

    run()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested dictionaries and lists, the top excepted."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    found = [] if not path else [path]
    for key, child in items:
        found += leaves(child, (*path, key))
    return found


@st.composite
def edited(draw: st.DrawFn, good: Any, odd: st.SearchStrategy[Any] = ODD) -> Any:
    """`good` with up to three places replaced, removed or doubled."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        places = leaves(value)
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        parent = value
        for key in way:
            parent = parent[key]
        if isinstance(parent, tuple):
            continue
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                parent[last] = draw(odd)
            case "remove":
                del parent[last]
            case _ if isinstance(parent, dict):
                parent[draw(st.text(max_size=8))] = draw(odd)
            case _:
                parent.append(copy.deepcopy(parent[last]))
    return value


@st.composite
def mangled(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with bytes flipped, cut off, inserted or repeated."""
    raw = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.sampled_from(["flip", "flip", "cut", "insert", "repeat"])):
            case "flip" if at < len(raw):
                raw[at] ^= draw(st.integers(1, 255))
            case "cut":
                del raw[at : at + draw(st.integers(1, 1 + len(raw)))]
            case "insert":
                raw[at:at] = draw(st.binary(max_size=16))
            case _:
                raw[at:at] = raw[:at][-draw(st.integers(1, 64)) :]
    return bytes(raw)


def json_bytes(value: Any) -> bytes:
    """JSON as Python's own reader takes it: NaN, and integers of any length."""
    return json.dumps(value).encode()

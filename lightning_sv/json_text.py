"""JSON of the `--json` options."""

import json
import math
from typing import Any


def json_text(value: Any, indent: int | None = 2) -> str:
    """Return JSON with null for NaN and infinities, which JSON lacks (RFC 8259, section 6)."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

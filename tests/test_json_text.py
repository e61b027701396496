import json
from math import inf, nan

import pytest

from lightning_sv.json_text import json_text


def test_json_has_null_for_nan_and_infinities() -> None:
    text = json_text(
        {"losses": [1.5, nan], "optimum": {"errors": (inf, -inf)}, "name": "NaN", "steps": 3}
    )
    read = json.loads(text, parse_constant=pytest.fail)
    assert read == {
        "losses": [1.5, None],
        "optimum": {"errors": [None, None]},
        "name": "NaN",
        "steps": 3,
    }

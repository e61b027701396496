"""Shape annotations: Float[Tensor, "B T d_in"] is a Tensor; jaxtyping checks the axes if it is loaded.

A name stands for one width throughout a call, "..." for any axes. Only tests/test_shapes.py loads jaxtyping; without
it, an annotation is just Tensor.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Int
elif "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int
else:

    class Float:
        """A tensor of real numbers."""

        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return item[0]

    class Int(Float):
        """A tensor of integers."""

    class Bool(Float):
        """A tensor of booleans."""


__all__ = ["Bool", "Float", "Int"]

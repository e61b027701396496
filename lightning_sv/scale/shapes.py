"""Shape annotations: Float[Tensor, "B T d_in"] is a Tensor.

If jaxtyping is loaded, it checks the axes. A name stands for one width throughout a call, "..." for
any axes. Only tests/test_shapes.py loads jaxtyping.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or "jaxtyping" not in sys.modules:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Int
else:
    from jaxtyping import Bool, Float, Int

__all__ = ["Bool", "Float", "Int"]

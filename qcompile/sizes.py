"""What is known of sizes while a graph is traced.

Comes in: sizes, or what was asked of them. Goes out: whether the answer is known without a guard.
Always holds: nothing becomes a condition of the graph; the modules behind symbols, which take 35 MB
and a third of a second to import, are loaded only where there are symbols.
"""

from __future__ import annotations

import torch


def known_true(condition: bool | torch.SymBool) -> bool:
    """Whether something holds for all values that the symbols may have."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_number(size: int | torch.SymInt) -> bool:
    """Whether a size is one number, and no symbol for several."""
    if not isinstance(size, torch.SymInt):
        return True
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    return is_concrete_int(size)

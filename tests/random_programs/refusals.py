"""What the engine may refuse of the uses of weights, where plain PyTorch works."""

from __future__ import annotations

import re

import torch

from random_programs.recipes import Recipe

ALLOWED: dict[str, str] = {
    "dlpack": r"dlpack",
    "hooks": r"a weight in tiles has no gradient of its own; register hooks on its tiles",
    **dict.fromkeys(("keeps", "keeps views"), r"leaves a view of .* behind"),
    **dict.fromkeys(
        ("func.grad", "func.vjp", "func.jacrev", "func.both"),
        r"Such hooks bring the parameters of a wrapped model back for the backward",
    ),
    # Ctrl-C has cut a forward off: its hooks are there until the model is used again.
    "interrupt": r"don't yet support saved tensor hooks",
    # In plain PyTorch these are copies.
    "on the host": r"were updated after the forward whose backward needs them",
    "graph of gradients": r"has a graph \(backward\(create_graph=True\)\)",
    "share": r"was assigned to that of another parameter, too|would be the same memory as",
    **dict.fromkeys(("share data", "share view", "swap"), r"would be the same memory as"),
    "data": r"modified by an inplace operation",
    "unsafe split": r"a copy of a tensor of a wrapped model was changed in place",
    "round trip": r"and one step count per parameter cannot say so; load it in the tiles",
    "kept view": r"was forgotten since \.grad was read; keep a copy",
}
"""A text, as a regular expression, that a refusal may have, by the name of an expression, of a way,
of an operation, or of what is done with a graph."""
COMPILES = torch.__version__ >= "2.13"
"""Whether the compiler of torch takes parameters that are away, and asks for no storage of them."""
if not COMPILES:
    ALLOWED["compiled"] = r"data was touched \(untyped_storage\)|no memory of its own"


ORDERS = r"the ranks used the units of the model in different orders"
"""Where a rank leaves out a module that others run, or its output. Also where it leaves out a
parameter

- inside of a checkpoint: whether the backward asks first for the parameter, or for what has to be
  recomputed, depends on what else it saved;
- below frozen modules, whose backward runs for that parameter alone;
- of micro-batches that are interleaved, whose turns have no order that ranks agree on.
"""
HORIZONTAL = r"infinity\.accumulate\(\.\.\., order=\"horizontal\"\)"
"""Where the gradients of a model come in another order than its layers."""


def _orders_may_differ(recipe: Recipe, at: int) -> bool:
    """Whether ranks may use units in different orders: see `ORDERS`."""
    text = repr((recipe.model.blocks, recipe.model.path, recipe.program[: at + 1]))
    words = ("'dropped'", "'skip'", "'checkpoint'", "frozen=True", "'vertical'")
    return recipe.own and any(word in text for word in words)


def is_allowed(recipe: Recipe, at: int, text: str) -> bool:
    """Whether operation number `at` of a program may be refused with this text, for something that
    it does or an earlier one did."""
    names = [f"block {block.kind.partition(' ')[2]}" for block in recipe.model.blocks]
    for operation in recipe.program[: at + 1]:
        for part in operation:
            names += part if isinstance(part, tuple) else [part]
    patterns = [ALLOWED[name] for name in names if isinstance(name, str) and name in ALLOWED]
    if recipe.ranks > 1:
        patterns += [HORIZONTAL, *([ORDERS] if _orders_may_differ(recipe, at) else [])]
    return any(re.search(pattern, text) for pattern in patterns)

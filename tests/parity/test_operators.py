"""Torch's own catalogue of operators, each handed a parameter of a wrapped model as its first
argument: it gives the bits of plain PyTorch, or our refusal."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import InfinityError
from support.smallest import wrapping

pytest.importorskip("expecttest")  # which the catalogue imports
catalogue = pytest.importorskip("torch.testing._internal.common_methods_invocations")

MOST_ELEMENTS = 4096
NOT_COMPARABLE = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    "nn.functional.rrelu",  # a checkpoint of plain PyTorch saves its noise before it is drawn
}
"""They give what was in memory."""
ROUNDED = {"linalg.cond", "linalg.eigvalsh", "linalg.svdvals", "masked.prod"}
"""Where autograd may watch a tensor that it cannot see, torch takes another algorithm."""
IN_PLACE = {"cauchy", "exponential", "geometric", "log_normal", "normal.in_place", "uniform"}
"""They change the parameter, which plain PyTorch allows in a custom function alone."""


class Case(NamedTuple):
    """A call of an operator whose first argument is `weight`."""

    name: str
    call: Callable[[torch.Tensor], Any]
    weight: torch.Tensor
    differentiable: bool


class Holder(nn.Module):
    """A parameter, with which its forward computes what it is told."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone().contiguous())

    def forward(self, run: Callable[[torch.Tensor], Any]) -> Any:
        # A view must not leave the forward.
        return tree_map(lambda each: each.clone() if _is_tensor(each) else each, run(self.weight))


class LinearHolder(nn.Linear):
    """The same, of a class that can lie in tiles."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight = nn.Parameter(weight.detach().clone().contiguous())


class Recomputed(torch.autograd.Function):
    """A custom function that saves the weight, and computes once more in its backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], Any], weight: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(weight)
        return run(weight).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = weight.detach().requires_grad_()
            found = ctx.run(leaf)
        return None, torch.autograd.grad(found, leaf, gradient)[0]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@functools.cache
def cases() -> dict[bool, tuple[Case, ...]]:
    """One call of each operator; at True those of weights that have rows to cut into tiles.

    The catalogue reads the whole stack of calls for each sample, which takes seconds below pytest
    and little in a thread.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_cases).result()


def _cases() -> dict[bool, tuple[Case, ...]]:
    found: dict[bool, dict[str, Case]] = {False: {}, True: {}}
    for op in catalogue.op_db:
        if op.name in NOT_COMPARABLE or not op.supports_dtype(torch.float32, "cpu"):
            continue
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
                call = functools.partial(_call, op.op, sample.args, sample.kwargs)
                case = Case(name, call, sample.input, op.supports_autograd)
                for tiled, some in found.items():
                    if _is_weight(sample.input, tiled):
                        some.setdefault(name, case)
                if name in found[True]:  # and so in the other one
                    break
    return {tiled: tuple(some.values()) for tiled, some in found.items()}


def _is_weight(value: Any, tiled: bool) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.dtype is torch.float32
        and 0 < value.numel() <= MOST_ELEMENTS
        and (value.dim() == 2 and value.shape[0] > 1 if tiled else value.dim() > 0)
    )


def _call(op: Any, args: Any, kwargs: Any, weight: torch.Tensor) -> Any:
    torch.manual_seed(0)
    given = tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, args)
    return op(weight, *given, **kwargs)


def outside(case: Case, module: nn.Module) -> Any:
    return case.call(module.weight)


def inside(case: Case, module: nn.Module) -> Any:
    return module(case.call) if isinstance(module, Holder) else case.call(module.weight)


def recomputed(case: Case, module: nn.Module, reentrant: bool) -> Any:
    def run(weight: torch.Tensor) -> Any:
        return checkpoint(case.call, weight, use_reentrant=reentrant)

    return module(run) if isinstance(module, Holder) else run(module.weight)


def by_a_custom_function(case: Case, module: nn.Module) -> Any:
    return Recomputed.apply(case.call, module.weight)  # type: ignore[no-untyped-call]


WAYS: dict[str, Callable[[Case, Any], Any]] = {
    "outside of a forward": outside,
    "inside of a forward": inside,
    "in a checkpoint": functools.partial(recomputed, reentrant=False),
    "in a reentrant checkpoint": functools.partial(recomputed, reentrant=True),
    "in a custom function": by_a_custom_function,
}


def result(way: Callable[[Case, Any], Any], case: Case, module: Any) -> list[Any]:
    """What the call gives, and the gradient of the weight."""
    module.weight.grad = None
    found, _ = tree_flatten(way(case, module))
    tensors = [each for each in found if isinstance(each, torch.Tensor)]
    watched = [each for each in tensors if each.requires_grad and case.differentiable]
    values = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in found]
    if not watched:
        return values
    ones = [torch.ones_like(each) for each in watched]
    torch.autograd.backward(watched, ones)
    gradient = module.weight.grad
    return [*values, None if gradient is None else gradient + 0]


def same(case: Case, ours: list[Any], theirs: list[Any]) -> bool:
    rounded = case.name in ROUNDED
    return len(ours) == len(theirs) and all(
        _same(one, other, rounded) for one, other in zip(ours, theirs, strict=True)
    )


def _same(one: Any, other: Any, rounded: bool) -> bool:
    if not isinstance(other, torch.Tensor):
        return bool(one == other)
    if not isinstance(one, torch.Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = _plain(one), _plain(other)
    if rounded:
        return torch.allclose(one, other)
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _plain(value: torch.Tensor) -> torch.Tensor:
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return dense.to(torch.complex64) if dense.dtype is torch.complex32 else dense


def outcomes(
    way: Callable[[Case, Any], Any], some: Sequence[tuple[Case, nn.Module]]
) -> Iterator[tuple[str, str, str]]:
    """Of each operator its name, and "exact", "refused", "differs" or the error."""
    for case, module in some:
        plain = (
            type(module)(case.weight) if isinstance(module, Holder) else LinearHolder(case.weight)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                theirs = result(way, case, plain)
            except Exception:  # torch refuses it, too
                continue
            try:
                ours = result(way, case, module)
            except InfinityError as error:
                with infinity.gathered(module, write=True):  # else no forward runs any more
                    yield case.name, "refused", str(error)
                continue
            except Exception as error:
                kind = "refused" if "a wrapped model" in str(error) else "raises"
                yield case.name, kind, f"{type(error).__name__}: {error}"
                continue
        yield case.name, "exact" if same(case, ours, theirs) else "differs", ""


class Wrapped(NamedTuple):
    """Cases, each with the module of a wrapped model that has its weight, perhaps in tiles."""

    cases: list[tuple[Case, nn.Module]]
    tiled: bool


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "tiled"])
def wrapped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Wrapped]:
    some = cases()[request.param]
    kind = LinearHolder if request.param else Holder
    model = nn.ModuleList(kind(case.weight) for case in some)
    if request.param:
        for module in model:
            rows, columns = module.weight.shape
            infinity.tile(module, -(-rows // 2) * columns * 4)
    before = [case.weight.clone() for case in some]
    with wrapping(tmp_path_factory.mktemp("states")) as wrap:
        wrap(model, {"gpu_memory": 1 << 26, "cpu_memory": 1 << 26})
        yield Wrapped(list(zip(some, model, strict=True)), request.param)
        assert all(
            torch.equal(module.weight.detach(), weight)
            for module, weight in zip(model, before, strict=True)
        )


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
def test_each_operator_is_plain_or_refused(
    wrapped: Wrapped, way: str, half: int, record_property: Callable[[str, Any], None]
) -> None:
    """Half of the operators with a whole weight, and the others with tiles. Each meets each way."""
    numbers = {case.name: number for number, case in enumerate(cases()[False])}
    shift = list(WAYS).index(way) + wrapped.tiled + half
    some = [each for each in wrapped.cases if (numbers[each[0].name] + shift) % 2 == 0]
    found = list(outcomes(WAYS[way], some))
    for outcome in ("exact", "refused"):
        record_property(outcome, sum(each[1] == outcome for each in found))
    wrong = [each for each in found if each[1] not in ("exact", "refused")]
    assert not wrong, "\n".join(map(str, wrong))
    assert {name for name, outcome, _ in found if outcome == "refused"} <= IN_PLACE

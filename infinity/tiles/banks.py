"""Banks of experts in tiles: each tile has some whole experts.

[Note: which uses of a bank]
A bank is a parameter (experts, n, m) of a module with `num_experts`. Its module computes as before,
with a `TiledBank` in the place of the bank. These uses run tile by tile: one expert (`bank[i]`,
`bank.unbind()`) as the second factor of `F.linear` and `@`, and all experts in `torch.bmm` and
`grouped_mm`. Each expert has a product of its own, so the bits are those of the whole bank. Any
other use of one expert gets a copy of it.

[Note: experts without tokens]
For experts without tokens a whole bank gets a gradient of zeros. So the end of a forward uses each
tile that the forward has not used, for a gradient of zeros. If the tokens of ranks go to different
experts, the ranks would bring the tiles in different orders. So several ranks must use `grouped_mm`
or `torch.bmm`, which use all tiles in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as trees

from infinity.backward import handed_on
from infinity.errors import ConfigError
from infinity.sharding.copied import writes
from infinity.sharding.lazy_tensor import LazyTensor
from infinity.sharding.parameter import METADATA, ShardedParameter
from infinity.sharding.tiles import TiledWeight
from infinity.sharding.views import GatheredParameter
from infinity.tiles.low_rank import AddedTo, Factors, run_on_sum

_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
_CHANGED = (
    "an expert of a bank in tiles was changed in place, which would be lost; change the bank "
    "itself (bank[expert] = ...)"
)
_ADAPTED = (
    "a bank of experts in tiles was changed while an adapter is added to it, which would be lost; "
    "change it outside of the forward"
)


class TiledBank(TiledWeight):
    """A bank of experts that lies in tiles along its first dimension. See [Note: which uses of a
    bank]."""

    def __init__(self, tiles: Sequence[Any], dimension: int) -> None:
        super().__init__(tiles, dimension)
        self.used = set[int]()
        """The numbers of the tiles that the forward under way has used."""

    def call(self, number: int, run: Callable[..., Any], *given: Any) -> Any:
        """`run(weight, *given)` in tile `number`."""
        self.used.add(number)
        return self.tiles[number](run, *given)

    def call_one(self, expert: int, run: Callable[..., Any], *given: Any) -> Any:
        """`run(weight, place, *given)` in the tile of `expert`, whose index there is `place`."""
        number, place = self.find(expert)
        return self.call(number, run, place, *given)

    def is_open(self) -> bool:
        """Whether the tiles have their values now, outside of a use, so that views are aliases."""
        return isinstance(self.pieces[0], GatheredParameter)

    def find(self, expert: int) -> tuple[int, int]:
        """The number of the tile of `expert`, and the index of the expert there. Raises
        `IndexError` if there is no such expert."""
        count = self.shape[0]
        if not -count <= expert < count:
            raise IndexError(f"expert {expert} of a bank of {count}")
        expert %= count
        for number, piece in enumerate(self.pieces):
            if expert < piece.shape[0]:
                return number, expert
            expert -= piece.shape[0]
        raise IndexError(f"expert {expert} of a bank of {count}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _in_tiles(func, args, kwargs)
        if found is not NotImplemented:
            return found
        return super().__torch_function__(func, types, args, kwargs)


class AdaptedBank(TiledBank):
    """A bank in tiles plus the product of `factors`. It cannot be changed. See `tiles/low_rank`."""

    factors: Factors

    @staticmethod
    def __new__(cls, bank: TiledBank, factors: Factors) -> Any:
        return TiledBank.__new__(cls, bank.tiles, bank.dimension)

    def __init__(self, bank: TiledBank, factors: Factors) -> None:
        super().__init__(bank.tiles, bank.dimension)
        self.used, self.factors = bank.used, factors

    @classmethod
    def of(cls, bank: TiledBank, factors: Factors) -> AdaptedBank:
        """`bank` plus the product of `factors`, a function of both for autograd."""
        made = cls(bank, factors)
        if not torch.is_grad_enabled():
            return made
        return AddedTo.apply(made, bank, *factors[:2])  # type: ignore[no-untyped-call]

    def again(self) -> AdaptedBank:
        """Another handle."""
        return AdaptedBank(self, self.factors)

    def call(self, number: int, run: Callable[..., Any], *given: Any) -> Any:
        begin = sum(piece.shape[0] for piece in self.pieces[:number])
        own = self.factors.of(begin, begin + self.pieces[number].shape[0])
        return super().call(number, run_on_sum, own, run, *given)

    def call_one(self, expert: int, run: Callable[..., Any], *given: Any) -> Any:
        number, place = self.find(expert)
        expert %= self.shape[0]
        own = self.factors.of(expert, expert + 1)
        return super().call(number, _on_one, place, own, run, *given)

    def fetch(self) -> torch.Tensor:
        with torch.no_grad():
            return self.factors.added(super().fetch())

    def joined(self) -> torch.Tensor:
        return self.factors.added(torch.cat(self.pieces))

    def is_open(self) -> bool:
        return False

    def relink(self) -> TiledWeight:
        return self

    def _shared(self) -> torch.Tensor | None:
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name_of(func)
        if name == "requires_grad":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in METADATA or name == "__hash__":
            return super().__torch_function__(func, types, args, kwargs)
        if name == "__set__" or writes(name):
            raise ConfigError(_ADAPTED)
        found = _in_tiles(func, args, kwargs)
        if found is not NotImplemented:
            return found

        def dense(value: Any) -> Any:
            return value.joined() if isinstance(value, AdaptedBank) else value

        return func(*trees.tree_map(dense, tuple(args)), **trees.tree_map(dense, kwargs))


class BankView(LazyTensor):
    """A view of a bank, or of one `expert` of it, without memory. If it is `turned`, its last two
    dimensions are exchanged."""

    way = _CHANGED
    bank: TiledBank
    expert: int | None
    turned: bool

    @classmethod
    def of(cls, bank: TiledBank, expert: int | None = None, turned: bool = False) -> BankView:
        """A view of `bank`."""
        _, rows, columns = bank.shape
        matrix = (columns, rows) if turned else (rows, columns)
        shape = matrix if expert is not None else (bank.shape[0], *matrix)
        made = cls.without_data(shape, bank.dtype, bank.device)
        made.bank, made.expert, made.turned = bank, expert, turned
        if _is_watched(bank):
            made = _BankPart.apply(made, bank)  # type: ignore[no-untyped-call]
        return made

    def fetch(self) -> torch.Tensor:
        """A copy of the values, for code that bypasses Python's API."""
        values = self.bank.fetch()
        return _of(values if self.expert is None else values[self.expert], self.turned).clone()

    def replace(self, values: torch.Tensor) -> None:
        """Raise `ConfigError`."""
        raise ConfigError(_CHANGED)

    def copied(self) -> torch.Tensor:
        """A copy of the expert, as an ordinary tensor. Raises `ConfigError` for a view of the whole
        bank."""
        if self.expert is None:
            raise ConfigError(
                "a bank of experts in tiles is used by one expert after the other, by torch.bmm or "
                "by grouped_mm; raise the max_bytes of infinity.tile, or give wrap "
                "units=[...], so that it stays whole"
            )
        return self.bank.call_one(self.expert, _copy, self.turned)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name_of(func)
        first: Any = args[0] if args else None
        second = args[1] if len(args) > 1 else None
        if isinstance(first, BankView):
            if _turns(name, args, kwargs, 3 if first.expert is None else 2):
                return BankView.of(first.bank, first.expert, not first.turned)
            if name == "requires_grad":
                return first.bank.requires_grad
            if name in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if writes(name):
                raise ConfigError(_CHANGED)
        if isinstance(second, BankView) and not isinstance(first, BankView):
            if second.expert is None and name in ("bmm", *_GROUPED):
                return _product(func, first, second.bank, second.turned, *args[2:], **kwargs)
            if second.expert is not None and name in ("linear", "matmul", "__matmul__", "mm"):
                return second.bank.call_one(
                    second.expert, _one_product, func, first, second.turned, args[2:], kwargs
                )
        values = [each.copied() if isinstance(each, BankView) else each for each in args]
        named = {k: v.copied() if isinstance(v, BankView) else v for k, v in kwargs.items()}
        return func(*values, **named)


class _BankPart(torch.autograd.Function):
    """A view of a bank. Its gradient is a part of the gradient of the bank."""

    @staticmethod
    def forward(ctx: Any, view: BankView, bank: TiledBank) -> BankView:
        ctx.expert, ctx.turned, ctx.shape = view.expert, view.turned, bank.shape
        made = BankView.without_data(view.shape, view.dtype, view.device)
        vars(made).update(vars(view))
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = _of(gradient, ctx.turned)
        if ctx.expert is None:
            return None, part
        whole = part.new_zeros(ctx.shape)
        whole[ctx.expert] = part
        return None, whole


def _in_tiles(func: Any, args: Any, kwargs: Any) -> Any:
    """A view of a bank, or a product with it that runs tile by tile; `NotImplemented` for other
    uses. See [Note: which uses of a bank]."""
    name, first = _name_of(func), args[0] if args else None
    if isinstance(first, TiledBank) and first._shared() is None:
        if name == "__getitem__" and _one_expert(args[1]) and not first.is_open():
            _check_alone(first)
            return BankView.of(first, int(args[1]))
        if name in ("unbind", "__iter__") and len(args) == 1 and not kwargs:
            found = tuple(BankView.of(first, number) for number in range(first.shape[0]))
            _check_alone(first)
            return iter(found) if name == "__iter__" else found
        if _turns(name, args, kwargs, 3):
            return BankView.of(first, turned=True)
    if name in ("bmm", *_GROUPED) and len(args) > 1 and isinstance(args[1], TiledBank):
        return _product(func, args[0], args[1], False, *args[2:], **kwargs)
    return NotImplemented


def _is_watched(bank: TiledBank) -> bool:
    """Whether autograd must record a view of `bank`."""
    return (
        torch.is_grad_enabled()
        and bank.requires_grad
        and not torch._C._are_functorch_transforms_active()
    )


def used_everywhere(output: Any, banks: Sequence[TiledBank]) -> Any:
    """`output`, a tensor or a structure with tensors. If a bank of `banks` was used, its unused
    tiles are joined to the first tensor that needs a gradient, so that they get a gradient of
    zeros. See [Note: experts without tokens]."""
    values, structure = trees.tree_flatten(output)
    joined = next((at for at, value in enumerate(values) if _is_differentiable(value)), None)
    if joined is None:
        return output
    tokens = [
        bank.call(number, _token)
        for bank in banks
        if bank.used
        for number in range(len(bank.tiles))
        if number not in bank.used
    ]
    if not tokens:
        return output
    values[joined] = _JoinNothing.apply(values[joined], *tokens)  # type: ignore[no-untyped-call]
    return trees.tree_unflatten(values, structure)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _name_of(func: Any) -> str:
    """The name of the called function, or of the attribute that is read."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    overload = getattr(func, "_schema", None)
    return str(overload.name).rpartition("::")[2] if overload is not None else name


def _one_expert(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and not index.is_floating_point() and index.dtype != torch.bool
    return isinstance(index, int) and not isinstance(index, bool)


def _turns(name: str, args: Any, kwargs: Any, ndim: int) -> bool:
    """Whether a call exchanges the last two of `ndim` dimensions."""
    if name in ("t", "T"):
        return ndim == 2
    if name == "mT":
        return True
    if name not in ("transpose", "swapaxes") or len(args) != 3 or kwargs:
        return False
    return {each % ndim for each in args[1:]} == {ndim - 2, ndim - 1}


def _check_alone(bank: TiledBank) -> None:
    piece = bank.pieces[0]
    if isinstance(piece, ShardedParameter) and type(piece).source.facts.ranks > 1:
        raise ConfigError(
            "ranks whose tokens go to other experts would bring the tiles of a bank in another "
            'order: call model.set_experts_implementation("grouped_mm") of transformers, or wrap '
            "with units=[...], so that the bank stays whole"
        )


def _of(weight: torch.Tensor, turned: bool) -> torch.Tensor:
    return weight.transpose(-2, -1) if turned else weight


def _copy(weight: torch.Tensor, place: int, turned: bool) -> torch.Tensor:
    return _of(weight[place], turned).clone()


def _on_one(
    weight: torch.Tensor, place: int, factors: Factors, run: Callable[..., Any], *given: Any
) -> Any:
    """`run` with a bank of one expert, plus the product of its factors."""
    return run_on_sum(weight[place : place + 1], factors, run, 0, *given)


def _one_product(
    weight: torch.Tensor, place: int, func: Any, given: Any, turned: bool, rest: Any, named: Any
) -> Any:
    return func(given, _of(weight[place], turned), *rest, **named)


def _product(
    func: Any, given: torch.Tensor, bank: TiledBank, turned: bool, *rest: Any, **named: Any
) -> torch.Tensor:
    """`func` (bmm or grouped_mm) of `given` and all experts, one tile after the other."""
    if _name_of(func) == "bmm":
        lengths = [piece.shape[0] for piece in bank.pieces]
        parts = [
            bank.call(number, _whole_product, func, part, turned, rest, named)
            for number, part in enumerate(given.split(lengths))
        ]
        return torch.cat(parts)
    if len(rest) > 1 or not (rest or named.get("offs") is not None):
        raise ConfigError(
            "a bank of experts in tiles takes grouped_mm(tokens, bank, offs=...), with any other "
            "argument by its name; or give wrap units=[...], so that the bank stays whole"
        )
    offsets = rest[0] if rest else named.pop("offs")
    ends, parts, begin, first = [0, *offsets.tolist()], [], 0, 0
    for number, piece in enumerate(bank.pieces):
        last = first + piece.shape[0]
        rows = given[ends[first] : ends[last]]
        own = offsets[first:last] - ends[first]
        parts.append(bank.call(number, _grouped_product, func, rows, turned, own, named))
        first, begin = last, ends[last]
    if begin < len(given):  # rows of no expert
        parts.append(parts[0].new_zeros(len(given) - begin, parts[0].shape[1]))
    return torch.cat(parts)


def _whole_product(
    weight: torch.Tensor, func: Any, given: torch.Tensor, turned: bool, rest: Any, named: Any
) -> Any:
    return func(given, _of(weight, turned), *rest, **named)


def _grouped_product(
    weight: torch.Tensor, func: Any, given: torch.Tensor, turned: bool, offsets: Any, named: Any
) -> Any:
    if len(given) == 0:  # some kernels refuse empty inputs
        return functional.linear(given, _of(weight[0], not turned))
    return func(given, _of(weight, turned), offs=offsets, **named)


def _token(weight: torch.Tensor) -> Any:
    return _Nothing.apply(weight)  # type: ignore[no-untyped-call]


class _Nothing(torch.autograd.Function):
    """A token for a weight that gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.form = weight.shape, weight.dtype, weight.device
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shape, dtype, device = ctx.form
        return torch.zeros(shape, dtype=dtype, device=device)


class _JoinNothing(torch.autograd.Function):
    """An output with tokens joined to it, which do not change its values."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.count = len(tokens)
        return handed_on(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *[gradient.new_zeros(())] * ctx.count

"""The operations of a player that use weights, gradients and states of the model in other ways than
by calling it: see `uses`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.sharding.tiles import pieces_of
from random_programs import modules
from random_programs.modules import Pass
from random_programs.uses import made

OURS = ("a wrapped model", "ShardedParameterError: ")
"""Of them one is in the text of each refusal that is no `InfinityError`."""


def is_refusal(error: BaseException) -> bool:
    """Whether the engine has raised it on purpose."""
    return isinstance(error, InfinityError) or any(text in str(error) for text in OURS)


def weights_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights as users have them: whole, also those in tiles."""
    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if "weight_tiles" in name:
            continue
        found = module._parameters | getattr(module, "tiled", {})
        for attribute, weight in sorted(found.items()):
            if weight is not None and id(weight) not in seen:
                seen.add(id(weight))
                yield f"{name}.{attribute}".lstrip("."), weight


class Using:
    """Mixed into `players.Player`."""

    recipe: Any
    model: Any
    optimizer: Any
    graphs: dict[Any, Any]
    see: Callable[[str, Any], None]
    scaled: Callable[[torch.Tensor], torch.Tensor]
    settle: Callable[[torch.Tensor], None]
    forget: Callable[[Any], None]

    def _matrix(self, number: int) -> torch.Tensor | None:
        """Number `number` of the weights (width, width)."""
        width = self.recipe.model.width
        square = [
            weight
            for _, weight in weights_of(self.model)
            if weight.shape == (width, width) and weight.is_floating_point()
        ]
        return square[number % len(square)] if square else None

    def op_use(
        self,
        name: str,
        ways: tuple[str, ...],
        numbers: tuple[int, int],
        batch: int,
        where: str,
        end: str,
    ) -> None:
        """Compute an expression of two weights, `where` is "before" or "after" a forward, "inside"
        of one, or "alone". The `end` says what is done with its graph."""
        first, second = (self._matrix(number) for number in numbers)
        if first is None or second is None:
            return
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(6, first.shape[1], generator=generator).to(first.dtype)
        if self.recipe.model.tiles:  # each use of a weight in tiles casts it anew
            ways = tuple("uncached" if way == "autocast" else way for way in ways)
        run = functools.partial(made(name, ways), first, second, x)
        losses: list[torch.Tensor] = []

        def use(_: Any = None) -> None:
            found = run()
            self.see("value", found.detach().clone())
            losses.append((found if found.is_complex() else found.double()).square().mean().float())

        if where in ("before", "alone"):
            use()
        if where != "alone":
            model = self.recipe.model
            data = modules.batch_of(model, batch)
            inside = Pass(batch, use=use if where == "inside" else None)
            losses.append(modules.loss_of(model, self.model(data, inside), data))
        if where == "after":
            use()
        loss = functools.reduce(torch.add, losses)
        self.see("loss", loss)
        if loss.requires_grad:
            getattr(self, "_end_" + end.replace(" ", "_"))(loss, first, second)

    # What is done with a graph

    def _end_value(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        pass

    def _end_backward(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        self.scaled(loss).backward()

    def _end_twice(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        """Two backwards of one graph."""
        self.scaled(loss).backward(retain_graph=True)
        self.scaled(loss).backward()

    def _end_hooks(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        """With hooks on the gradient of the first weight."""
        first = weights[0]
        calls: list[str] = []
        if not first.requires_grad:
            return
        handles = [
            first.register_hook(lambda g: calls.append("hook") or g * 0.5),  # type: ignore[func-returns-value]
            first.register_post_accumulate_grad_hook(
                lambda p: calls.append(f"accumulated {p is first}")
            ),
        ]
        try:
            self.scaled(loss).backward()
        finally:
            for handle in handles:
                handle.remove()
        self.see("hooks", tuple(calls))

    def _end_grad(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        trained = [each for each in weights if each.requires_grad]
        if trained:
            for found in torch.autograd.grad(loss, trained, allow_unused=True):
                self.see("gradient", found)

    def _end_inputs(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        trained = [each for each in weights if each.requires_grad]
        if trained:
            self.scaled(loss).backward(inputs=trained)

    def _end_penalty(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        """A double backward."""
        if weights[0].requires_grad:
            (found,) = torch.autograd.grad(loss, weights[:1], create_graph=True, allow_unused=True)
            self.see("gradient", found)
            if found is not None and found.requires_grad:
                self.scaled(loss + found.square().sum()).backward()

    def _end_graph_of_gradients(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        """A penalty on `.grad`."""
        self.scaled(loss).backward(create_graph=True)
        found = weights[0].grad
        if found is not None:
            self.see("gradient", found)
            if found.requires_grad:
                self.scaled(found.square().sum()).backward()

    def _end_thawed(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        """The first weight is frozen for a forward between that of the loss and its backward."""
        trained = [each for each in weights[:1] if each.requires_grad]
        for each in trained:
            each.requires_grad_(False)
        model = self.recipe.model
        data = modules.batch_of(model, 5)
        self.see("frozen", modules.loss_of(model, self.model(data, Pass(5)), data).detach())
        for each in trained:
            each.requires_grad_(True)
        self.scaled(loss).backward()

    def _end_later(self, loss: torch.Tensor, *weights: torch.Tensor) -> None:
        """See `op_later`."""
        self.graphs["later", 0] = loss

    def op_later(self) -> None:
        """The backward of a graph that another operation has left."""
        loss = self.graphs.pop(("later", 0), None)
        if loss is not None:
            self.scaled(loss).backward()

    # Values that are kept

    def op_keep(self, kind: str, numbers: tuple[int, int]) -> None:
        """Keep something of two weights; see `op_read_kept`."""
        first, second = (self._matrix(number) for number in numbers)
        if first is not None and second is not None:
            self.graphs["kept", 0] = KEPT[kind](first, second)

    def op_read_kept(self) -> None:
        """See what is kept now."""
        kept = self.graphs.get(("kept", 0))
        if kept is not None:
            self.see("kept", kept.detach() + 0)
            self.see("kept", kept.detach() @ torch.ones(kept.shape[-1:], dtype=kept.dtype)) if (
                kept.dim()
            ) else None

    # Gradients

    def op_gradient(self, kind: str, numbers: tuple[int, int]) -> None:
        """Use or change the gradients of two weights."""
        first, second = (self._matrix(number) for number in numbers)
        if first is None or second is None or first.grad is None or second.grad is None:
            return
        self.settle(first)
        self.settle(second)
        found = GRADIENTS[kind](first, second)
        if isinstance(found, torch.Tensor):
            if kind.startswith("kept"):
                self.graphs["kept", 0] = found
            else:
                self.see("gradient", found)

    def op_assigned(self, number: int, changed: bool) -> None:
        """Give a weight a gradient, which the program changes after that."""
        weight = self._matrix(number)
        if weight is None or not weight.requires_grad:
            return
        self.forget(weight)
        given = torch.randn(weight.shape).to(weight.dtype)
        weight.grad = given
        if changed:
            given.mul_(0.5)
            given[1:3] += 1
        self.see("gradient", weight.grad + 0)

    def op_state(self, kind: str, number: int) -> None:
        """Use or change the states of the optimizer."""
        weight = self._matrix(number)
        # In plain PyTorch masters are states, too.
        if weight is None or not weight.requires_grad or weight.dtype != torch.float32:
            return
        found = [STATES[kind](self.optimizer, piece) for piece in pieces_of([weight])]
        if isinstance(found[0], torch.Tensor):
            self.see("state", torch.cat(found, 1))


KEPT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "view": lambda w, v: w[1:4],
    "transposed": lambda w, v: w.t(),
    "detached": lambda w, v: w.detach(),
    "data": lambda w, v: w.data[::2],
    "norm": lambda w, v: w.norm(),
    "difference": lambda w, v: w.detach() - v.detach() + 1,
    "copy": lambda w, v: w.detach().clone(),
}
"""What can be kept of two weights."""


def _swap(w: torch.Tensor, v: torch.Tensor) -> None:
    w.grad, v.grad = v.grad, w.grad


def _mask(w: Any, v: Any) -> None:
    w.grad[torch.arange(w.shape[0]) % 2 == 1] = 0


def _rows(w: Any, v: Any) -> None:
    w.grad[2:5] = 0


def _set_itself(w: Any, v: Any) -> None:
    w.grad = w.grad * 0.5


def _share(w: Any, v: Any) -> None:
    """One gradient of two weights, which is changed through one of them."""
    w.grad = v.grad
    v.grad[1:3] += 1


def _share_data(w: Any, v: Any) -> None:
    w.grad.data = v.grad.data
    v.grad.mul_(0.5)


def _share_view(w: Any, v: Any) -> None:
    w.grad = v.grad.t()
    v.grad.mul_(0.5)


def _compiled(w: Any, v: Any) -> Any:
    compiled: Any = torch.compile(_of_gradient, backend="eager", dynamic=False)
    return compiled(w.detach() * 0 + 1, v)


def _of_gradient(w: Any, v: Any) -> Any:
    return w + 1 if v.grad is None else w * v.grad


def _norm(w: Any, v: Any) -> torch.Tensor:
    """The engine sums squares in double precision."""
    gradient: torch.Tensor = w.grad
    if type(gradient) is torch.Tensor:
        return gradient.double().norm().to(gradient.dtype)
    return gradient.norm()


def _unsafe_split(w: Any, v: Any) -> None:
    """Views of which autograd knows nothing."""
    for part in w.grad.unsafe_split(4):
        part.mul_(0.5)


GRADIENTS: dict[str, Callable[[Any, Any], Any]] = {
    "mul_": lambda w, v: w.grad.mul_(0.5),
    "data": lambda w, v: w.grad.data.mul_(0.25),
    "masked_fill_": lambda w, v: w.grad.masked_fill_(torch.arange(w.shape[0]) % 3 == 0, 0.0),
    "mask": _mask,
    "rows": _rows,
    "columns": lambda w, v: w.grad[:, ::2].mul_(2),
    "add weight": lambda w, v: w.grad.add_(v.detach(), alpha=0.01),
    "zero_": lambda w, v: w.grad.zero_(),
    "swap": _swap,
    "set": _set_itself,
    "share": _share,
    "share data": _share_data,
    "share view": _share_view,
    "compiled": _compiled,
    "unsafe split": _unsafe_split,
    "times weight": lambda w, v: w.grad * v,
    "weight times": lambda w, v: v * w.grad,
    "product": lambda w, v: w.grad[:3] @ v.grad.t(),
    "clip value": lambda w, v: nn.utils.clip_grad_value_([w, v], 1e-3),
    "kept norm": _norm,
    "kept view": lambda w, v: w.grad[1:4],
    "kept copy": lambda w, v: w.grad.clone(),
}
"""What can be done with the gradients of two weights."""


def _clear(optimizer: Any, w: torch.Tensor) -> None:
    optimizer.state.clear()


def _delete(optimizer: Any, w: torch.Tensor) -> None:
    optimizer.state.pop(w, None)


def _clear_entry(optimizer: Any, w: torch.Tensor) -> None:
    if w in optimizer.state:
        optimizer.state[w].clear()


def _scale(optimizer: Any, w: torch.Tensor) -> None:
    for value in optimizer.state.get(w, {}).values():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            value.mul_(0.5)


def _replace(optimizer: Any, w: torch.Tensor) -> None:
    state = optimizer.state.get(w, {})
    for name, value in list(state.items()):
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            state[name] = value * 0.25


def _read(optimizer: Any, w: torch.Tensor) -> torch.Tensor | None:
    found = [
        value + 0
        for _, value in sorted(optimizer.state.get(w, {}).items())
        if isinstance(value, torch.Tensor) and value.dim() == 2
    ]
    return torch.stack(found) if found else None


STATES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "clear": _clear,
    "delete": _delete,
    "clear entry": _clear_entry,
    "scale": _scale,
    "replace": _replace,
    "read": _read,
}
"""What can be done with the states of a weight."""

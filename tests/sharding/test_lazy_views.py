"""A view of a lazy tensor is an alias: it reads what the lazy tensor is now, and what is written to
it is written there, as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity
from infinity.sharding.lazy_tensor import LazyView
from support.handles import FixedHandle, Handle

pytestmark = pytest.mark.timeout(60)


def values() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6).sub(7)


WRITES: dict[str, Callable[[Any], object]] = {
    "row": lambda t: t[1].fill_(3),
    "mask": lambda t: t.__setitem__(t > 0, 0.0),
    "mask of a view": lambda t: t[1:].__setitem__(t[1:] > 0, 0.0),
    "index": lambda t: t.__setitem__((torch.tensor([0, 1]), torch.tensor([1, 2])), t[2, :2] + 0),
    "rows of rows": lambda t: t[1:][1:].mul_(2),
    "transposed": lambda t: t.t()[2].copy_(t[:, 0]),
    "reshaped": lambda t: t.view(-1).reshape(2, 12)[1].view(3, 4).t().mul_(2),
    "flattened": lambda t: t.flatten()[3:7].neg_(),
    "diagonal": lambda t: t.diagonal().zero_(),
    "strided": lambda t: torch.as_strided(t, (2, 2), (6, 1), 8).add_(1),
    "strided view": lambda t: torch.as_strided(t[1:], (2, 2), (6, 1)).add_(1),
    "split": lambda t: [part.mul_(n) for n, part in enumerate(t.split([1, 2, 3], 1))],
    "chunk": lambda t: [part.mul_(n + 2) for n, part in enumerate(t.chunk(2, 1))],
    "unbind": lambda t: t.unbind()[0].copy_(t.unbind()[3]),
    "bits": lambda t: t.view(torch.int32)[0].zero_(),
    "complex": lambda t: torch.view_as_complex(t.view(4, 3, 2)).mul_(1j),
    "conjugate": lambda t: torch.view_as_complex(t.view(4, 3, 2)).conj()[0].add_(2j),
    "imaginary": lambda t: torch.view_as_complex(t.view(4, 3, 2)).imag.mul_(2),
    "negative": lambda t: torch.view_as_complex(t.view(4, 3, 2)).conj().imag.add_(2),
    "out": lambda t: torch.add(t[0], 1, out=t[1]),
    "overlapping": lambda t: t[0].add_(t[:2].sum(0)),
    "foreach": lambda t: torch._foreach_mul_([t[0], t[1:]], [2.0, 3.0]),
    "foreach of scalars": lambda t: torch._foreach_addcdiv_(
        [t[0], t[1]], [t[1], t[2]], [t[2] + 9.5, t[3] + 9.5], torch.tensor([2.0, 3.0])
    ),
    "foreach copy": lambda t: torch._foreach_copy_([t[0], t[1]], [t[2], t[3]]),
    "data of a view": lambda t: t[0].data.mul_(2),
    "shallow copy": lambda t: copy.copy(t).mul_(2),
    "detached": lambda t: t[1:].detach().zero_(),
    "init": lambda t: torch.nn.init.constant_(t[2:], 0.5),
    "scatter": lambda t: t.scatter_add_(0, torch.zeros(1, 6, dtype=torch.long), t[1:2] * 1),
    "unfolded": lambda t: t.unfold(1, 2, 2)[:, 0].mul_(2),
    "moved": lambda t: t.unsqueeze(0).movedim(0, -1).squeeze(-1)[:, ::2].fill_(1),
    "slices": lambda t: t.__setitem__((slice(None), [True, False] * 3), 5.0),
    "by name": lambda t: torch.mul(input=t, other=2, out=t),
    "apart": lambda t: t.tensor_split(2)[1].clamp_(min=0, max=3),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_a_view_is_a_write(name: str, mode: Any) -> None:
    theirs, ours = values(), Handle(values())
    with mode():
        WRITES[name](theirs)
        WRITES[name](ours)
    assert not torch.equal(theirs, values())
    assert torch.equal(ours.home, theirs)


def test_a_view_takes_no_copy_and_tells_what_it_is() -> None:
    theirs, ours = values(), Handle(values())
    for view in (
        lambda t: t[1:, ::2],
        lambda t: t.t(),
        lambda t: t.view(2, 12)[1].view(3, 4).t(),
        lambda t: t.expand(2, 4, 6),
        lambda t: t.view(torch.int16),
        lambda t: torch.view_as_complex(t.view(4, 3, 2)).conj(),
        lambda t: t.split([1, 3])[1],
        lambda t: t.reshape(-1)[2:],
        lambda t: t[None, ..., 2],
    ):
        found, wanted = view(ours), view(theirs)
        assert isinstance(found, LazyView)
        assert (found.shape, found.stride(), found.storage_offset()) == (
            wanted.shape,
            wanted.stride(),
            wanted.storage_offset(),
        )
        assert (found.dtype, found.device) == (wanted.dtype, wanted.device)
        assert (found.is_conj(), found.is_contiguous()) == (
            wanted.is_conj(),
            wanted.is_contiguous(),
        )
        if not found.is_conj():  # which torch resolves first
            assert torch.empty_like(found).stride() == torch.empty_like(wanted).stride()
            assert torch.zeros_like(found).sum() == 0
    assert ours.fetched == [0]
    assert ours.contiguous() is ours and ours.to(torch.float32) is ours


def test_a_view_reads_what_there_is_now() -> None:
    theirs, ours = values(), Handle(values())
    before, now = ours[1:].t(), theirs[1:].t()
    taken = before + 1
    theirs.mul_(2)
    ours.mul_(2)
    assert torch.equal(before + 0, now)
    assert torch.equal(taken, values()[1:].t() + 1)
    # What may give a view and gives a copy is one.
    copied, wanted = ours.t().reshape(-1), theirs.t().reshape(-1)
    assert not isinstance(copied, LazyView)
    ours.zero_()
    assert torch.equal(copied, wanted)


def test_views_of_one_tensor_share_a_copy_and_lists_take_one_at_a_time() -> None:
    ours = Handle(values())
    assert torch.equal(ours[0] + 0, values()[0]) and ours.fetched == [1]
    torch.add(ours[0], ours[1], out=ours[2])
    assert ours.fetched == [2]
    torch._foreach_add_([ours, ours.detach()], 1.0)
    assert ours.fetched == [4]


def test_a_refusal_comes_before_any_change() -> None:
    fixed, plain = FixedHandle(values()), values()[0]
    for write in (
        lambda: fixed.mul_(2),
        lambda: fixed[0].mul_(2),
        lambda: torch.max(plain.view(2, 3), 0, out=(plain[:3], fixed[0])),
        lambda: fixed.t()[1:].copy_(torch.ones(5, 4)),
        lambda: fixed.__setitem__(0, 1.0),
    ):
        with pytest.raises(ValueError, match="fixed"):
            write()
    assert torch.equal(fixed.home, values()) and torch.equal(plain, values()[0])


@pytest.mark.parametrize("part", [lambda t: t, lambda t: t[1:]])
def test_other_memory_is_refused(part: Any) -> None:
    """A copy would not follow the tensor that is assigned, nor leave aliases behind."""
    ours = Handle(values())
    tensor = part(ours)
    with pytest.raises(infinity.ShardedParameterError, match=r"write what it is to be: \.copy_"):
        tensor.data = tensor * 2
    assert torch.equal(ours.home, values())


@pytest.mark.parametrize("change", ["t_", "squeeze_", "resize_", "unsqueeze_"])
def test_the_layout_cannot_be_changed_in_place(change: str) -> None:
    ours = Handle(values()[:1].t().contiguous())
    arguments = {"resize_": (2,), "unsqueeze_": (0,)}.get(change, ())
    with pytest.raises(infinity.ShardedParameterError, match="a wrapped model"):
        getattr(ours, change)(*arguments)
    assert torch.equal(ours.home, values()[:1].t())


def _step(draw: Any, shape: list[int]) -> tuple[Any, ...]:
    """A view of a tensor of this shape, by name and arguments."""
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(("select", "slice", "transpose", "flatten", "unsqueeze", "expand")))
    if kind == "select" and len(shape) > 1 and shape[dim]:
        return "select", dim, draw(st.integers(0, shape[dim] - 1))
    if kind == "slice":
        begin = draw(st.integers(0, shape[dim]))
        return "narrow", dim, begin, draw(st.integers(0, shape[dim] - begin))
    if kind == "flatten":
        return ("flatten",)
    if kind == "unsqueeze":
        return "unsqueeze", dim
    if kind == "expand" and len(shape) < 4:
        return "expand", draw(st.integers(1, 2)), *shape
    return "transpose", dim, len(shape) - 1


def _views(draw: Any, plain: torch.Tensor) -> list[tuple[Any, ...]]:
    steps = []
    for _ in range(draw(st.integers(0, 4))):
        step = _step(draw, list(plain.shape))
        plain = getattr(plain, step[0])(*step[1:])
        steps.append(step)
    return steps


def _of(tensor: torch.Tensor, steps: list[tuple[Any, ...]]) -> Any:
    for name, *arguments in steps:
        tensor = getattr(tensor, name)(*arguments)
    return tensor


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_views_of_views_and_writes_in_any_order(data: st.DataObject) -> None:
    theirs = torch.arange(24.0).reshape(2, 3, 4)
    ours = Handle(theirs.clone())
    kept: list[tuple[Any, Any]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        steps = _views(data.draw, theirs)
        mine, plain = _of(ours, steps), _of(theirs, steps)
        assert (mine.shape, mine.stride(), mine.storage_offset()) == (
            plain.shape,
            plain.stride(),
            plain.storage_offset(),
        )
        kept.append((mine, plain))
        place = data.draw(st.integers(0, len(kept) - 1))
        written, wanted = kept[place]
        factor = data.draw(st.sampled_from((2.0, -1.0, 0.5)))
        try:
            wanted.mul_(factor).add_(plain.sum())
        except RuntimeError:  # elements that are one memory
            with pytest.raises(RuntimeError):
                written.mul_(factor).add_(mine.sum())
        else:
            written.mul_(factor).add_(mine.sum())
        for one, other in kept:
            assert torch.equal(one + 0, other + 0)
        assert torch.equal(ours.home, theirs)

"""A use of a unit's bytes leaves nothing behind, on any placement: no view that outlives it, and no
write."""

from __future__ import annotations

import copy
import gc
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.optim.chunk import Chunk
from infinity.placement.spec import Kind
from infinity.sharding.layout import PAGE
from infinity.sharding.unit import Unit
from infinity.sharding.views import Views, Window
from infinity.tiers.access import Checkout
from infinity.tiers.block import CopyState
from support import smallest
from support.facts import facts_of
from support.smallest import WIDTH, Block, Wrap, wrapping

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

PLACEMENTS = smallest.PLACEMENTS | {
    "device cache": {"gpu_memory": 1 << 26, "cpu_memory": 1 << 26, "gpu_cache": 1 << 22},
}
every_placement = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    with wrapping(tmp_path) as make:
        yield make


class Model(nn.Module):
    """Something special before eight blocks, and something of it after them."""

    def __init__(
        self, special: nn.Module, use: Callable[[nn.Module, torch.Tensor], Any] | None = None
    ) -> None:
        super().__init__()
        self.special, self.use = special, use
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.use(self.special, x) if self.use is not None else self.special(x)
        for block in self.blocks:
            x = block(x)
        return x * (factor.view if isinstance(factor, Out) else factor)


class Weighted(nn.Module):
    """Holds a weight, and does something with it."""

    def __init__(
        self, act: Callable[[Weighted, torch.Tensor], Any], requires_grad: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1, requires_grad=requires_grad)
        self.act = act

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self, x)


@dataclass
class Out:
    view: torch.Tensor


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def as_plain(
    build: Callable[[], nn.Module], wrap: Wrap, placement: dict[str, Any], **options: Any
) -> None:
    """A wrapped model trains as the plain one does."""
    plain = make(build)
    model = wrap(make(build), placement, algorithm="sgd", **options)
    actual = train(model, infinity.SGD(model.parameters(), lr=0.1))
    assert actual == pytest.approx(
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1)), rel=1e-5
    )


# Views that outlive what made them


@every_placement
def test_a_view_in_a_dataclass_lasts_as_long_as_the_forward(
    placement: dict[str, Any], wrap: Wrap
) -> None:
    as_plain(lambda: Model(Weighted(lambda self, x: Out(self.weight[:5]))), wrap, placement)


@every_placement
def test_a_view_in_an_attribute_lasts_as_long_as_it_is_needed(
    placement: dict[str, Any], wrap: Wrap
) -> None:
    def keep(self: Weighted, x: torch.Tensor) -> None:
        self.kept = self.weight[:5]

    def use(special: nn.Module, x: torch.Tensor) -> torch.Tensor:
        special(x)
        return special.__dict__.pop("kept")

    as_plain(lambda: Model(Weighted(keep), use), wrap, placement)


def stash(self: Weighted, x: torch.Tensor) -> torch.Tensor:
    self.kept = self.weight[:5]
    return self.kept * 1.0


def in_a_cycle(self: Weighted, x: torch.Tensor) -> torch.Tensor:
    cycle: list[Any] = [self.weight[:5]]
    cycle.append(cycle)
    return cycle[0] * 1.0


@every_placement
def test_a_view_that_outlives_the_forward_is_refused(placement: dict[str, Any], wrap: Wrap) -> None:
    model = wrap(Model(Weighted(stash)), placement)
    with pytest.raises(
        infinity.ShardedParameterError,
        match=r"^Model leaves a view of special\.weight behind.*clone",
    ):
        model(batch())
    with pytest.raises(
        infinity.ShardedParameterError,
        match=r"^Weighted leaves a view of special\.weight behind.*clone",
    ):
        model.special(batch())
    del model.special.kept
    model.special.act = in_a_cycle  # garbage is no view that anybody keeps
    model(batch()).sum().backward()


@every_placement
def test_a_view_that_outlives_gathered_is_refused(placement: dict[str, Any], wrap: Wrap) -> None:
    model = wrap(Model(Weighted(stash)), placement)
    outlives = r"a view of special\.weight outlives infinity\.gathered.*clone"
    with (
        pytest.raises(infinity.ShardedParameterError, match=outlives),
        infinity.gathered(model.special),
    ):
        view = model.special.weight[:1]
    del view
    with pytest.raises(ZeroDivisionError), infinity.gathered(model.special):
        view = model.special.weight[:1]
        raise ZeroDivisionError
    del view
    with infinity.gathered(model.special):
        parameter = model.special.weight  # the parameter itself is nobody's view
        copied = copy.deepcopy(model.special.weight)
        expected = parameter.detach().clone()
    assert parameter is model.special.weight
    assert type(copied) is nn.Parameter
    assert torch.equal(copied, expected)


def test_references_and_digests_of_a_window() -> None:
    flat = torch.arange(4096, dtype=torch.int64)
    window, other = Window(flat, 64, 128), Window(flat, 128, 192)
    view = window.tensor((8, 8))
    assert torch.equal(view, flat[64:128].view(8, 8))
    assert (window.references(), other.references()) == (1, 0)
    part = view[2:4].t()
    del view
    assert window.references() > 0
    del part
    assert window.references() == 0
    before, rest = window.digest(), other.digest()
    flat[64:66] = torch.tensor([65, 64])  # the same numbers in another order
    assert window.digest() != before
    assert other.digest() == rest
    del flat
    assert window.tensor((64,)).sum() == sum(range(64, 128))  # a window keeps its memory


def test_a_digest_is_of_every_byte_in_its_place() -> None:
    """Of a window of several parts, the last of which is no whole number of 8 bytes."""
    flat = torch.zeros((2 << 20) + 11, dtype=torch.uint8)
    window = Window(flat, 0, len(flat))
    seen = {window.digest()}
    for place in (0, 7, 8, (1 << 20) - 1, 1 << 20, (2 << 20) - 8, 2 << 20, len(flat) - 1):
        flat[place] = 1
        seen.add(window.digest())
        flat[place] = 0
    assert len(seen) == 9
    assert window.digest() in seen
    assert Window(flat, 5, 5).digest() == 0


def views_of(parameters: list[nn.Parameter]) -> Views:
    """Those of a unit that no engine has, and that has no block."""
    source, nothing = SimpleNamespace(facts=facts_of(parameters)), object()
    return Views(source, parameters, nothing, nothing)  # type: ignore[arg-type]


def test_parameters_that_point_elsewhere_were_changed() -> None:
    parameters = [
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.zeros(2, 2)),
    ]
    views = views_of(parameters)
    views.attach(torch.zeros(PAGE))
    assert (views.changed(), views.referenced()) == ([], [])
    with torch.no_grad():
        parameters[2].add_(1)
    assert (views.changed(), views.changed()) == ([2], [])
    parameters[0].data = torch.zeros(3)
    assert views.changed() == [0]


def test_a_view_that_is_kept_is_told_once() -> None:
    parameter = nn.Parameter(torch.zeros(4, 4))
    views = views_of([parameter])
    flat = torch.zeros(PAGE)
    kept = None
    for expected in ([0], [], []):
        views.attach(flat)
        kept = parameter[:2] if kept is None else kept
        assert views.referenced() == expected
        parameter.data = torch.zeros(4, 4)
        views.detach()
    assert kept is not None and kept.data_ptr() == flat.data_ptr()


# Writes


def in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(0.5)


def by_data(weight: torch.Tensor) -> None:
    weight.data = weight.data * 0.5


WRITES = [in_place, through_data, by_data]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("write", WRITES)
@every_placement
def test_a_write_inside_of_a_forward_is_refused(
    write: Callable[[torch.Tensor], None],
    requires_grad: bool,
    placement: dict[str, Any],
    wrap: Wrap,
) -> None:
    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        write(self.weight)
        return x @ self.weight

    model = wrap(Model(Weighted(act, requires_grad)), placement)
    with pytest.raises(
        infinity.ShardedParameterError,
        match=r"^special\.weight was changed in place inside of a forward",
    ):
        model(batch())
    model.special.act = lambda self, x: x @ self.weight.data  # reading it is all right
    with pytest.raises(
        infinity.ShardedParameterError,
        match=r"^special\.weight was changed in place inside of an earlier forward",
    ):
        model(batch())
    with infinity.gathered(model.special, write=True):
        pass
    model(batch())


def test_a_write_inside_of_a_forward_is_undone_while_an_update_is_being_written(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what the model uses next nor what the drive gets has anything of it."""
    forward_ended: dict[Unit, threading.Event] = {}
    held: dict[Checkout, Chunk] = {}
    apply, commit, release = Chunk.apply, Checkout.commit, Chunk.release

    def update(chunk: Chunk, *args: Any) -> None:
        apply(chunk, *args)
        if chunk.job.unit in forward_ended:
            held.update(dict.fromkeys(chunk.outs.values(), chunk))

    def write(out: Checkout, background: bool = False) -> None:
        if out not in held:
            commit(out, background)

    def retire(chunk: Chunk) -> None:
        if chunk in held.values():
            assert forward_ended[chunk.job.unit].wait(60)
            for kind, out in chunk.outs.items():
                if kind is not Kind.GRAD:
                    commit(out)
        release(chunk)

    monkeypatch.setattr(Chunk, "apply", update)
    monkeypatch.setattr(Checkout, "commit", write)
    monkeypatch.setattr(Chunk, "release", retire)

    def results(acts: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model = wrap(
            make(lambda: Model(Weighted(lambda self, x: x @ self.weight))), PLACEMENTS["nvme"]
        )
        engine, optimizer = infinity.engine(model), infinity.AdamW(model.parameters())
        unit = engine.units[0]
        weight = unit.blocks[Kind.PARAM]
        assert weight.moved_bytes == weight.nbytes and unit.facts.names == ("special.weight",)
        model(batch()).square().mean().backward()
        engine.drain()
        if acts:
            forward_ended[unit] = threading.Event()
        optimizer.step()
        optimizer.zero_grad()
        if acts:
            use, model.special.act = model.special.act, lambda self, x: in_place(self.weight)
            with pytest.raises(infinity.ShardedParameterError, match=r"^special\.weight was"):
                model(batch())
            model.special.act = use
            assert weight.copy.state is CopyState.UPDATING
            forward_ended[unit].set()
        home = engine.state_dict()["special.weight"]
        with infinity.gathered(model.special):
            return home, model.special.weight.detach().clone()

    expected, *others = *results(acts=False), *results(acts=True)
    assert all(torch.equal(other, expected) for other in others)


def test_data_assigned_in_gathered_is_taken_over(wrap: Wrap) -> None:
    """As `parameter.data = tensor` of plain PyTorch; the parameter keeps its shape and dtype."""
    model = wrap(make(lambda: Model(Weighted(lambda self, x: x @ self.weight))), {})
    weight, before = model.special.weight, model.state_dict()["special.weight"].clone()
    with infinity.gathered(model.special, write=True):
        weight.data = weight.data + 1
        assert torch.equal(weight, before + 1)
    assert torch.equal(model.state_dict()["special.weight"], before + 1)
    with (
        pytest.raises(infinity.ShardedParameterError, match="weight was given data of another"),
        infinity.gathered(model.special, write=True),
    ):
        weight.data = weight.data.double()
    assert torch.equal(model.state_dict()["special.weight"], before + 1)


@pytest.mark.parametrize("write", WRITES)
@every_placement
def test_a_write_in_gathered_without_write_is_refused_and_undone(
    write: Callable[[torch.Tensor], None], placement: dict[str, Any], wrap: Wrap
) -> None:
    model = wrap(
        make(lambda: Model(Weighted(lambda self, x: x @ self.weight))), placement, precision="bf16"
    )
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    x = batch().bfloat16()

    def results() -> list[torch.Tensor]:
        with torch.no_grad():
            found = [model(x), model(x)]
        masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
        return [*found, *infinity.engine(model).state_dict().values(), *masters]

    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = results()
    changed = r"^special\.weight was changed inside of infinity\.gathered"
    with (
        pytest.raises(infinity.ShardedParameterError, match=changed),
        infinity.gathered(model.special),
    ):
        write(model.special.weight)
    assert all(map(torch.equal, before, results()))


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_write_in_gathered_reaches_the_masters_on_every_placement(
    precision: str, raises: bool, wrap: Wrap
) -> None:
    def results(placement: dict[str, Any], **options: Any) -> list[torch.Tensor]:
        model = wrap(
            make(lambda: Model(Weighted(lambda self, x: x @ self.weight))),
            placement,
            precision=precision,
            **options,
        )
        optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
        x = batch().to(next(model.parameters()).dtype)

        def step() -> None:
            optimizer.scale(model(x).float().square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        try:
            with infinity.gathered(model.special, write=True), torch.no_grad():
                model.special.weight[:2] = 0.3
                if raises:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        written = infinity.engine(model).state_dict()["special.weight"]
        assert (written[:2] == torch.tensor(0.3, dtype=x.dtype)).all()
        assert not (written[2:] == torch.tensor(0.3, dtype=x.dtype)).any()
        step()
        states = optimizer.state_dict()["state"].values()
        return [
            *infinity.engine(model).state_dict().values(),
            *(s["master"] for s in states if "master" in s),
        ]

    expected = results(PLACEMENTS["nvme"])
    for name in ("nvme, room for all", "host", "device", "device cache"):
        assert all(map(torch.equal, expected, results(PLACEMENTS[name]))), name
    if precision == "bf16":
        assert all(map(torch.equal, expected, results(PLACEMENTS["device"], split_master=False)))


# Backward


class Spanning(nn.Module):
    """A checkpoint over a module that it uses twice, with another one between."""

    def __init__(self, between: str, reentrant: bool, frozen: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.scales = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH), requires_grad=not frozen) for _ in range(2)
        )
        self.between, self.reentrant = between, reentrant

    def span(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[4](x) * self.scales[0]
        if self.between == "checkpoint":
            x = checkpoint(self.blocks[5], x, use_reentrant=self.reentrant)
        elif self.between == "two":
            x = checkpoint(
                lambda y: self.blocks[3](self.blocks[5](y)), x, use_reentrant=self.reentrant
            )
        return self.blocks[4](x) * self.scales[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:4]:
            x = block(x)
        return checkpoint(self.span, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("between", ["nothing", "checkpoint", "two"])
@pytest.mark.parametrize("units", [None, [nn.Linear], [Spanning]], ids=["blocks", "layers", "one"])
def test_a_checkpoint_over_a_module_that_is_used_twice(
    units: list[type[nn.Module]] | None, between: str, reentrant: bool, frozen: bool, wrap: Wrap
) -> None:
    if units == [Spanning]:
        as_plain(
            lambda: nn.Sequential(Spanning(between, reentrant, frozen)),
            wrap,
            {"poison": True},
            units=units,
        )
    else:
        as_plain(lambda: Spanning(between, reentrant, frozen), wrap, {"poison": True}, units=units)


@pytest.mark.parametrize(
    "hooks", [lambda: save_on_cpu(), lambda: saved_tensors_hooks(lambda t: t, lambda t: t)]
)
@every_placement
def test_hooks_of_the_model_around_modules(
    hooks: Callable[[], saved_tensors_hooks], placement: dict[str, Any], wrap: Wrap
) -> None:
    class Hooked(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with hooks():
                return super().forward(x)

    as_plain(lambda: Hooked(nn.LayerNorm(WIDTH)), wrap, placement)


@every_placement
def test_hooks_that_keep_a_view_inside_of_a_module_are_refused(
    placement: dict[str, Any], wrap: Wrap
) -> None:
    def act(self: Weighted, x: torch.Tensor) -> torch.Tensor:
        # A name of torch's that nothing looks at.
        torch.autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
        try:
            return nn.functional.linear(x, self.weight)
        finally:
            torch.autograd._pop_saved_tensors_default_hooks()

    model = wrap(Model(Weighted(act)), placement)
    with pytest.raises(
        infinity.ShardedParameterError,
        match=r"^Model leaves a view of special\.weight.*hooks on saved tensors",
    ):
        model(batch().requires_grad_())


class Gives(torch.autograd.Function):
    """Its backward returns the saved weight as a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0][: gradients[0].shape[0]], None


class KeepsView(torch.autograd.Function):
    """Keeps a view as an attribute and not by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.kept = weight.view(-1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.kept.sum(), None


@every_placement
def test_custom_functions_that_keep_a_view(placement: dict[str, Any], wrap: Wrap) -> None:
    """One that the node keeps goes and comes; one that is given as a gradient is refused."""

    def build() -> nn.Module:
        return Model(Weighted(lambda self, x: KeepsView.apply(x, self.weight)))

    as_plain(build, wrap, placement)
    model = wrap(Model(Weighted(lambda self, x: Gives.apply(x, self.weight))), placement)
    leaf = batch().requires_grad_()
    with pytest.raises(
        infinity.ShardedParameterError, match="outlives the backward: as a gradient"
    ):
        model.special(leaf).sum().backward()
    leaf.grad = None
    infinity.engine(model).zero_grad()


@every_placement
def test_a_view_that_outlives_its_backward_is_told_of_once(
    placement: dict[str, Any], wrap: Wrap
) -> None:
    model = wrap(Model(Weighted(lambda self, x: Gives.apply(x, self.weight))), placement)
    leaf = batch().requires_grad_()
    with pytest.raises(infinity.ShardedParameterError, match="outlives the backward"):
        model.special(leaf).sum().backward()
    assert leaf.grad is not None
    model.special.act = lambda self, x: x @ self.weight
    for _ in range(2):
        model.special(batch().requires_grad_()).sum().backward()


class Nested(torch.autograd.Function):
    """Runs a backward of its own in the middle of another one, between two uses of what it
    saved."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.output = run(ctx.inner)
        ctx.save_for_backward(weight)
        return (ctx.output.detach() * weight.sum()).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight = ctx.saved_tensors[0]
        before = weight.sum()
        torch.autograd.backward(ctx.output, gradients[0] * before)
        after = weight.sum()  # the inner backward has used other units meanwhile
        assert torch.equal(before, after)
        return (
            ctx.inner.grad,
            torch.ones_like(weight) * (gradients[0] * ctx.output.detach()).sum(),
            None,
        )


@every_placement
def test_what_a_node_uses_stays_through_a_backward_inside_of_it(
    placement: dict[str, Any], wrap: Wrap
) -> None:
    class Outer(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def run(y: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    y = block(y)
                return y

            return Nested.apply(x * 1.0, self.special.weight, run)

    model, plain = (make(lambda: Outer(Weighted(stash))) for _ in range(2))
    wrap(model, placement)
    for made in (model, plain):
        made(batch().requires_grad_()).square().mean().backward()
    for name, parameter in plain.named_parameters():
        found = infinity.engine(model).gradient(dict(model.named_parameters())[name])
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6)


# Threads


def run_beside(work: Callable[[], Any]) -> BaseException | None:
    """What `work` raises on another thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_second_thread_is_refused_while_the_first_is_inside(when: str, wrap: Wrap) -> None:
    model = wrap(Model(Weighted(lambda self, x: x @ self.weight)), {})
    optimizer = infinity.AdamW(model.parameters())
    refused: list[BaseException | None] = []

    def attempt() -> None:
        def read() -> None:
            with infinity.gathered(model.special):
                pass

        refused.extend(
            run_beside(work)
            for work in (
                lambda: model(batch()),
                lambda: model.blocks[3](batch()),
                optimizer.step,
                read,
            )
        )

    if when == "forward":
        handle = model.blocks[4].register_forward_hook(lambda *_: attempt())
    else:
        handle = model.blocks[4].register_full_backward_hook(lambda *_: attempt())
    model(batch().requires_grad_()).sum().backward()
    handle.remove()
    assert len(refused) == 4
    for error in refused:
        assert isinstance(error, RuntimeError)
        assert re.search(
            r"on thread second, while MainThread runs a forward or backward.*lock around both",
            str(error),
        )
    optimizer.step()
    optimizer.zero_grad()
    # One after the other is all right.
    assert run_beside(lambda: model(batch()).sum().backward()) is None
    model(batch())


class Littering(torch.autograd.Function):
    """A product whose backward leaves its weight in a cycle of objects."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        litter: list[Any] = [weight]
        litter.append(litter)
        return gradient @ weight.T, x.T @ gradient


class LitteringBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Littering.apply(x, self.weight)


def test_garbage_that_keeps_views_is_collected_where_its_memory_is_needed(wrap: Wrap) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(LitteringBlock() for _ in range(8)))
    model = wrap(copy.deepcopy(plain), PLACEMENTS["nvme"])
    x = torch.randn(4, WIDTH)
    plain(x).sum().backward()
    gc.disable()
    try:
        model(x).sum().backward()
    finally:
        gc.enable()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(infinity.engine(model).gradient(found), expected.grad), name


class Failing(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")


def write_gathered(engine: infinity.Engine, parameter: nn.Parameter, where: Path) -> None:
    with infinity.gathered(parameter, write=True), torch.no_grad():
        parameter.fill_(2)


def set_value(engine: infinity.Engine, parameter: nn.Parameter, where: Path) -> None:
    infinity.set(parameter, "value", torch.full(parameter.shape, 2.0))


def load_checkpoint(engine: infinity.Engine, parameter: nn.Parameter, where: Path) -> None:
    engine.load_checkpoint(where)


@pytest.mark.parametrize("write", [write_gathered, set_value, load_checkpoint])
@every_placement
def test_a_backward_that_failed_is_not_in_the_way_of_a_write(
    placement: dict[str, Any], write: Callable[..., None], wrap: Wrap, tmp_path: Path
) -> None:
    model = Model(nn.Identity(), lambda special, x: Failing.apply(x))
    parameter = model.blocks[0].linear.weight
    engine = infinity.engine(wrap(model, placement))
    with infinity.gathered(parameter, write=True), torch.no_grad():
        parameter.fill_(2)
    engine.save_checkpoint(tmp_path / "twos")
    if write is not load_checkpoint:
        with infinity.gathered(parameter, write=True), torch.no_grad():
            parameter.fill_(1)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    write(engine, parameter, tmp_path / "twos")
    with infinity.gathered(parameter):
        assert (parameter == 2).all()

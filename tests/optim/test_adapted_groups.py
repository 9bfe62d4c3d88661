"""`infinity.adapt` gives an optimizer what it keeps in its group, and refuses one that looks at all
parameters together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.optim.trial import try_out
from support.configs import config_of
from support.pairs import WIDTH, Side, built, close

pytestmark = pytest.mark.usefixtures("one_thread")


class Rule(torch.optim.Optimizer):
    """Steps by `change(parameter, gradient, group)`."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                self.begin(group)
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(self.change(p, p.grad, group), alpha=-group["lr"])

    def begin(self, group: dict[str, Any]) -> None:
        """Nothing."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad


class Counting(Rule):
    """Keeps its number of steps in the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, k=0, total=torch.zeros(()), rates=[])

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1
        group["total"].add_(group["lr"])
        group["rates"].append(group["lr"])

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad / (group["k"] + group["total"] + len(group["rates"]))


class CountingItself(Rule):
    """Keeps its number of steps to itself."""

    steps = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.steps += 1

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad / self.steps


class CountingWithGradients(Counting):
    """Counts steps with a gradient alone."""

    def begin(self, group: dict[str, Any]) -> None:
        if any(p.grad is not None for p in group["params"]):
            super().begin(group)


class ByNorm(Rule):
    """Divides by the norm of all gradients, where it is large."""

    def begin(self, group: dict[str, Any]) -> None:
        grads = [p.grad for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.ones(())
        self.factor = 1 / norm.clamp(min=1.0)

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad * self.factor


class ByDistance(Rule):
    """Estimates one number of all parameters, and keeps it in the group."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr, d=1e-6)

    def begin(self, group: dict[str, Any]) -> None:
        found = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        group["d"] = max(group["d"], 1e-6 * found)

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad * group["d"]


class Noisy(Rule):
    """Adds random numbers, which go to parameters in their order."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad + 0.01 * torch.randn_like(p)


class ByPosition(Rule):
    """Treats the first parameter as another one."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return grad * (2 if p is group["params"][0] else 1)


class Momentum(Rule):
    """One parameter at a time."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        kept = self.state[p].setdefault("kept", torch.zeros_like(p))
        self.state[p]["number"] = self.state[p].get("number", 0) + 1
        return kept.mul_(0.9).add_(grad) / self.state[p]["number"]


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Callable[..., tuple[Side, Side]]]:
    engines = []

    def make(kind: type[torch.optim.Optimizer], tier: str = "nvme", **given: Any) -> Any:
        options = {"gpu_memory": "4MiB", "cpu_memory": "8MiB", "algorithm": "other"}
        model = infinity.wrap(built(), config_of(nvme=tmp_path, optimizer=tier, **options))
        engines.append(infinity.engine(model))
        plain = built()
        return (
            Side(model, infinity.adapt(kind, list(model.parameters()), **given), engines[-1]),
            Side(plain, kind(list(plain.parameters()), **given), None),
        )

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", [Counting, CountingItself, CountingWithGradients, Momentum])
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_what_is_counted_in_the_group_is_counted_once(
    kind: type[torch.optim.Optimizer], tier: str, sides: Callable[..., tuple[Side, Side]]
) -> None:
    both = sides(kind, tier)
    for side in both:
        side.train(range(2))
        side.optimizer.step()  # without gradients
        side.model.uses_late = True  # whose unit had none before
        side.train(range(2, 4))
        side.optimizer.param_groups[0]["lr"] = 0.02
        side.train(range(4, 6))
    close(*both)
    mine, expected = (side.optimizer.param_groups[0] for side in both)
    for name, value in expected.items():
        assert name == "params" or mine[name] == value


@pytest.mark.parametrize("kind", [ByNorm, ByDistance, Noisy, ByPosition])
def test_one_that_looks_at_all_parameters_is_refused(
    kind: type[torch.optim.Optimizer], sides: Callable[..., tuple[Side, Side]]
) -> None:
    with pytest.raises(infinity.ConfigError, match=f"^{kind.__name__} of .* computes other"):
        sides(kind)


def test_one_that_fails_is_refused(sides: Callable[..., tuple[Side, Side]]) -> None:
    class Failing(Rule):
        def begin(self, group: dict[str, Any]) -> None:
            raise ArithmeticError("made to fail")

    with pytest.raises(infinity.ConfigError, match="that failed: made to fail"):
        sides(Failing)


def test_the_trial_leaves_random_numbers_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    try_out(torch.optim.RMSprop, {"lr": 0.0}, {})
    assert torch.equal(torch.random.get_rng_state(), before)


OF_TORCH: dict[str, dict[str, Any]] = {
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {},
    "RAdam": {"decoupled_weight_decay": True},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "AdamW": {"amsgrad": True},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_those_of_torch_are_not(name: str) -> None:
    try_out(getattr(torch.optim, name), {"lr": 1e-2, **OF_TORCH[name]}, {})


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_its_states_are_live(tier: str, sides: Callable[..., tuple[Side, Side]]) -> None:
    both = sides(torch.optim.RMSprop, tier, lr=1e-2)
    for side in both:
        assert not side.optimizer.state
        side.train(range(2))
        state, p = side.optimizer.state, side.model.up.weight
        assert sorted(state[p]) == ["square_avg", "step"] and len(state) == 5
        state[p]["square_avg"].mul_(4.0)
        state[side.model.head.weight] = {}
        state[side.model.down.weight]["square_avg"] = torch.ones(WIDTH, 24)
        side.train(range(2, 4))
        saved = side.optimizer.state_dict()
        saved["state"][1]["square_avg"].mul_(2.0)
        side.train(range(4, 6))
        side.optimizer.state.clear()
        side.train(range(6, 8))
    close(*both)


def test_states_that_are_there_at_once_are_seen(
    sides: Callable[..., tuple[Side, Side]],
) -> None:
    both = sides(torch.optim.Adagrad, initial_accumulator_value=0.1)
    for side in both:
        assert float(side.optimizer.state[side.model.late.weight]["sum"].max()) == pytest.approx(
            0.1
        )
        side.optimizer.state[side.model.up.weight]["sum"].fill_(0.5)
        side.train(range(2))
    close(*both)


def test_a_python_value_is_that_of_now(sides: Callable[..., tuple[Side, Side]]) -> None:
    ours, theirs = sides(Momentum)
    for side in (ours, theirs):
        side.train(range(3))
        entry = side.optimizer.state[side.model.up.weight]
        assert entry["number"] == 3
        entry["number"] = 1
        side.train(range(3, 5))
    close(ours, theirs)

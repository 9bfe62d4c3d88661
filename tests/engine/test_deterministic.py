"""`Config(deterministic=True)`: torch's deterministic algorithms are on from `wrap` on, and a
process that has used CUDA without what they need is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import infinity
from infinity.device import CUBLAS_WORKSPACE, ComputeDevice

CONFIG = infinity.Config(deterministic=True, parameters="cpu", optimizer="cpu")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    yield
    torch.use_deterministic_algorithms(False)


class OfAGpu(ComputeDevice):
    """A device that says that it is a GPU's, for what needs none."""

    had_begun = False

    def __init__(self, kind: object = "cpu") -> None:
        super().__init__("cpu")
        self._had_begun = self.had_begun
        self.torch = torch.device("cuda")


def test_operators_that_differ_from_run_to_run_are_refused_by_torch() -> None:
    with infinity.engine(infinity.wrap(nn.Linear(4, 4), CONFIG)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert CUBLAS_WORKSPACE not in os.environ, "the CPU needs none"
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.empty(4).put_(torch.tensor([0]), torch.tensor([1.0]))


def test_a_wrap_that_is_refused_leaves_torch_alone() -> None:
    with pytest.raises(infinity.BudgetError):
        infinity.wrap(nn.Linear(4, 4), CONFIG.model_copy(update={"gpu_memory": 0}))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("value", ["", ":4096:8", ":16:8", ":0:0"])
@pytest.mark.parametrize("had_begun", [False, True])
def test_cublas_needs_its_variable_before_cuda_begins(
    value: str, had_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, value)
    monkeypatch.setattr(OfAGpu, "had_begun", had_begun)
    works = value in (":4096:8", ":16:8") or (value == "" and not had_begun)
    device = OfAGpu()
    assert (device.nondeterminism() == "") is works
    if works:
        device.compute_deterministically()
        assert os.environ[CUBLAS_WORKSPACE] == (value or ":4096:8")
        return
    monkeypatch.setattr("infinity.build.ComputeDevice", OfAGpu)
    said = f"^deterministic=True: {CUBLAS_WORKSPACE} is {value or 'not set'}; set it to :4096:8"
    with pytest.raises(infinity.ConfigError, match=said):
        infinity.wrap(nn.Linear(4, 4), CONFIG)

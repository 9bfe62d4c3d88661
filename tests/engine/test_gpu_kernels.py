"""Whether the optimizer kernels run on a GPU, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity import native
from infinity.device import ComputeDevice, find_kernels


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "the package was built without nvcc"),
        (lambda device: f"no kernel image is available for device {device}", "device 3"),
    ],
)
def test_kernels_that_cannot_run_on_a_gpu_are_told(
    module: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = None if module is None else SimpleNamespace(unavailable_reason=module)
    monkeypatch.setattr(native, "cuda", lambda: made)
    assert not find_kernels(3)
    (text,) = caplog.messages
    assert text.startswith("the optimizer kernels cannot run on GPU 3, so the CPU updates all")
    assert text.endswith(reason)


def test_kernels_that_run_are_no_matter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = SimpleNamespace(unavailable_reason=lambda device: "")
    monkeypatch.setattr(native, "cuda", lambda: made)
    assert find_kernels(0)
    assert not caplog.messages


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_ignores_captures_on_its_own_device(
    kind: str, built: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins on the first device: on another one a call would take memory of that."""
    calls: list[Any] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        calls.append(device)
        yield
        calls.append("back")

    def ignore() -> None:
        calls.append("ignore")
        if fails:
            raise RuntimeError("CUDA is broken")

    module = SimpleNamespace(ignore_captures=ignore) if built else None
    monkeypatch.setattr(native, "cuda", lambda: module)
    device = ComputeDevice("cpu")
    vars(device).update(torch=torch.device(kind, 1), _runtime=SimpleNamespace(device=on))
    device.begin_thread()
    wanted = [device.torch, "ignore", *([] if fails else ["back"])]
    assert calls == (wanted if built and kind == "cuda" else [])


def test_without_a_driver_the_kernels_say_why() -> None:
    cuda = native.cuda()
    if cuda is None or torch.cuda.is_available():
        pytest.skip("needs the CUDA kernels and no GPU")
    for device in (0, 7):
        assert "CUDA" in cuda.unavailable_reason(device)

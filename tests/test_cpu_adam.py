"""The CPU optimizer kernels: one result, bit for bit, whatever the instruction set, threads, chunking and address."""

from __future__ import annotations

import math
import threading
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import native

kernels = native.cpu_adam()

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIMD = [
    pytest.param(isa, marks=pytest.mark.skipif(not kernels.has_isa(isa), reason=f"this CPU lacks {isa}"))
    for isa in ("avx2", "avx512")
]
ISAS = ["scalar", *SIMD]
POOLS = {threads: kernels.Pool(threads) for threads in range(1, 6)}
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, -3.4028235e38, math.inf, -math.inf, math.nan]


@dataclass(frozen=True)
class Hyper:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    bias_correction1: float = 1 - 0.9**3
    bias_correction2_sqrt: float = math.sqrt(1 - 0.999**3)
    grad_scale: float = 0.37
    decoupled: bool = True


HYPERS = [
    Hyper(),
    Hyper(decoupled=False),
    Hyper(weight_decay=0.0, grad_scale=1.0),
    Hyper(lr=0.0, weight_decay=0.0, eps=0.0),
    Hyper(lr=1e30, grad_scale=-1e-40),
]


@dataclass
class State:
    grad: torch.Tensor | None
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    out: torch.Tensor | None

    def clone(self) -> State:
        return State(*(None if t is None else t.clone() for t in (self.grad, *self.results())))

    def results(self) -> tuple[torch.Tensor | None, ...]:
        return (self.master, self.exp_avg, self.exp_avg_sq, self.out)

    def bits(self) -> list[bytes]:
        return [b"" if t is None else bits(t).numpy().tobytes() for t in self.results()]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with every NaN alike."""
    return bits(torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor))


def random_bits(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32).view(torch.float32)


def random_values(n: int, generator: torch.Generator) -> torch.Tensor:
    """Ordinary values, arbitrary bit patterns and special values in one tensor."""
    values = torch.randn(n, generator=generator)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n,), generator=generator)]
    kind = torch.randint(4, (n,), generator=generator)
    return torch.where(kind == 0, random_bits(n, generator), torch.where(kind == 1, special, values))


def random_state(n: int, grad: str = "fp32", out: str = "fp32", seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    values = [random_values(n, generator) for _ in range(4)]
    return State(values[0].to(DTYPES[grad]), values[1], values[2], values[3], torch.empty(n, dtype=DTYPES[out]))


def name_of(tensor: torch.Tensor | None) -> str:
    return "fp32" if tensor is None else next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)


def address(tensor: torch.Tensor | None, offset: int = 0) -> int:
    return 0 if tensor is None else tensor.data_ptr() + offset * tensor.element_size()


def step(state: State, hyper: Hyper, isa: str = "scalar", threads: int = 1, begin: int = 0, end: int | None = None) -> None:
    end = state.master.numel() if end is None else end
    kernels.adam_step(
        address(state.grad, begin), name_of(state.grad),
        address(state.master, begin), address(state.exp_avg, begin), address(state.exp_avg_sq, begin),
        address(state.out, begin), name_of(state.out), end - begin,
        **vars(hyper), isa=isa, pool=POOLS[threads],
    )  # fmt: skip


def stepped(state: State, hyper: Hyper, isa: str = "scalar", threads: int = 1) -> State:
    state = state.clone()
    step(state, hyper, isa, threads)
    return state


def reference(state: State, hyper: Hyper) -> State:
    """The formula of cpu_adam.h in torch operations that are each rounded once, on constants rounded once from double."""
    lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_scale = astuple(hyper)[:-1]
    fp32 = torch.tensor
    grad = torch.zeros_like(state.master) if state.grad is None else state.grad.float()
    g, w = grad * fp32(grad_scale), state.master
    if hyper.weight_decay and hyper.decoupled:
        w = w * fp32(1 - lr * weight_decay)
    elif hyper.weight_decay:
        g = g + fp32(weight_decay) * w
    m = fp32(beta1) * state.exp_avg + fp32(1 - beta1) * g
    v = fp32(beta2) * state.exp_avg_sq + (fp32(1 - beta2) * g) * g
    # torch.sqrt of fp32 may be off by one place (it calls MKL). From double, which has more than twice the bits, the
    # rounding to fp32 is right.
    d = torch.sqrt(v.double()).float() / fp32(correction2) + fp32(eps)
    w = w - fp32(lr / correction1) * (m / d)
    return State(state.grad, w, m, v, None if state.out is None else w.to(state.out.dtype))


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("isa", SIMD)
def test_simd_equals_scalar(isa: str, grad: str, out: str) -> None:
    for seed, hyper in enumerate(HYPERS):
        state = random_state(20011, grad, out, seed)
        assert stepped(state, hyper, isa).bits() == stepped(state, hyper, "scalar").bits()


@pytest.mark.parametrize("grad", [*DTYPES, None])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("hyper", HYPERS)
def test_equals_the_formula_in_torch(hyper: Hyper, isa: str, grad: str | None) -> None:
    for out in DTYPES:
        state = random_state(10007, grad or "fp32", out, seed=7)
        state = replace(state, grad=state.grad if grad else None)
        expected, actual = reference(state, hyper), stepped(state, hyper, isa, threads=2)
        for want, got in zip(expected.results(), actual.results(), strict=True):
            assert torch.equal(one_nan(want), one_nan(got))


def test_stored_nans_have_one_bit_pattern() -> None:
    state = stepped(random_state(50_000, out="bf16"), Hyper())
    for tensor, pattern in zip(state.results(), [0x7FC00000] * 3 + [0x7FC0], strict=True):
        assert bits(tensor)[tensor.isnan()].unique().tolist() == [pattern]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(0, 700), threads=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_threads_chunks_and_addresses_do_not_change_bits(data: st.DataObject, n: int, threads: int, seed: int) -> None:
    grad, out = data.draw(st.sampled_from([*DTYPES])), data.draw(st.sampled_from([*DTYPES]))
    hyper = data.draw(st.sampled_from(HYPERS))
    isa = data.draw(st.sampled_from([isa for isa in ("scalar", "avx2", "avx512") if kernels.has_isa(isa)]))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=4))), n]
    shift = data.draw(st.integers(0, 16))
    state = random_state(n + shift, grad, out, seed)
    expected = stepped(state, hyper)

    actual = state.clone()
    step(actual, hyper, end=shift)
    for begin, end in pairwise(cuts):
        step(actual, hyper, isa, threads, shift + begin, shift + end)
    assert actual.bits() == expected.bits()


@pytest.mark.parametrize("isa", ISAS)
def test_writes_nothing_outside_the_range(isa: str) -> None:
    for n in (1, 8, 15, 16, 17, 100):
        state = random_state(n + 2, out="bf16")
        before = state.clone()
        step(state, Hyper(), isa, 3, 1, n + 1)
        for old, new in zip(before.results()[:3], state.results()[:3], strict=True):
            assert torch.equal(bits(old)[[0, -1]], bits(new)[[0, -1]])


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("isa", ISAS)
def test_close_to_torch_optimizers(isa: str, decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    sign = torch.randint(0, 2, (4096,), generator=generator) * 2 - 1
    start = sign * (torch.rand(4096, generator=generator) + 0.5)  # away from zero, where a relative bound means nothing
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    parameter = torch.nn.Parameter(start.clone())
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([parameter], foreach=False, **options)
    state = State(None, start.clone(), torch.zeros(4096), torch.zeros(4096), None)
    for t in range(1, 21):
        state.grad = parameter.grad = torch.randn(4096, generator=generator)
        optimizer.step()
        hyper = Hyper(
            weight_decay=0.01, grad_scale=1.0, decoupled=decoupled,
            bias_correction1=1 - 0.9**t, bias_correction2_sqrt=math.sqrt(1 - 0.999**t),
        )  # fmt: skip
        step(state, hyper, isa, threads=3)
    torch.testing.assert_close(state.master, parameter.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("out", ["bf16", "fp16"])
@pytest.mark.parametrize("isa", ISAS)
def test_output_conversion_equals_torch(isa: str, out: str) -> None:
    patterns = torch.arange(2**16).to(torch.int16)
    widened = [patterns.view(torch.bfloat16).float(), patterns.view(torch.float16).float()]
    # One place either side of each representable value and of each halfway point between two.
    halfway = [bits(widened[0]) + 0x8000, bits(widened[1]) + 0x1000]
    near = [t + delta for t in (bits(widened[0]), bits(widened[1]), *halfway) for delta in (-1, 0, 1)]
    subnormal_ties = (torch.arange(2**12) * 2.0**-25).float()
    random = random_bits(200_001, torch.Generator().manual_seed(5))
    values = torch.cat([*widened, *(t.view(torch.float32) for t in near), subnormal_ties, -subnormal_ties, random])
    zeros = torch.zeros_like(values)
    state = State(None, values, zeros, zeros.clone(), torch.empty_like(values, dtype=DTYPES[out]))
    result = stepped(state, Hyper(lr=0.0, weight_decay=0.0), isa)
    assert torch.equal(one_nan(result.master), one_nan(values))
    assert torch.equal(one_nan(result.out), one_nan(values.to(DTYPES[out])))


@pytest.mark.parametrize("grad", ["bf16", "fp16"])
@pytest.mark.parametrize("isa", ISAS)
def test_gradient_conversion_equals_torch(isa: str, grad: str) -> None:
    values = torch.arange(2**16).to(torch.int16).view(DTYPES[grad])
    zeros = torch.zeros(2**16)
    state = State(values, zeros, zeros.clone(), zeros.clone(), None)
    result = stepped(state, Hyper(beta1=0.0, weight_decay=0.0, grad_scale=1.0), isa)
    # beta1 * m + 1 * g is g, except that 0 + -0 is 0.
    assert torch.equal(one_nan(result.exp_avg), one_nan(values.float() + 0.0))


@pytest.mark.parametrize("isa", ISAS)
def test_subnormals_survive_a_caller_that_flushes_them(isa: str) -> None:
    state = random_state(5000, "fp16", "fp16", seed=2)
    tiny = State(None, torch.full((5000,), 1e-40), torch.full((5000,), 1e-40), torch.full((5000,), 1e-40), None)
    expected = [stepped(s, Hyper()).bits() for s in (state, tiny)]
    norm = squared_norm(tiny.master)
    assert norm > 0
    torch.set_flush_denormal(True)
    try:
        actual = [stepped(s, Hyper(), isa, threads).bits() for threads in (1, 3) for s in (state, tiny)]
        norms = [squared_norm(tiny.master, isa=isa, threads=threads) for threads in (1, 3)]
        still_flushing = (torch.full((1,), 1e-38) * 0.1).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert actual == expected * 2
    assert norms == [norm, norm]
    assert still_flushing


@pytest.mark.parametrize("isa", ISAS)
def test_output_may_be_the_master_or_absent(isa: str) -> None:
    state = random_state(1001)
    expected = stepped(state, Hyper(), isa).bits()
    absent = stepped(replace(state, out=None), Hyper(), isa)
    assert absent.bits() == [*expected[:3], b""]
    state.out = state.master
    step(state, Hyper(), isa, 2)
    assert state.bits() == [*expected[:3], expected[0]]


def squared_norm(values: torch.Tensor, carry: float = 0.0, isa: str = "scalar", threads: int = 1) -> float:
    return kernels.squared_norm(values.data_ptr(), name_of(values), values.numel(), carry, isa, POOLS[threads])


def norm_specification(values: torch.Tensor, carry: float) -> float:
    for block in values.double().split(kernels.NORM_BLOCK):
        padded = torch.nn.functional.pad(block, (0, -len(block) % 8))  # + 0.0 changes no lane
        lanes = torch.zeros(8, dtype=torch.float64)
        for row in padded.view(-1, 8):
            lanes += row * row
        total = 0.0
        for lane in lanes.tolist():
            total += lane
        carry += total
    return carry


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_squared_norm_value(isa: str, dtype: str) -> None:
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(2 * kernels.NORM_BLOCK + 1003, generator=generator)
    largest, smallest = {"fp32": (1e38, 1e-42), "bf16": (1e38, 1e-39), "fp16": (1e4, 1e-6)}[dtype]
    for scale in (1.0, largest, smallest):
        scaled = (values * scale).clamp(-3 * largest, 3 * largest).to(DTYPES[dtype])
        exact = math.fsum(x * x for x in scaled.double().tolist())
        assert squared_norm(scaled, isa=isa, threads=2) == pytest.approx(exact, rel=1e-12)
        assert squared_norm(scaled, 0.1 * exact, isa, 3) == norm_specification(scaled, 0.1 * exact)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(0, 90_000), threads=st.integers(1, 5), dtype=st.sampled_from([*DTYPES]))
def test_squared_norm_does_not_depend_on_cuts(data: st.DataObject, n: int, threads: int, dtype: str) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DTYPES[dtype])
    expected = squared_norm(values, 0.1)
    isa = data.draw(st.sampled_from([isa for isa in ("scalar", "avx2", "avx512") if kernels.has_isa(isa)]))
    blocks = -(-n // kernels.NORM_BLOCK)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, blocks), max_size=3))), blocks]
    carry = 0.1
    for begin, end in pairwise(cuts):
        carry = squared_norm(values[begin * kernels.NORM_BLOCK : end * kernels.NORM_BLOCK], carry, isa, threads)
    assert carry.hex() == expected.hex()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_squared_norm_propagates_inf_and_nan(isa: str, dtype: str) -> None:
    values = torch.ones(40_001, dtype=DTYPES[dtype])
    for index in (0, 20_000, 40_000):
        values[index] = -math.inf
        assert squared_norm(values, isa=isa, threads=2) == math.inf
        values[index] = math.nan
        assert math.isnan(squared_norm(values, isa=isa, threads=2))
        values[index] = 1
    assert math.isnan(squared_norm(values, math.nan, isa))
    assert squared_norm(values, math.inf, isa) == math.inf


def test_several_threads_share_a_pool() -> None:
    states = [random_state(30_011, seed=seed) for seed in range(4)]
    expected = [stepped(state, Hyper()).bits() for state in states]
    callers = [threading.Thread(target=step, args=(state, Hyper(), kernels.best_isa(), 3)) for state in states]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [state.bits() for state in states] == expected


def test_wrong_arguments_are_refused() -> None:
    state, pool = random_state(4), POOLS[1]
    good = [address(state.grad), "fp32", *map(address, (state.master, state.exp_avg, state.exp_avg_sq, state.out)), "fp32", 4]
    keywords = {**vars(Hyper()), "isa": "scalar", "pool": pool}
    before = state.bits()
    for position, wrong in [(0, good[0] + 2), (1, "fp64"), (2, 0), (3, 0), (4, 0), (5, good[5] + 1), (6, "float")]:
        arguments = [*good[:position], wrong, *good[position + 1 :]]
        with pytest.raises(ValueError):
            kernels.adam_step(*arguments, **keywords)
    with pytest.raises(ValueError, match="instruction set"):
        kernels.adam_step(*good, **{**keywords, "isa": "sse"})
    for isa in ("avx2", "avx512"):
        if not kernels.has_isa(isa):
            with pytest.raises(ValueError, match="lacks"):
                kernels.adam_step(*good, **{**keywords, "isa": isa})
    with pytest.raises(ValueError, match="instruction set"):
        kernels.has_isa("neon")
    with pytest.raises(ValueError):
        kernels.squared_norm(0, "fp32", 1, 0.0, "scalar", pool)
    with pytest.raises(ValueError, match="at least one thread"):
        kernels.Pool(0)
    assert state.bits() == before
    assert kernels.has_isa(kernels.best_isa())
    assert POOLS[4].threads == 4
    assert kernels.squared_norm(0, "fp32", 0, 2.5, "scalar", pool) == 2.5

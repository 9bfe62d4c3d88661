"""The CPU optimizer kernels: one result, bit for bit, whatever the instruction set, threads,
chunking and address."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.device import add_alone
from infinity.optim.kernels import Kernels
from support.adam_chunks import (
    DTYPES,
    GUARD,
    HYPERS,
    MASTERS,
    POOLS,
    RULES,
    SUPERBLOCK,
    WIDTHS,
    WRONG,
    Case,
    Chunk,
    Hyper,
    coded_as,
    decoded,
    encode,
    encoded,
    join,
    kernels,
    make_chunk,
    random_bits,
    random_chunk,
    split,
)
from support.models import rounded
from support.optimizers import AdEMAMix

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ISAS = [isa for isa in ("scalar", "avx2", "avx512", "neon") if kernels.has_isa(isa)]


FORMATS = [
    Case(grad=grad, param=param, master=master, moments=moments)
    for (param, master), grad, moments in itertools.product(
        MASTERS, DTYPES, ("fp32", "bf16", "int8")
    )
]
CASES = [
    replace(FORMATS[i % len(FORMATS)], rule=rule, hyper=hyper)
    for i, (rule, hyper, _) in enumerate(itertools.product(RULES, HYPERS, range(4)))
]


def describe(case: Case) -> str:
    parts = case.rule, case.grad, case.param, case.master, case.moments, HYPERS.index(case.hyper)
    return "-".join(map(str, parts))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with every NaN alike."""
    return bits(torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor))


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_simd_equals_scalar(case: Case) -> None:
    for n in (3001, SUPERBLOCK + 700) if case.moments == "int8" else (3001,):
        chunk = random_chunk(case, n, CASES.index(case))
        expected = chunk.clone().update().bits()
        for isa in ISAS:
            for threads in (1, 3):
                assert chunk.clone().update(isa, threads).bits() == expected, (isa, threads)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(), n=st.integers(1, 3000), threads=st.integers(1, 5), seed=st.integers(0, 2**32)
)
def test_threads_chunks_and_addresses_do_not_change_bits(
    data: st.DataObject, n: int, threads: int, seed: int
) -> None:
    case = data.draw(st.sampled_from(CASES))
    chunk = random_chunk(case, n, seed)
    chunk.position = data.draw(st.sampled_from([0, 4096, 2**32 - 1024, 2**45]))
    expected = chunk.clone().update().bits()
    cuts = [
        0,
        *sorted(64 * cut for cut in data.draw(st.lists(st.integers(0, n // 64), max_size=4))),
        n,
    ]
    actual = chunk.moved(data.draw(st.integers(0, 16)))
    for begin, end in pairwise(cuts):
        actual.update(data.draw(st.sampled_from(ISAS)), threads, begin, end)
    assert actual.bits() == expected


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(), n=st.integers(1, 5000), threads=st.integers(1, 3), seed=st.integers(0, 2**32)
)
def test_what_goes_to_another_place_is_what_would_be_here(
    data: st.DataObject, n: int, threads: int, seed: int
) -> None:
    """Any blocks, at any addresses: there is what an update in place makes, here what was here, and
    nothing around it changes."""
    case = data.draw(
        st.sampled_from([replace(case, rule=rule) for case in FORMATS for rule in RULES]),
        label="case",
    )
    begin = data.draw(st.integers(0, n // 32)) * 32
    end = data.draw(st.integers(begin, n)) if case.moments == "fp32" else n
    old = random_chunk(case, n, seed)
    names = [name for name in old.blocks if name != "grad"]
    away = [name for name in names if data.draw(st.booleans(), label=f"{name} goes away")]
    shift = 0 if case.moments == "int8" else data.draw(st.sampled_from([0, 0, 1, 3]))
    to = old.clone().moved(shift)
    to.blocks = {name: block.fill_(0xA5) for name, block in to.blocks.items() if name in away}
    expected, blank = old.clone().update(begin=begin, end=end), to.clone()
    here, isa = old.clone(), data.draw(st.sampled_from(ISAS))
    here.update(isa=isa, threads=threads, begin=begin, end=end, to=to)
    for name in old.blocks:
        assert here.bits()[name] == (old if name in away else expected).bits()[name], name
    for name in away:
        changed = to.blocks[name] != blank.blocks[name]
        assert not changed[: to.offset(name)].any() and not changed[-GUARD:].any(), name
        if end == begin:
            assert not changed.any(), name
        elif case.moments == "int8" and name in case.moments_used:
            ours, theirs = (
                decoded(chunk.view(name), "int8", coded_as(name), n)[begin:end]
                for chunk in (to, expected)
            )
            assert torch.equal(bits(ours), bits(theirs)), name
        else:
            width = len(to.view(name)) // n
            inside = slice(begin * width, end * width)
            assert torch.equal(to.view(name)[inside], expected.view(name)[inside]), name
            assert (
                not changed[: to.offset(name) + inside.start].any()
                and not changed[to.offset(name) + inside.stop :].any()
            ), name


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_noise_belongs_to_the_element_and_not_to_the_chunk(isa: str, moments: str) -> None:
    """Two chunks of one unit, updated at their positions, are what one chunk is."""
    n, cut = 2 * SUPERBLOCK, SUPERBLOCK
    case = Case(moments=moments)
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(n, generator=generator) for _ in range(3)] + [
        torch.rand(n, generator=generator)
    ]

    def part(begin: int, end: int) -> Chunk:
        weights, grad, first, second = (tensor[begin:end].clone() for tensor in values)
        chunk = make_chunk(case, weights, grad, first, second)
        chunk.position = begin
        return chunk.update(isa, 2)

    whole, parts = part(0, n).bits(), [part(0, cut).bits(), part(cut, n).bits()]
    assert all(whole[name] == parts[0][name] + parts[1][name] for name in whole)
    other = make_chunk(case, *values)
    other.key += 1
    assert other.update(isa).bits()["first"] != whole["first"]
    assert other.bits()["param"] == whole["param"]  # noise is in what is kept, not in the step


@pytest.mark.parametrize("isa", ISAS)
def test_the_position_means_nothing_without_noise(isa: str) -> None:
    chunk = random_chunk(Case(param="bf16", master="fp32"), 300)
    expected = chunk.clone().update().bits()
    chunk.position = 2**32 - 5
    assert chunk.update(isa).bits() == expected


@pytest.mark.pairs
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("param", "master"), MASTERS)
@pytest.mark.parametrize("isa", ISAS)
def test_writes_nothing_outside_the_range(isa: str, param: str, master: str, moments: str) -> None:
    n, begin = 1024, 128
    for end in (128, 129, 160, 175, 191, 192, 700):
        chunk = random_chunk(Case(param=param, master=master, moments=moments), n, end)
        before = chunk.clone()
        chunk.update(isa, 3, begin, end)
        for name, block in chunk.blocks.items():
            changed = (block != before.blocks[name]).nonzero().flatten() - GUARD
            if moments == "int8" and name in ("first", "second"):
                scales = changed[changed >= SUPERBLOCK] - SUPERBLOCK
                changed = changed[changed < SUPERBLOCK]
                assert all(
                    begin // 32 <= byte // 4 < math.ceil(end / 32) for byte in scales.tolist()
                ), (name, end)
                low, high = begin, end
            else:
                width = (
                    chunk.width(name) if name in ("grad", "param", "master") else WIDTHS[moments]
                )
                low, high = begin * width, end * width
            assert all(low <= byte < high for byte in changed.tolist()), (name, end)
            assert name == "grad" or end < 700 or len(changed) > 0


def reference(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AdamW of rules.h in torch operations that are each rounded once, on constants rounded once
    from double."""
    hyper, fp32 = chunk.case.hyper, torch.tensor
    grad = (
        chunk.view("grad", DTYPES[chunk.case.grad]).float()
        if "grad" in chunk.blocks
        else torch.zeros(chunk.n)
    )
    g, w = grad * fp32(hyper.grad_scale), chunk.masters().clone()
    if hyper.weight_decay and hyper.decoupled:
        w = w * fp32(1 - hyper.lr * hyper.weight_decay)
    elif hyper.weight_decay:
        g = g + fp32(hyper.weight_decay) * w
    m = fp32(hyper.beta1) * chunk.moment("first") + fp32(1 - hyper.beta1) * g
    v = fp32(hyper.beta2) * chunk.moment("second") + (fp32(1 - hyper.beta2) * g) * g
    # torch.sqrt of fp32 may be off by one place (it calls MKL). From double, which has more than
    # twice the bits, the rounding to fp32 is right.
    d = torch.sqrt(v.double()).float() / fp32(hyper.bias_correction2_sqrt) + fp32(hyper.eps)
    return w - fp32(hyper.lr / hyper.bias_correction1) * (m / d), m, v


@pytest.mark.pairs
@pytest.mark.parametrize("grad", [*DTYPES, None])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("hyper", HYPERS)
def test_adam_equals_the_formula_in_torch(hyper: Hyper, isa: str, grad: str | None) -> None:
    for param, master in MASTERS:
        chunk = random_chunk(
            Case(grad=grad or "fp32", param=param, master=master, hyper=hyper), 10007, seed=7
        )
        if grad is None:
            del chunk.blocks["grad"]
        w, m, v = reference(chunk)
        chunk.update(isa, 2)
        for want, got in (
            (w, chunk.masters()),
            (m, chunk.moment("first")),
            (v, chunk.moment("second")),
        ):
            assert torch.equal(one_nan(want), one_nan(got))
        assert torch.equal(
            one_nan(chunk.view("param", DTYPES[param])), one_nan(rounded(w, DTYPES[param]))
        )


def test_stored_nans_have_one_bit_pattern() -> None:
    for master, moments in itertools.product(("fp32", "split"), ("fp32", "bf16")):
        chunk = random_chunk(Case(param="bf16", master=master, moments=moments), 50_000).update()
        stored = [(chunk.masters(), 0x7FC00000), (chunk.view("param", torch.bfloat16), 0x7FC0)]
        dtype, pattern = {"fp32": (torch.float32, 0x7FC00000), "bf16": (torch.bfloat16, 0x7FC0)}[
            moments
        ]
        stored += [(chunk.view(kind, dtype), pattern) for kind in ("first", "second")]
        for tensor, pattern in stored:
            assert bits(tensor)[tensor.isnan()].unique().tolist() == [pattern]


TORCH_RULES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("adam", torch.optim.AdamW, {"weight_decay": 0.01}, {"weight_decay": 0.01}),
    ("adam", torch.optim.Adam, {"weight_decay": 0.01}, {"weight_decay": 0.01, "decoupled": False}),
    (
        "adagrad",
        torch.optim.Adagrad,
        {"weight_decay": 0.01, "lr_decay": 0.1, "eps": 1e-10},
        {"weight_decay": 0.01, "eps": 1e-10},
    ),
    ("ademamix", AdEMAMix, {"weight_decay": 0.01}, {"weight_decay": 0.01}),
    ("sgd", torch.optim.SGD, {"weight_decay": 0.01}, {"weight_decay": 0.01, "momentum": 0.0}),
    (
        "sgd",
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.2},
        {"momentum": 0.9, "dampening": 0.2},
    ),
    (
        "sgd",
        torch.optim.SGD,
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ),
]


@pytest.mark.parametrize(("rule", "optimizer", "theirs", "ours"), TORCH_RULES)
@pytest.mark.parametrize("isa", ISAS)
def test_close_to_torch_optimizers(
    isa: str, rule: str, optimizer: Any, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(3)
    sign = torch.randint(0, 2, (4096,), generator=generator) * 2 - 1
    # Away from zero, where a relative bound means nothing.
    start = sign * (torch.rand(4096, generator=generator) + 0.5)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = optimizer([parameter], lr=1e-3, **theirs)
    chunk = make_chunk(
        Case(rule, hyper=Hyper(**ours)), start, start, torch.zeros(4096), torch.zeros(4096)
    )
    for t in range(1, 21):
        grad = torch.randn(4096, generator=generator)
        parameter.grad = grad
        chunk.view("grad", torch.float32).copy_(grad)
        optimizer.step()
        hyper = Hyper(
            **{"weight_decay": 0.0, **ours},
            lr=1e-3 / (1 + (t - 1) * theirs.get("lr_decay", 0)),
            grad_scale=1.0,
            bias_correction1=1 - 0.9**t,
            bias_correction2_sqrt=math.sqrt(1 - 0.999**t),
            first_step=t == 1,
        )
        chunk.case = replace(chunk.case, hyper=hyper)
        chunk.update(isa, threads=3)
    torch.testing.assert_close(chunk.masters(), parameter.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_lion_is_its_paper(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    w, m = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    chunk = make_chunk(Case("lion"), w.float(), torch.zeros(1000), m.float(), torch.zeros(0))
    for _ in range(10):
        grad = torch.randn(1000, generator=generator)
        grad[:10] = 0
        chunk.view("grad", torch.float32).copy_(grad)
        chunk.case = replace(
            chunk.case,
            hyper=Hyper(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_scale=1.0),
        )
        chunk.update(isa)
        w = w * (1 - 1e-2 * 0.1) - 1e-2 * torch.sign(0.9 * m + 0.1 * grad)
        m = 0.99 * m + 0.01 * grad
    torch.testing.assert_close(chunk.masters().double(), w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(chunk.moment("first").double(), m, rtol=1e-5, atol=1e-6)
    still = make_chunk(
        Case("lion", hyper=Hyper(weight_decay=0.0)),
        torch.ones(64),
        torch.zeros(64),
        torch.zeros(64),
        torch.zeros(0),
    )
    assert torch.equal(still.update(isa).masters(), torch.ones(64))  # the sign of zero is zero
    still.view("grad", torch.float32)[5] = math.nan
    # And a NaN is seen.
    assert still.update(isa).masters().isnan().nonzero().flatten().tolist() == [5]


def interesting_values() -> torch.Tensor:
    """All 16-bit values and the ties between them, of every exponent and sign, and one place either
    side of each."""
    patterns = torch.arange(2**16).to(torch.int16)
    widened = [patterns.view(torch.bfloat16).float(), patterns.view(torch.float16).float()]
    # One place either side of each representable value and of each halfway point between two.
    halfway = [bits(widened[0]) + 0x8000, bits(widened[1]) + 0x1000]
    near = [
        t + delta for t in (bits(widened[0]), bits(widened[1]), *halfway) for delta in (-1, 0, 1)
    ]
    subnormal_ties = (torch.arange(2**12) * 2.0**-25).float()
    random = random_bits(200_001, torch.Generator().manual_seed(5))
    return torch.cat(
        [*widened, *(t.view(torch.float32) for t in near), subnormal_ties, -subnormal_ties, random]
    )


def still(master: str, param: str, values: torch.Tensor) -> Chunk:
    """An update with these masters that changes none of them."""
    hyper = Hyper(lr=0.0, weight_decay=0.0, momentum=0.0)
    return make_chunk(
        Case("sgd", param=param, master=master, hyper=hyper),
        values,
        None,
        torch.zeros(0),
        torch.zeros(0),
    )


@pytest.mark.parametrize("isa", ISAS)
def test_parameters_are_rounded_masters(isa: str) -> None:
    values = interesting_values()
    for master, param in (("fp32", "fp16"), ("fp32", "bf16"), ("split", "bf16")):
        chunk = still(master, param, values).update(isa)
        assert torch.equal(one_nan(chunk.masters()), one_nan(values))
        assert torch.equal(
            one_nan(chunk.view("param", DTYPES[param])), one_nan(rounded(values, DTYPES[param]))
        )


def test_bf16_is_to_nearest_with_ties_away_from_zero() -> None:
    values = interesting_values()
    values = values[values.isfinite() & (values.abs() < 3.38e38)]
    away, nearest = rounded(values, torch.bfloat16).float(), values.bfloat16().float()
    param = still("fp32", "bf16", values).update().view("param", torch.bfloat16)
    assert torch.equal(bits(param.float()), bits(away))
    tie = (bits(values) & 0xFFFF) == 0x8000
    assert torch.equal(away[~tie], nearest[~tie])
    assert (away[tie].abs() > values[tie].abs()).all()
    assert tie.sum() > 10_000


def test_a_split_master_is_the_master() -> None:
    values = interesting_values()
    param, low = split(values)
    assert torch.equal(bits(join(param, low)), one_nan(values))
    assert torch.equal(bits(param), bits(rounded(values, torch.bfloat16)))
    never_written = join(param, torch.zeros_like(low))
    assert torch.equal(one_nan(never_written), one_nan(param.float()))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_formats_of_the_master_give_the_same_parameters(moments: str) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5000, generator=generator)
    chunks = [
        make_chunk(
            Case(param=param, master=master, grad="bf16", moments=moments),
            start.clone(),
            start,
            start * 0,
            start * 0,
        )
        for param, master in (("fp32", "none"), ("bf16", "fp32"), ("bf16", "split"))
    ]
    for step in range(5):
        grad = torch.randn(5000, generator=generator).bfloat16()
        for chunk in chunks:
            chunk.view("grad", torch.bfloat16).copy_(grad)
            chunk.key = step
            chunk.update(ISAS[-1], 2)
    plain, wide, split = chunks
    assert torch.equal(plain.masters(), wide.masters()) and torch.equal(
        plain.masters(), split.masters()
    )
    assert wide.bits()["param"] == split.bits()["param"]
    assert all(
        wide.bits()[kind] == split.bits()[kind] == plain.bits()[kind]
        for kind in ("first", "second")
    )


@pytest.mark.parametrize("grad", ["bf16", "fp16"])
@pytest.mark.parametrize("isa", ISAS)
def test_gradient_conversion_equals_torch(isa: str, grad: str) -> None:
    values = torch.arange(2**16).to(torch.int16).view(DTYPES[grad])
    zeros = torch.zeros(2**16)
    case = Case(grad=grad, hyper=Hyper(beta1=0.0, weight_decay=0.0, grad_scale=1.0))
    chunk = make_chunk(case, zeros.clone(), values, zeros, zeros).update(isa)
    # beta1 * m + 1 * g is g, except that 0 + -0 is 0.
    assert torch.equal(one_nan(chunk.moment("first")), one_nan(values.float() + 0.0))


MANY = 4096


def stored_many_times(
    values: torch.Tensor, moments: str, kind: str, isa: str = ISAS[-1]
) -> torch.Tensor:
    """`values` (a multiple of 32) as they come back after one stochastic rounding each, MANY times:
    [MANY, values]."""
    repeated = values.repeat(MANY)
    rule = "lion" if kind == "first" else "adagrad"
    # The new moment is g, or 0 + g * g.
    hyper = Hyper(lr=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0, grad_scale=1.0)
    grad = repeated if kind == "first" else repeated.sqrt()
    zeros = torch.zeros_like(repeated)
    chunk = make_chunk(Case(rule, moments=moments, hyper=hyper), zeros, grad, zeros, zeros).update(
        isa, 4
    )
    return chunk.moment(kind).view(MANY, len(values))


@pytest.mark.parametrize("kind", ["first", "second"])
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_stochastic_rounding_is_right_on_average(moments: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(64, generator=generator) * torch.tensor([1.0, 1e-3]).repeat_interleave(32)
    values = (
        values if kind == "first" else values.square().clamp(min=values.square().max() * 1e-7)
    ).float()
    stored = stored_many_times(values, moments, kind).double()
    exact = values.double() if kind == "first" else (values.sqrt() * values.sqrt()).double()
    steps = torch.stack([stored.amin(0), stored.amax(0)])
    assert (
        (steps[0] <= exact * (1 + 1e-6 * exact.sign()))
        & (exact * (1 - 1e-6 * exact.sign()) <= steps[1])
    ).all()
    assert all(len(column.unique()) <= 2 for column in stored.T)  # one of its two neighbours
    spread = (steps[1] - steps[0]) / 2 / math.sqrt(MANY)  # at most this standard deviation
    group = exact.abs().view(-1, 32).amax(1).repeat_interleave(32)
    above_code_one = (
        torch.ones(64, dtype=torch.bool)
        if (moments, kind) != ("int8", "second")
        else exact > group * 255.0**-4
    )
    error = (stored.mean(0) - exact).abs()
    assert (error <= 5 * spread + 1e-5 * exact.abs())[above_code_one].all()


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_second_moment_does_not_freeze(moments: str) -> None:
    """A thousand steps with gradients of half the size: the moment must follow, though one step is
    less than half a code."""
    n = 3200
    generator = torch.Generator().manual_seed(8)
    size = torch.exp(0.5 * torch.randn(n, generator=generator))
    second = size.square()
    case = Case(moments=moments, hyper=Hyper(lr=0.0, weight_decay=0.0, grad_scale=1.0))
    chunk = make_chunk(case, torch.zeros(n), torch.zeros(n), torch.zeros(n), second)
    for step in range(1000):
        # The first of each group keeps its size, and with it the group its scale.
        grad = torch.where(
            torch.arange(n) % 32 == 0, size.view(-1, 32).amax(1).repeat_interleave(32), size / 2
        )
        chunk.view("grad", torch.float32).copy_(grad)
        second = 0.999 * second + 0.001 * grad.square()
        chunk.key = step
        chunk.update(ISAS[-1])
    ratio = chunk.moment("second") / second
    assert abs(ratio.mean().item() - 1) < 0.02
    assert ratio.log().square().mean().sqrt() < 0.15


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_small_states_find_the_same_minimum(moments: str) -> None:
    """400 AdamW steps down a noisy quadratic bowl with curvatures over two orders of magnitude,
    against fp32 throughout."""
    n, steps, losses = 8192, 400, []
    for case in (Case(), Case(grad="bf16", param="bf16", master="split", moments=moments)):
        generator = torch.Generator().manual_seed(1)
        curvature = torch.randn(n, generator=generator).exp()
        target = torch.randn(n, generator=generator)
        chunk = make_chunk(case, *(torch.zeros(n) for _ in range(4)))
        for t in range(1, steps + 1):
            off = chunk.view("param", DTYPES[case.param]).float() - target
            grad = chunk.view("grad", DTYPES[case.grad])
            grad.copy_(curvature * (off + 0.1 * torch.randn(n, generator=generator)))
            correction = {
                "bias_correction1": 1 - 0.9**t,
                "bias_correction2_sqrt": math.sqrt(1 - 0.999**t),
            }
            chunk.case = replace(
                case,
                hyper=Hyper(
                    lr=0.02 * (1 - t / steps), weight_decay=0.0, grad_scale=1.0, **correction
                ),
            )
            chunk.key = t
            chunk.update(ISAS[-1], 2)
        losses.append((curvature * (chunk.masters() - target).square()).mean().item())
    assert losses[0] < 0.01
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_int8_keeps_its_bounds(data: st.DataObject) -> None:
    seed, kind = data.draw(st.integers(0, 2**32)), data.draw(st.sampled_from(["first", "second"]))
    generator = torch.Generator().manual_seed(seed)
    n = data.draw(st.integers(1, 400))
    scale = 10.0 ** data.draw(st.integers(-44, 37))
    values = (
        torch.randn(n, generator=generator)
        * torch.exp(data.draw(st.floats(0, 6)) * torch.randn(n, generator=generator))
        * scale
    )
    values = values.clamp(-3e38, 3e38) * (torch.rand(n, generator=generator) < 0.9)
    if kind == "second":
        values = values.abs()
    block = encoded(values, "int8", kind)
    back = decoded(block, "int8", kind, n)
    groups = torch.nn.functional.pad(values, (0, -n % 32)).view(-1, 32)
    # In the domain of the codes, where all steps are 1, nearest to the decoded value; the least
    # scales are of moments.h.
    if kind == "first":
        most = groups.abs().amax(1).clamp(min=2.0**-112).repeat_interleave(32)[:n].double()
        x, y = values.double().abs() / most, back.double().abs() / most
        assert ((127 * x.sqrt() - 127 * y.sqrt()).abs() <= 0.72).all()
        assert (back * values >= 0).all()
    else:
        most = groups.amax(1).double().clamp(min=2.0**-116).repeat_interleave(32)[:n]
        x, y = values.double() / most, back.double() / most
        off = (255 * x**0.25 - 255 * y**0.25).abs()
        assert (
            off[values > 2.0**-126] <= torch.where(x < 255.0**-4, 1.0, 0.75)[values > 2.0**-126]
        ).all()
        assert ((back > 0) == (values > 0)).all()
    # What was saved is what is loaded.
    assert torch.equal(decoded(encoded(back, "int8", kind), "int8", kind, n), back)


@pytest.mark.parametrize("isa", ISAS)
def test_a_positive_second_moment_never_becomes_zero(isa: str) -> None:
    values = torch.zeros(278, 32)
    values[:, 0] = torch.tensor([2.0**exponent for exponent in range(-150, 128)])
    values[:, 5] = 1e-45
    values[:, 9] = values[:, 0] * 1e-12
    values = values.flatten()
    assert torch.equal(
        decoded(encoded(values, "int8", "second"), "int8", "second", len(values)) > 0, values > 0
    )
    # The same by the way of an update, which rounds stochastically.
    case = Case("adagrad", moments="int8", hyper=Hyper(lr=0.0, weight_decay=0.0, grad_scale=1.0))
    zeros = torch.zeros_like(values)
    chunk = make_chunk(case, zeros, values.sqrt(), zeros, zeros).update(isa)
    assert torch.equal(chunk.moment("second") > 0, values.sqrt() * values.sqrt() > 0)


@pytest.mark.parametrize("kind", ["first", "second"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_zero_bytes_are_zeros(moments: str, kind: str) -> None:
    n = SUPERBLOCK + 100
    block = torch.zeros(kernels.block_bytes(moments, n), dtype=torch.uint8)
    assert torch.equal(bits(decoded(block, moments, kind, n)), torch.zeros(n, dtype=torch.int32))
    assert not encoded(torch.zeros(n), moments, kind).any()


def test_sizes_of_blocks() -> None:
    assert [kernels.block_bytes(moments, 100) for moments in ("fp32", "bf16", "int8")] == [
        400,
        200,
        36864,
    ]
    assert [kernels.block_bytes("int8", n) for n in (0, 1, 32768, 32769)] == [
        0,
        36864,
        36864,
        2 * 36864,
    ]
    assert (kernels.GROUP, kernels.SUPERBLOCK) == (32, 32768)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_parts_of_a_block_are_read_and_written_alone(data: st.DataObject, seed: int) -> None:
    n, moments = SUPERBLOCK + 640, data.draw(st.sampled_from(["fp32", "bf16", "int8"]))
    kind = data.draw(st.sampled_from(["first", "second"]))
    block = encoded(torch.rand(n, generator=torch.Generator().manual_seed(seed)), moments, kind)
    whole = decoded(block, moments, kind, n)
    begin = data.draw(
        st.one_of(st.integers(0, n - 1), st.integers(SUPERBLOCK - 70, SUPERBLOCK + 10))
    )
    count = data.draw(st.integers(0, n - begin))
    assert torch.equal(decoded(block, moments, kind, count, begin), whole[begin : begin + count])
    begin, count = begin // 32 * 32, data.draw(st.integers(0, n - begin))
    encode(block, torch.full((count,), 4.0), moments, kind, begin)
    whole[begin : begin + count] = 4
    if moments == "int8":
        # The rest of the last group is padding.
        whole[begin + count : (begin + count + 31) // 32 * 32] = 0
    assert torch.equal(decoded(block, moments, kind, n), whole)


@pytest.mark.parametrize("isa", ISAS)
def test_a_group_that_is_not_finite_shows_it_and_keeps_it_to_itself(isa: str) -> None:
    for kind, bad in itertools.product(("first", "second"), (math.nan, math.inf, -math.inf)):
        values = torch.ones(128)
        values[40] = bad
        if kind == "second" and bad == -math.inf:
            continue
        grad = values if kind == "first" else values.sqrt()
        case = Case(
            "lion" if kind == "first" else "adagrad",
            moments="int8",
            hyper=Hyper(beta2=0.0, weight_decay=0.0, grad_scale=1.0),
        )
        chunk = make_chunk(case, torch.zeros(128), grad, torch.zeros(128), torch.zeros(128)).update(
            isa
        )
        assert chunk.moment(kind).isnan().nonzero().flatten().tolist() == list(range(32, 64))
        assert torch.equal(chunk.moment(kind)[64:], torch.ones(64))
    negative = encoded(torch.tensor([1.0, -1.0]), "int8", "second")
    assert decoded(negative, "int8", "second", 2).isnan().all()  # a second moment is never negative


@pytest.mark.parametrize("isa", ISAS)
def test_subnormals_survive_a_caller_that_flushes_them(isa: str) -> None:
    tiny = torch.full((5000,), 1e-40)
    chunks = [
        random_chunk(Case(grad="fp16", param="fp16", master="fp32"), 5000, seed=2),
        make_chunk(Case(), tiny, None, tiny, tiny),
    ]
    chunks.append(make_chunk(Case(moments="int8"), tiny, tiny, tiny, tiny))
    expected = [chunk.clone().update().bits() for chunk in chunks]
    norm = squared_norm(tiny)
    assert norm > 0
    torch.set_flush_denormal(True)
    try:
        actual = [
            chunk.clone().update(isa, threads).bits() for threads in (1, 3) for chunk in chunks
        ]
        norms = [squared_norm(tiny, isa=isa, threads=threads) for threads in (1, 3)]
        still_flushing = (torch.full((1,), 1e-38) * 0.1).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert actual == expected * 2
    assert norms == [norm, norm]
    assert still_flushing


def squared_norm(
    values: torch.Tensor, carry: float = 0.0, isa: str = "scalar", threads: int = 1
) -> float:
    return kernels.squared_norm(
        values.data_ptr(), NAMES[values.dtype], values.numel(), carry, isa, POOLS[threads]
    )


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
@given(
    data=st.data(),
    n=st.integers(0, 90_000),
    threads=st.integers(1, 5),
    dtype=st.sampled_from([*DTYPES]),
)
def test_squared_norm_does_not_depend_on_cuts(
    data: st.DataObject, n: int, threads: int, dtype: str
) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DTYPES[dtype])
    expected = squared_norm(values, 0.1)
    isa = data.draw(st.sampled_from(ISAS))
    blocks = -(-n // kernels.NORM_BLOCK)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, blocks), max_size=3))), blocks]
    carry = 0.1
    for begin, end in pairwise(cuts):
        carry = squared_norm(
            values[begin * kernels.NORM_BLOCK : end * kernels.NORM_BLOCK], carry, isa, threads
        )
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


def add(
    target: torch.Tensor, source: torch.Tensor, isa: str = "scalar", threads: int = 1
) -> torch.Tensor:
    kernels.add(
        target.data_ptr(),
        source.data_ptr(),
        NAMES[target.dtype],
        target.numel(),
        isa,
        POOLS[threads],
    )
    return target


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("isa", ISAS)
def test_sums_of_all_16_bit_patterns_are_those_of_torch(isa: str, dtype: str) -> None:
    """Each with others at random, and with those of a like size, where sums are ties and cancel."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.arange(2**16).to(torch.int16)
    ties = 0
    for spread, sign in [(2**16, 0), (2**12, 0), (2**12, 0x8000)] * 4:
        moved = torch.randint(spread, (2**16,), generator=generator) + sign
        target = patterns.clone().view(DTYPES[dtype])
        source = (patterns + moved).to(torch.int16).view(DTYPES[dtype])
        exact = target.double() + source.double()
        expected = target + source
        nearest = expected.double()
        beyond = torch.where(exact > nearest, math.inf, -math.inf).to(expected.dtype)
        other = torch.nextafter(expected, beyond).double()
        ties += int(((exact - nearest).abs() == (exact - other).abs()).sum())
        add(target, source, isa, threads=2)
        assert torch.equal(one_nan(target), one_nan(expected))
        assert bits(target)[target.isnan()].unique().tolist() == [
            {"bf16": 0x7FC0, "fp16": 0x7E00}[dtype]
        ]
    assert ties > 10_000


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(0, 100_000),
    dtype=st.sampled_from([*DTYPES]),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 5),
    places=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    seed=st.integers(0, 2**32),
)
def test_sums_are_those_of_torch(
    n: int, dtype: str, isa: str, threads: int, places: tuple[int, int], seed: int
) -> None:
    """Any values, at any addresses; nothing around them changes."""
    generator = torch.Generator().manual_seed(seed)
    width = DTYPES[dtype].itemsize
    memory, other = (
        random_bits((n + 80) * width // 4 + 1, generator).view(DTYPES[dtype]) for _ in range(2)
    )
    here, there = (slice(place, place + n) for place in places)
    other[there][::3] = memory[here][::3]  # of a like size
    other[there][::6] *= -1
    expected = memory.clone()
    expected[here] += other[there]
    source = other.clone()
    add(memory[here], other[there], isa, threads)
    assert torch.equal(one_nan(memory[here]), one_nan(expected[here]))
    expected[here] = memory[here]
    assert torch.equal(bits(memory), bits(expected)) and torch.equal(bits(other), bits(source))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_keep_what_a_caller_flushes(dtype: str, isa: str) -> None:
    least = {"fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24}[dtype]
    target, source = (torch.full((999,), size * least, dtype=DTYPES[dtype]) for size in (2, 3))
    torch.set_flush_denormal(True)
    try:
        add(target, source, isa, 3)
    finally:
        torch.set_flush_denormal(False)
    assert (target.double() == 5 * least).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_kernels_add_any_tensors_also_when_they_are_closed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the native kernels cannot add, and what is on its way when the engine closes, torch
    adds: the same bits."""
    there = Kernels("auto", 2)
    alone: list[int] = []

    def spy(target: torch.Tensor, source: torch.Tensor) -> None:
        alone.append(target.numel())
        add_alone(target, source)

    monkeypatch.setattr("infinity.optim.kernels.add_alone", spy)
    generator = torch.Generator().manual_seed(1)
    target, source = (torch.randn(70_001, generator=generator).to(dtype) for _ in range(2))
    expected = target + source
    there.add(target, source)
    assert torch.equal(target, expected)
    assert alone == ([70_001] if dtype == torch.float64 else [])
    there.close()
    there.add(target, source)
    assert torch.equal(target, expected + source) and alone[-1:] == [70_001]


def test_several_threads_share_a_pool() -> None:
    chunks = [
        random_chunk(Case(moments=moments), 30_011, seed)
        for seed, moments in enumerate(("fp32", "bf16", "int8", "fp32"))
    ]
    expected = [chunk.clone().update().bits() for chunk in chunks]
    callers = [
        threading.Thread(target=chunk.update, args=(kernels.best_isa(), 3)) for chunk in chunks
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [chunk.bits() for chunk in chunks] == expected


def test_the_plain_loop_is_what_it_says() -> None:
    a, b, c = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0))
    expected = a * 0.9 + b, c * 0.9 + b
    kernels.in_place_update(a.data_ptr(), b.data_ptr(), c.data_ptr(), 1001, POOLS[3])
    torch.testing.assert_close((a, c), expected)


@pytest.mark.parametrize("offset", [0, 1])  # whole cache lines, and not
def test_the_loop_to_a_shadow_copy_gives_the_bits_of_the_one_in_place(offset: int) -> None:
    a, b, c = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0))
    given = [x.clone() for x in (a, b, c)]
    place = torch.zeros(2, 1088 + 16)
    start = -place.data_ptr() // 4 % 16 + offset
    to_a, to_c = (row[start : start + 1001] for row in place)
    kernels.shadow_update(*(x.data_ptr() for x in (a, b, c, to_a, to_c)), 1001, POOLS[3])
    assert all(map(torch.equal, (a, b, c), given))
    assert int(place.count_nonzero()) <= 2 * 1001
    kernels.in_place_update(a.data_ptr(), b.data_ptr(), c.data_ptr(), 1001, POOLS[3])
    assert torch.equal(to_a, a)
    assert torch.equal(to_c, c)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1_000_003])
def test_a_copy_by_several_threads_copies_every_byte_and_no_more(nbytes: int) -> None:
    source = torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    target = torch.full((nbytes + 2,), 7, dtype=torch.uint8)
    kernels.copy(target.data_ptr() + 1, source.data_ptr(), nbytes, POOLS[3])
    assert torch.equal(target[1:-1], source)
    assert target[0] == target[-1] == 7


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_arguments_are_refused_and_change_nothing(
    wrong: dict[str, Any], message: str
) -> None:
    chunk = random_chunk(Case(param="bf16", master="fp32"), 32)
    before = chunk.bits()
    good = {name: chunk.address(name) for name in ("grad", "param", "master", "first", "second")}
    good |= {
        "rule": "adam",
        "grad_dtype": "fp32",
        "param_dtype": "bf16",
        "master_format": "fp32",
        "moment_format": "fp32",
    }
    good |= {
        "begin": 0,
        "end": 32,
        "position": 0,
        "key": 0,
        "isa": "scalar",
        "pool": POOLS[1],
        **asdict(Hyper()),
    }
    with pytest.raises(ValueError, match=message):
        kernels.update(**(good | wrong))
    assert chunk.bits() == before


def test_other_wrong_arguments_are_refused() -> None:
    chunk = random_chunk(Case(), 4)
    for isa in ("avx2", "avx512", "neon"):
        if not kernels.has_isa(isa):
            with pytest.raises(ValueError, match="lacks"):
                chunk.update(isa)
    with pytest.raises(ValueError, match="instruction set"):
        kernels.has_isa("sse")
    with pytest.raises(ValueError):
        kernels.squared_norm(0, "fp32", 1, 0.0, "scalar", POOLS[1])
    with pytest.raises(ValueError, match="unknown moment 'third'; expected first or second"):
        kernels.decode(chunk.address("first"), "fp32", "third", chunk.address("second"), 0, 1)
    with pytest.raises(ValueError, match="multiple of 32"):
        kernels.encode(chunk.address("first"), "int8", "first", chunk.address("second"), 1, 1)
    with pytest.raises(ValueError, match="at least one thread"):
        kernels.Pool(0)
    assert kernels.has_isa(kernels.best_isa())
    assert POOLS[4].threads == 4
    assert kernels.squared_norm(0, "fp32", 0, 2.5, "scalar", POOLS[1]) == 2.5
    here = chunk.address("param")
    for wrong, message in (
        ({"target": 0}, "target must not be null"),
        ({"source": 0}, "source must not be null"),
        ({"target": here + 1}, "target is not aligned to its element size"),
        ({"source": here + 2}, "source is not aligned to its element size"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'; expected fp32, bf16 or fp16"),
        ({"isa": "sse"}, "unknown instruction set 'sse'"),
    ):
        good = {"target": here, "source": here, "dtype": "fp32", "n": 8, "isa": "scalar"}
        with pytest.raises(ValueError, match=message):
            kernels.add(**(good | wrong), pool=POOLS[1])
    kernels.add(0, 0, "bf16", 0, "scalar", POOLS[1])

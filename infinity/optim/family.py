"""The optimizers that have kernels, and functions that find their states and updates."""

from __future__ import annotations

from collections.abc import Mapping

from infinity.measure.rates import TimedUpdate
from infinity.optim.kernels import KERNEL_NAMES
from infinity.optim.optimizer import Optimizer
from infinity.optim.rules.adagrad import Adagrad
from infinity.optim.rules.adam import Adam, AdamW
from infinity.optim.rules.ademamix import AdEMAMix
from infinity.optim.rules.lion import Lion
from infinity.optim.rules.sgd import SGD
from infinity.placement.spec import Kind

FAMILY: tuple[type[Optimizer], ...] = (Adam, AdamW, Adagrad, Lion, AdEMAMix, SGD)
BY_ALGORITHM: Mapping[str, type[Optimizer]] = {
    algorithm: kind for kind in FAMILY for algorithm in kind.rule.algorithms
}
"""One optimizer for each `Config.algorithm` except "other"."""


def states_of(algorithm: str) -> dict[str, Kind]:
    """The moments of `Config(algorithm=algorithm)` by torch's names. Empty for "other"."""
    kind = BY_ALGORITHM.get(algorithm)
    return {} if kind is None else kind.rule.states_for(algorithm)


def typical_update(algorithm: str) -> TimedUpdate:
    """An update that uses all states of `algorithm`, with weight decay."""
    kind = BY_ALGORITHM[algorithm]
    group = {**kind.usual_settings(), "weight_decay": 0.01, **kind.rule.algorithms[algorithm]}
    hyper = kind.hyper(group, step=10)
    moments = [KERNEL_NAMES[each] for each in states_of(algorithm).values()]
    return TimedUpdate(hyper.rule, hyper.values, moments)

"""Shows the result as tables on a terminal, and as one HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from rich.console import Console

from infinity.cli.bench.delivery import print_rows
from infinity.cli.drawing import GREY, INK, RED, TEAL, name_rows, new_figure, styled, svg
from infinity.cli.page import card, page, section, table
from infinity.quantities import format_bytes

_WORDS = {
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe written",
    "nvme": "NVMe",
    "adam": "Adam",
    "adam_on_gpu": "Adam on the GPU",
    "clipped": "clipped step",
}

Row = tuple[str, ...]


def title(result: dict[str, Any]) -> str:
    """The measured work, in one line."""
    return (
        f"{result['model']}: {result['parameters_count']:,} parameters in {result['dtype']} on "
        f"{result['device']}, {result['tokens_per_step_count']:,} tokens a step, "
        f"{result['steps_count']} steps"
    )


def _three(values: dict[str, float], form: str = ".3g", factor: float = 1.0) -> tuple[str, str]:
    low, high = format(values["lowest"] * factor, form), format(values["highest"] * factor, form)
    return format(values["median"] * factor, form), f"{low}-{high}"


def step_rows(result: dict[str, Any]) -> list[Row]:
    """Rows (name, median, spread over the steps)."""
    rows: list[Row] = [
        ("seconds per step", *_three(result["step_seconds"])),
        ("tokens per second", *_three(result["tokens_per_second"], ",.0f")),
        ("TFLOP/s of the model", *_three(result["model_tflop_per_second"])),
        ("% of matmul (MFU)", *_three(result["model_flop_utilisation_ratio"], ".1f", 100)),
    ]
    if result["recomputes_activations"]:
        rows.append(
            (
                "% of matmul, recomputed too",
                *_three(result["hardware_flop_utilisation_ratio"], ".1f", 100),
            )
        )
    rows += [
        (f"{lane}, s", *_three(values))
        for lane, values in result["stall_seconds"].items()
        if values["highest"] > 0
    ]
    rows.append(("Adam busy beside it, s", *_three(result["adam_busy_seconds"])))
    return rows


def roofline_rows(result: dict[str, Any]) -> list[Row]:
    """Rows (device, work per step, rate, seconds, share of the step), the longest first."""
    links = result["link_gb_per_second"]
    nbytes = result["bytes_per_step"]
    step = result["step_seconds"]["median"]
    work = {
        "compute": (
            f"{result['flops']['hardware_per_step_count'] / 1e12:.3g} TFLOP",
            "blocks alone",
        ),
        "clipped": ("backward, then an update", "the rest"),
    }
    on_gpu = nbytes["optimizer_states_updated_on_gpu"]
    for where, states in (
        ("adam", nbytes["optimizer_states_updated"] - on_gpu),
        ("adam_on_gpu", on_gpu),
    ):
        if result[where] is not None:
            work[where] = (
                f"{format_bytes(states)} of states",
                f"{result[where]['gb_per_second']['median']:.3g} GB/s",
            )
    if "nvme_read" in links:
        rates = "/".join(
            f"{links[way]['median']:.3g}" for way in ("nvme_read", "nvme_write", "nvme_both")
        )
        work["nvme"] = (
            f"{format_bytes(nbytes['nvme_read'])} r, {format_bytes(nbytes['nvme_write'])} w",
            f"{rates} GB/s",
        )
    for way in ("host_to_device", "device_to_host"):
        work[way] = (format_bytes(nbytes[way]), f"{links[way]['median']:.3g} GB/s")
    takes = sorted(result["roofline"]["seconds"].items(), key=lambda item: -item[1])
    return [
        (_WORDS.get(name, name), *work[name], f"{seconds:.3g}", f"{seconds / step:.0%}")
        for name, seconds in takes
    ]


def sentences(result: dict[str, Any]) -> list[str]:
    """The conclusions, in words."""
    roofline, losses = result["roofline"], result["losses"]
    median, between = _three(roofline["step_over_bound_ratio"], ".2f")
    bound = _WORDS.get(roofline["bound"], roofline["bound"])
    words = [f"Warning: {warning}" for warning in result["warnings"]]
    words += [
        (
            f"A step takes {median} ({between}) times the {roofline['bound_seconds']:.3g} s of "
            f"the longest, {bound}."
        )
    ]
    if "clipped" in roofline["seconds"]:
        words.append(
            "No update began in backward: a clipped step waits for the norm of all gradients, and "
            "then only the next forward hides the update. --clip unit and --clip previous do not "
            "wait."
        )
    if result["plan"] is not None:
        words.append(_planned(result["plan"]))
    both = roofline["compute_and_adam_on_the_same_cpus_seconds"]
    if both is not None:
        words.append(f"Compute and Adam run on the same CPUs: {both:.3g} s together.")
    tiers = [
        f"{tier} {format_bytes(use['peak_bytes'])}"
        + (f" of {format_bytes(use['budget_bytes'])}" if use["budget_bytes"] else "")
        for tier, use in result["tiers"].items()
    ]
    words.append(f"Highest use of the tiers: {', '.join(tiers)}.")
    verb = "falls" if result["loss_falls"] else "does not fall"
    words.append(f"The loss {verb}: {losses[0]:.4f} at first, {losses[-1]:.4f} at last.")
    if result["gpu_direct"]:
        words.append("Drives write parameters straight into the memory of the GPU.")
    if "nvme_read" in result["link_gb_per_second"]:
        words.append("NVMe gives so much reading, writing and doing both at once.")
    words.append(f"Operations: {result['flops']['formula']}.")
    words.append(f"Compute: {result['compute']['method']}.")
    return words


def _planned(plan: dict[str, Any]) -> str:
    """The plan for such a machine, compared with this step."""
    busiest = sorted(plan["busy_seconds"].items(), key=lambda lane: -lane[1])[:3]
    lanes = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in busiest)
    median, between = _three(plan["step_over_plan_ratio"], ".2f")
    return (
        f"By the plan for such a machine a step takes {plan['seconds']:.3g} s "
        f"({plan['tokens_per_second']:,.0f} tokens per second; {lanes}): this one takes {median} "
        f"({between}) times that."
    )


STEP_HEADINGS = ("step", "median", "steps")
ROOFLINE_HEADINGS = ("device", "work of a step", "gives", "s", "of step")


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print both tables and the sentences."""
    console.print(title(result), markup=False, highlight=False)
    print_rows(console, STEP_HEADINGS, step_rows(result))
    print_rows(console, ROOFLINE_HEADINGS, roofline_rows(result))
    for sentence in sentences(result):
        console.print(sentence, markup=False, highlight=False)


def figure(result: dict[str, Any]) -> str:
    """A bar for the step, one for the need of each device, and a line at the bound."""
    step, roofline = result["step_seconds"], result["roofline"]
    bars = [("step", step["median"], RED)]
    bars += [
        (_WORDS.get(name, name), value, TEAL)
        for name, value in sorted(roofline["seconds"].items(), key=lambda i: -i[1])
    ]
    bars += [
        (lane, values["median"], GREY)
        for lane, values in result["stall_seconds"].items()
        if values["highest"] > 0
    ]
    with styled("step"):
        drawing = new_figure(0.4 * len(bars) + 1.0)
        axes = drawing.subplots()
        for at, (_, value, color) in enumerate(bars):
            axes.barh(at, value, height=0.5, color=color)
        axes.plot([step["lowest"], step["highest"]], [0, 0], color=INK, linewidth=1)
        axes.axvline(roofline["bound_seconds"], color=INK, linewidth=1, linestyle=(0, (5, 3)))
        name_rows(axes, [name for name, _, _ in bars])
        axes.set_xlabel("seconds per step; dashed: the bound; below it what the step waited for")
        return svg(drawing, "seconds of a step by device")


def render(result: dict[str, Any]) -> str:
    """The page as HTML text."""
    cards = [
        card(
            "step",
            f"{result['step_seconds']['median']:.3g} s",
            f"{result['tokens_per_second']['median']:,.0f} tokens/s",
        ),
        card(
            "over the roofline",
            f"{result['roofline']['step_over_bound_ratio']['median']:.2f}",
            result["roofline"]["bound"],
        ),
        card(
            "MFU",
            f"{result['model_flop_utilisation_ratio']['median']:.0%}",
            "of a matrix multiplication",
        ),
    ]
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences(result))
    return page(
        "infinity bench step",
        [
            f"<header><h1>infinity bench step</h1><p>{escape(title(result))}</p></header>",
            f'<div class="cards">{"".join(cards)}</div>',
            section(
                "Step and devices",
                "",
                figure(result) + table(ROOFLINE_HEADINGS, roofline_rows(result)) + words,
            ),
            section(
                "Steps", "Medians over the timed steps.", table(STEP_HEADINGS, step_rows(result))
            ),
        ],
    )

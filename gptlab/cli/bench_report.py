"""The figures of `gptlab bench` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gptlab.bench.measure import Bench

QUIET_SPREAD = 0.15
"""Peaks measured seconds apart differ by less than this share on a machine of one's own: by 2% on two quiet cores."""
QUIET_SUSTAINED_SHARE = 0.75
"""Beside somebody else, small products keep up less than this share of their best rate (see `sustained_share`)."""


def describe(bench: Bench) -> str:
    """The figures as text; units named."""
    blocks = [_facts(_setting(bench)), _parts(bench), _facts(_speed(bench))]
    if bench.products:
        blocks.append(_products(bench))
    return "\n\n".join(blocks)


def noise(bench: Bench) -> str | None:
    """A warning where the machine was not this process's own; else None."""
    peaks, shares = bench.measured_peaks_flops_per_second, bench.sustained_shares
    if min(shares, default=1.0) < QUIET_SUSTAINED_SHARE:
        seen = f"small matrix products kept up {_percent(min(shares))} of their best rate"
    elif bench.peak_spread > QUIET_SPREAD:
        seen = f"the peak was {_giga(min(peaks))} GFLOP/s at one time and {_giga(max(peaks))} at another"
    else:
        return None
    return f"{seen}: another process seems to be running; figures are low"


def _setting(bench: Bench) -> Iterator[tuple[str, str]]:
    threads = f"{bench.threads} thread{'s' * (bench.threads > 1)}"
    yield "device", f"{bench.device_name} ({bench.device}), {threads}, {bench.dtype}"
    yield "peak", _peak(bench)
    yield "model", f"{bench.recipe}: {bench.model}"
    yield "", f"{bench.parameters:,} parameters, {bench.flops_per_token.total:,} FLOP a token"
    yield "step", bench.shape
    how = {"off": "warmed up", "cold": "compiled", "cached": "compiled"}[bench.compiled]
    where = {"off": "not compiled", "cold": "new to its cache", "cached": "from its cache"}[bench.compiled]
    yield how, f"in {bench.compile_seconds:.1f} s ({where})"


def _peak(bench: Bench) -> str:
    if bench.peak_flops_per_second is None:
        return "unknown"
    times = " ".join(_giga(peak) for peak in bench.measured_peaks_flops_per_second)
    measured = f"before, between and after the steps: {times}" if times else "not measured"
    if bench.vendor_peak_flops_per_second is not None:
        return f"{_giga(bench.vendor_peak_flops_per_second)} GFLOP/s by the data sheet ({measured})"
    return f"{_giga(bench.peak_flops_per_second)} GFLOP/s in {bench.dtype} matrix products ({measured})"


def _parts(bench: Bench) -> str:
    rows = [("", "ms", "share", "GFLOP/s", "of peak")]
    total = bench.flops_per_token.total * bench.tokens_per_step
    forward = bench.forward_flops_per_token * bench.tokens_per_step
    work = {"forward": forward, "backward": total - forward}
    named = {**bench.part_seconds, "rest": bench.rest_seconds, "step": bench.step_seconds}
    for name, seconds in named.items():
        flops = (total if name == "step" else work.get(name, 0.0)) / seconds if seconds > 0 else 0.0
        rate = (_giga(flops), _percent(bench._share_of_peak(flops))) if flops else ("", "")
        rows.append((name, _ms(seconds), _percent(seconds / bench.step_seconds), *rate))
    return f"{_table(rows)}\nforward includes the head's gradient, which is taken together with its loss"


def _speed(bench: Bench) -> Iterator[tuple[str, str]]:
    best = bench.best_step_seconds
    yield "step", f"{_ms(bench.step_seconds)} ms, the median of {bench.steps} (best {_ms(best)} ms)"
    yield "tokens/s", f"{bench.tokens_per_second:,.0f} (best {bench.tokens_per_step / best:,.0f})"
    yield "MFU", f"{_percent(bench.mfu)} with attention counted over the whole context (PaLM, nanochat; as in training)"
    causal = f"{bench.causal_flops_per_token:,.0f} FLOP a token"
    yield "", f"{_percent(bench.causal_mfu)} with attention counted causally ({causal})"
    rate = bench.forward_backward_flops_per_second
    yield "passes", f"forward and backward at {_giga(rate)} GFLOP/s, {_percent(bench._share_of_peak(rate))} of the peak"
    yield "alone", f"optimizer {_ms(bench.optimizer_seconds)} ms an update"
    yield "", f"loader {bench.loader_tokens_per_second:,.0f} tokens/s"


def _products(bench: Bench) -> str:
    rows: list[tuple[str, ...]] = [
        ("layers", "inputs", "outputs", "forward", "of peak", "dX", "of peak", "dW", "of peak", "ms a step")
    ]
    micro_batches = bench.tokens_per_step // bench.products[0].tokens
    for products in bench.products:
        timed = (products.forward_seconds, products.input_gradient_seconds, products.weight_gradient_seconds)
        rates = [products.flops / seconds for seconds in timed]
        pairs = [text for rate in rates for text in (_giga(rate), _percent(bench._share_of_peak(rate)))]
        shape = (products.layers, products.inputs, products.outputs)
        rows.append((*map(str, shape), *pairs, _ms(products.seconds * micro_batches)))
    spent = sum(products.seconds for products in bench.products) * micro_batches
    passes = bench.part_seconds["forward"] + bench.part_seconds["backward"]
    return (
        f"{_table(rows)}\n"
        f"GFLOP/s of the linear layers' products, each alone; together {_ms(spent)} ms a step, "
        f"{_percent(spent / passes)} of forward and backward"
    )


def _facts(rows: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<10}{text}" for name, text in rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart; the first flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _giga(value: float) -> str:
    """Digits enough for slow machines: 851, 12.3."""
    return f"{value / 1e9:,.0f}" if value >= 1e11 else f"{value / 1e9:,.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"

"""A snapshot as text of a given size, with colours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from rich.text import Text

from ...ir.units import format_bytes, format_seconds
from .plot import bounds, braille
from .state import PREPARING, TRAINING, Snapshot

LEAST_PLOT, MOST_PLOT = 3, 9  # lines of the loss curve
LABEL = 8  # letters before a curve or bar
CELL = 12  # letters of a share with its bar, and of the gap before it
LEAST_SHARE = 0.005  # of a step: a stream that is busy less everywhere is not shown
BAR, NUMBER, FAINT, STRONG = "cyan", "bold", "dim", "bold yellow"
EIGHTHS = " ▏▎▍▌▋▊▉"


def picture(now: Snapshot, width: int, height: int) -> Text:
    """At most `height` lines of at most `width` letters. Where not all devices and memories have room, the busiest and
    the fullest are shown."""
    memories = sorted(name for name, peak in now.peak_bytes.items() if peak)
    # The lines that are there with any number of devices and memories, blank ones included.
    others = 2 + 3 * bool(now.busy_share) + bool(memories) + bool(now.evaluations) + bool(now.offer)
    room = max(2, height - others - (LEAST_PLOT + 2 if now.curve else 0))
    num_devices = min(len(now.busy_share), max(1, room // 2, room - len(memories)))
    num_memories = min(len(memories), max(1, room - num_devices))
    lines = [_progress(now, width), _figures(now, width)]
    if now.curve:
        spare = max(0, room - num_devices - num_memories)
        lines += [Text(), *_plot(now, width, min(MOST_PLOT, LEAST_PLOT + spare))]
    if now.busy_share:
        lines += [Text(), *_busy(now, width, num_devices)]
    if memories:
        lines += [Text(), *_memory_bars(now, memories, width, num_memories)]
    if now.evaluations:
        lines.append(_evaluation(now))
    if now.offer:
        lines.append(Text.assemble((f"slower than planned, at step {now.offer.step}: ", STRONG), now.offer.text))
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True, overflow="crop").join(lines[:height])


def _progress(now: Snapshot, width: int) -> Text:
    done = now.step / now.total_steps if now.total_steps else 0.0
    head = f"step {now.step} of {now.total_steps} "
    if now.phase == TRAINING:
        rest = "" if now.remaining_s is None else f", {_duration(now.remaining_s)} left"
    else:
        rest = f", {now.phase}"
    tail = f" {done:.0%}{rest}"
    room = max(4, width - len(head) - len(tail))
    filled = round(min(done, 1.0) * room)
    return Text.assemble((head, NUMBER), ("━" * filled, BAR), ("─" * (room - filled), FAINT), (tail, NUMBER))


def _figures(now: Snapshot, width: int) -> Text:
    """The figures for which there is room, each whole."""
    if now.last is None or now.loss is None or now.step_s is None or now.tokens_per_s is None:
        return Text("" if now.phase == PREPARING else "no step has ended yet", FAINT)
    parts = [("loss", f"{now.loss:.4f}"), ("tokens/s", f"{now.tokens_per_s:,.0f}")]
    parts.append(("step", format_seconds(now.step_s)))
    if now.predicted_s is not None:
        parts.append(("predicted", format_seconds(now.predicted_s)))
    if now.last.learning_rates:
        parts.append(("lr", f"{now.last.learning_rates[0]:.3g}"))
    if now.last.gradient_norm is not None:
        parts.append(("norm", f"{now.last.gradient_norm:.3g}"))
    if now.last.model_flops_utilisation is not None:
        parts.append(("MFU", f"{now.last.model_flops_utilisation:.1%}"))
    shown = Text()
    for name, value in parts:
        part = Text.assemble("   " if shown else "", (f"{name} ", FAINT), (value, NUMBER))
        if len(shown) + len(part) <= width or not shown:
            shown.append_text(part)
    return shown


def _plot(now: Snapshot, width: int, height: int) -> Iterator[Text]:
    low, high = bounds(now.curve)
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    for row, line in enumerate(braille(now.curve, max(4, width - LABEL), height)):
        yield Text.assemble((f"{labels.get(row, ''):>{LABEL - 1}} ", FAINT), (line, BAR))
    first, last = f"{'loss':>{LABEL - 1}} step {now.curve[0][0]:g}", f"{now.step}"
    yield Text(first + last.rjust(max(1, width - len(first))), FAINT)


def _busy(now: Snapshot, width: int, count: int) -> Iterator[Text]:
    """A row for each device and a column for each kind of stream, then the slowest device."""
    shares = now.busy_share
    highest: dict[str, float] = {}
    for streams in shares.values():
        for stream, share in streams.items():
            highest[stream] = max(share, highest.get(stream, 0.0))
    kept = [stream for stream in highest if highest[stream] >= LEAST_SHARE]
    kept = _largest(kept, highest, max(1, (width - LABEL) // CELL))
    yield Text(f"{'busy':<{LABEL}}" + "".join(f"{stream:<{CELL}}" for stream in kept), FAINT)
    slowest = now.slowest
    for device in _largest(shares, {name: max(each.values(), default=0.0) for name, each in shares.items()}, count):
        is_slowest = slowest is not None and slowest[0] == device and len(shares) > 1
        row = Text(f"{device[: LABEL - 1]:<{LABEL}}", STRONG if is_slowest else "")
        for stream in kept:
            share = shares[device].get(stream, 0.0)
            row.append(_bar(share, CELL - 6), BAR).append(f"{share:>5.0%} ")
        yield row
    left = len(shares) - count
    hidden = "" if left <= 0 else f"{left} more device{'s' * (left > 1)}; "
    what = "slowest device" if len(shares) > 1 else "busiest"
    if slowest is not None:
        device, stream, share = slowest
        head = f"{hidden}{what}: "
        why = f"{device}, whose {stream} stream is busy {share:.0%} of a step"
        if len(head) + len(why) > width:
            why = f"{device}, {stream} {share:.0%}"
        yield Text.assemble((head, FAINT), why)


def _memory_bars(now: Snapshot, memories: Sequence[str], width: int, count: int) -> Iterator[Text]:
    """A row for each memory: its peak against its budget, where it has one."""
    limits = now.limit_bytes
    shares = {name: now.peak_bytes[name] / limits[name] for name in memories if limits.get(name)}
    for name in _largest(memories, shares, count):
        row = Text(f"{name[: LABEL - 1]:<{LABEL}}")
        text = format_bytes(now.peak_bytes[name])
        if name in shares:
            row.append(_bar(shares[name], max(4, min(40, width - LABEL - 30))), BAR)
            text = f" {text} of {format_bytes(limits[name])}, {shares[name]:.0%}"
        yield row.append(text)


def _evaluation(now: Snapshot) -> Text:
    step, metrics = now.evaluations[-1]
    figures = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    return Text.assemble((f"held out, at step {step}: ", FAINT), figures)


def _largest(names: Collection[str], values: Mapping[str, float], count: int) -> list[str]:
    """The `count` names with the largest values, in the order of `names`."""
    kept = set(sorted(names, key=lambda name: -values.get(name, 0.0))[:count])
    return [name for name in names if name in kept]


def _bar(share: float, width: int) -> str:
    """A bar of eighths of letters."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(width)


def _duration(seconds: float) -> str:
    """ "1:02:03", or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

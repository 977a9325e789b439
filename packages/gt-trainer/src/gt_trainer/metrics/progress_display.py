"""What a person sees while training: a live panel on a terminal, one line a step elsewhere.

The panel needs a terminal that can move its cursor (`isatty`, TERM other than "dumb"); pipes,
files and schedulers' logs get plain `key=value` lines that grep and cut understand. NO_COLOR
takes the colors away and keeps the panel. Only one rank of a run displays anything.

Drawn with rich. Needs no torch.
"""

import atexit
import logging
import math
import sys
import time
from collections import deque
from typing import Any, Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gt_trainer.metrics.metrics_history import StepMetrics

RunPhase = Literal["setting up", "capturing", "training", "validating", "saving", "done"]
"""What a run is busy with."""

DisplayMode = Literal["auto", "live", "plain", "off"]
"""auto: live on a terminal, plain elsewhere."""

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_STEPS = 32


class ProgressDisplay(Protocol):
    """Tells a person how a run is getting on. Calls after `close` do nothing."""

    def phase(self, name: RunPhase) -> None:
        """Say what the run is busy with from now on."""
        ...

    def step(self, metrics: StepMetrics) -> None:
        """Report an optimizer step; the phase is "training" again."""
        ...

    def message(self, text: str) -> None:
        """Say something that stays: above the panel, or as a line."""
        ...

    def close(self) -> None:
        """Give the terminal back. Safe to call twice."""
        ...


def open_progress_display(
    *,
    total_steps: int | None = None,
    mode: DisplayMode = "auto",
    color: bool = True,
    console: Console | None = None,
) -> ProgressDisplay:
    """Return the display that fits where the output goes.

    Args:
        total_steps: The step that training ends with; None hides what needs it.
        mode: Which display; ranks that should say nothing ask for "off".
        color: False as NO_COLOR does.
        console: Where to draw; standard output by default.
    """
    if mode == "off":
        return SilentDisplay()
    console = console or Console(no_color=True if not color else None)
    can_draw = console.is_terminal and not console.is_dumb_terminal
    if mode == "live" or (mode == "auto" and can_draw):
        return LiveDisplay(console, total_steps=total_steps)
    return PlainDisplay(console, total_steps=total_steps)


class SilentDisplay:
    """Shows nothing: the ranks that another rank speaks for."""

    def phase(self, name: RunPhase) -> None:
        """Do nothing."""

    def step(self, metrics: StepMetrics) -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainDisplay:
    """One line an event, for pipes and logs: `step=3/20 loss=7.61234 grad_norm=1.2345 ...`.

    The keys are those of `metrics.jsonl`. Numbers are rounded for reading; the file is exact.

    Args:
        console: Where lines go; its width does not break them.
        total_steps: The step that training ends with, if known.
    """

    def __init__(self, console: Console, *, total_steps: int | None) -> None:
        self._console = console
        self._total_steps = total_steps
        self._seconds = _RecentSeconds()
        self._closed = False

    def phase(self, name: RunPhase) -> None:
        """Write `phase=NAME`."""
        self._line(f"phase={name.replace(' ', '_')}")

    def step(self, metrics: StepMetrics) -> None:
        """Write the step's metrics."""
        self._seconds.add(metrics)
        total = "" if self._total_steps is None else f"/{self._total_steps}"
        parts = [
            f"step={metrics.step}{total}",
            f"loss={metrics.loss:.5f}",
            f"grad_norm={metrics.grad_norm:.4f}",
        ]
        if metrics.tokens_per_second is not None:
            parts.append(f"tokens_per_second={metrics.tokens_per_second:.0f}")
        if metrics.seconds is not None:
            parts.append(f"seconds={metrics.seconds:.3f}")
        if metrics.lr is not None:
            parts.append(f"lr={metrics.lr:.3g}")
        if (left := self._seconds.left(metrics.step, self._total_steps)) is not None:
            parts.append(f"eta={_clock(left)}")
        self._line(" ".join(parts))

    def message(self, text: str) -> None:
        """Write the text."""
        self._line(text)

    def close(self) -> None:
        """Write nothing more."""
        self._closed = True

    def _line(self, text: str) -> None:
        if not self._closed:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()  # a log that is followed, or cut short, has every step


class LiveDisplay:
    """A panel that is redrawn in place; messages and log lines scroll above it.

    Drawing runs on a thread of rich's, so that the clock goes on while a step is captured.

    Args:
        console: The terminal.
        total_steps: The step that training ends with, if known.
        refresh: False to draw only at events (tests).
    """

    def __init__(self, console: Console, *, total_steps: int | None, refresh: bool = True) -> None:
        self._console = console
        self._total_steps = total_steps
        self._phase: RunPhase = "setting up"
        self._phase_since = time.monotonic()
        self._metrics: StepMetrics | None = None
        self._losses: deque[float] = deque(maxlen=_SPARKLINE_STEPS)
        self._seconds = _RecentSeconds()
        self._spinner = Spinner("dots" if self._unicode else "line")
        self._live = Live(
            console=console,
            get_renderable=self._render,
            auto_refresh=refresh,
            refresh_per_second=4,
        )
        self._handlers = _LogHandlers()
        self._live.start()
        self._handlers.follow_redirection()
        atexit.register(self.close)  # or the cursor stays hidden when set-up raises

    def phase(self, name: RunPhase) -> None:
        """Change the panel's first line."""
        self._set_phase(name)
        self._refresh()

    def step(self, metrics: StepMetrics) -> None:
        """Change the panel's numbers."""
        self._metrics = metrics
        self._losses.append(metrics.loss)
        self._seconds.add(metrics)
        if self._phase != "training":
            self._set_phase("training")
        self._refresh()

    def message(self, text: str) -> None:
        """Print the text above the panel."""
        if self._live.is_started:
            self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the panel's last state on the screen and give back cursor and log handlers."""
        if self._live.is_started:
            self._refresh()
            self._handlers.restore()
            self._live.stop()
            atexit.unregister(self.close)

    @property
    def _unicode(self) -> bool:
        return self._console.encoding.lower().startswith("utf")

    def _set_phase(self, name: RunPhase) -> None:
        self._phase, self._phase_since = name, time.monotonic()

    def _refresh(self) -> None:
        if self._live.is_started:
            self._live.refresh()

    def _render(self) -> RenderableType:
        metrics = self._metrics
        head = Table.grid(padding=(0, 1))
        elapsed = _clock(time.monotonic() - self._phase_since)
        done = self._phase == "done"
        mark: RenderableType = Text("✓" if self._unicode else "*") if done else self._spinner
        head.add_row(mark, Text(self._phase, style="bold"), Text(elapsed, style="dim"))
        if metrics is None:
            return head
        head.add_row("", *self._step_row(metrics))
        numbers = Table.grid(padding=(0, 2))
        row = [_labelled("loss", f"{metrics.loss:.4f}", "green")]
        if self._unicode:
            row.append(Text(sparkline(self._losses), style="green"))
        row.append(_labelled("grad norm", f"{metrics.grad_norm:.3f}", "yellow"))
        if metrics.tokens_per_second is not None:
            row.append(_labelled("tokens/s", f"{metrics.tokens_per_second:,.0f}", "blue"))
        if metrics.seconds is not None:
            row.append(_labelled("s/step", f"{metrics.seconds:.2f}", "cyan"))
        if metrics.memory_gib is not None and metrics.memory_gib > 0:
            row.append(_labelled("GiB", f"{metrics.memory_gib:.1f}", "magenta"))
        numbers.add_row(*row)
        return Group(head, numbers)

    def _step_row(self, metrics: StepMetrics) -> list[RenderableType]:
        if self._total_steps is None:
            return [Text(f"step {metrics.step}"), ""]
        left = self._seconds.left(metrics.step, self._total_steps)
        eta = "" if left is None or metrics.step >= self._total_steps else f"  ETA {_clock(left)}"
        bar = ProgressBar(total=self._total_steps, completed=metrics.step, width=30)
        row = Table.grid(padding=(0, 1))
        row.add_row(bar, Text(eta, style="dim"))
        return [Text(f"step {metrics.step}/{self._total_steps}"), row]


def sparkline(values: "deque[float] | list[float]") -> str:
    """Draw values as blocks between their least and greatest; what is not finite is a blank."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _SPARKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


class _RecentSeconds:
    """Step time of late, for the time left: the first step, with its capture, would mislead."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=20)
        self._num_reports = 0

    def add(self, metrics: StepMetrics) -> None:
        if metrics.seconds is None:
            return
        if self._num_reports == 1:
            self._recent.clear()
        self._recent.append(metrics.seconds)
        self._num_reports += 1

    def left(self, step: int, total_steps: int | None) -> float | None:
        if total_steps is None or self._num_reports < 2:
            return None
        return max(total_steps - step, 0) * sum(self._recent) / len(self._recent)


class _LogHandlers:
    """Sends log handlers that write to the terminal through rich while a panel is on it.

    rich redirects sys.stdout and sys.stderr, but a handler keeps the stream it was made with,
    and would write across the panel.
    """

    def __init__(self) -> None:
        self._streams_before = (sys.stdout, sys.stderr)
        self._changed: list[tuple[logging.StreamHandler[Any], Any]] = []

    def follow_redirection(self) -> None:
        """Move handlers from the streams of before to those of now."""
        redirected = zip(self._streams_before, (sys.stdout, sys.stderr), strict=True)
        moves = [(before, now) for before, now in redirected if before is not now]
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.StreamHandler):
                continue
            for before, now in moves:
                if handler.stream is before:
                    self._changed.append((handler, before))
                    handler.setStream(now)
                    break

    def restore(self) -> None:
        """Give every handler its own stream again."""
        for handler, stream in self._changed:
            handler.setStream(stream)
        self._changed.clear()


def _labelled(label: str, value: str, style: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style))


def _clock(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}"

"""Progress on both paths: plain lines, and the panel on a terminal."""

import io
import logging
import math
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from gt_trainer.metrics.metrics_history import StepMetrics
from gt_trainer.metrics.progress_display import (
    LiveDisplay,
    PlainDisplay,
    ProgressDisplay,
    SilentDisplay,
    open_progress_display,
    sparkline,
)


def terminal(**options: bool) -> Console:
    """A console that draws as on a terminal, and keeps what it drew."""
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=100,
        color_system="standard",
        record=True,
        **options,
    )


def pipe() -> Console:
    return Console(file=io.StringIO(), width=40)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def metrics(step: int, **fields: float) -> StepMetrics:
    return StepMetrics(step=step, loss=8.0 / step, grad_norm=1.25, **fields)  # type: ignore[arg-type]  # only float fields are given


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_plain_lines_are_one_a_step_unbroken_and_greppable() -> None:
    console = pipe()
    display = open_progress_display(total_steps=3, console=console)
    display.phase("setting up")
    display.step(metrics(1, seconds=9.0))
    display.step(metrics(2, tokens_per_second=16384.4, seconds=0.5, lr=8e-4, memory_gib=1.5))
    display.message("[bold] is text, not markup")
    display.phase("done")
    display.close()
    assert written(console) == (
        "phase=setting_up\n"
        "step=1/3 loss=8.00000 grad_norm=1.2500 seconds=9.000\n"
        "step=2/3 loss=4.00000 grad_norm=1.2500 tokens_per_second=16384 seconds=0.500 lr=0.0008 "
        "eta=0:00:00\n"
        "[bold] is text, not markup\n"
        "phase=done\n"
    )


def test_plain_lines_do_without_a_known_last_step() -> None:
    console = pipe()
    display = open_progress_display(console=console)
    display.step(metrics(1, seconds=0.5))
    display.step(metrics(2, seconds=0.5))
    assert written(console).splitlines()[1] == (
        "step=2 loss=4.00000 grad_norm=1.2500 seconds=0.500"
    )


def test_time_left_leaves_the_first_step_with_its_capture_out() -> None:
    console = pipe()
    display = open_progress_display(total_steps=102, console=console)
    display.step(metrics(1, seconds=60.0))
    display.step(metrics(2, seconds=2.0))
    assert written(console).splitlines()[1].endswith("eta=0:03:20")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_shown(loss: float) -> None:
    for console in (pipe(), terminal()):
        display = open_progress_display(total_steps=3, console=console)
        display.step(StepMetrics(step=1, loss=loss, grad_norm=loss))
        display.close()
        assert str(loss) in written(console)


@pytest.mark.parametrize(
    ("console", "term", "expected"),
    [
        (terminal, "xterm-256color", LiveDisplay),
        (terminal, "dumb", PlainDisplay),
        (pipe, "xterm-256color", PlainDisplay),
    ],
)
def test_panel_only_where_the_cursor_can_move(
    console: Callable[[], Console],
    term: str,
    expected: type[ProgressDisplay],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", term)
    display = open_progress_display(console=console())
    display.close()
    assert type(display) is expected


def test_mode_overrides_what_was_detected() -> None:
    on_terminal = open_progress_display(mode="plain", console=terminal())
    in_pipe = open_progress_display(mode="live", console=pipe())
    in_pipe.close()
    silent = open_progress_display(mode="off", console=terminal())
    assert [type(display) for display in (on_terminal, in_pipe, silent)] == [
        PlainDisplay,
        LiveDisplay,
        SilentDisplay,
    ]


def test_silent_display_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_progress_display(mode="off")
    display.phase("training")
    display.step(metrics(1))
    display.message("text")
    display.close()
    assert capsys.readouterr() == ("", "")


def test_panel_shows_phase_step_numbers_and_sparkline() -> None:
    console = terminal()
    display = LiveDisplay(console, total_steps=20, refresh=False)
    display.phase("capturing")
    for step in range(1, 5):
        display.step(metrics(step, tokens_per_second=16384.4, seconds=0.5, memory_gib=1.5))
    display.close()
    shown = console.export_text()
    assert "capturing" in shown
    last = shown[shown.rindex("training") :]
    for part in ["step 4/20", "ETA 0:00:08", "loss 2.0000", "grad norm 1.250", "16,384", "0.50"]:
        assert part in last
    assert "█▃▂▁" in last


def test_panel_leaves_its_last_state_and_shows_the_cursor_again() -> None:
    console = terminal()
    display = LiveDisplay(console, total_steps=2, refresh=False)
    display.step(metrics(2))
    display.phase("done")
    display.close()
    display.close()
    hide, show = "\x1b[?25l", "\x1b[?25h"
    output = written(console)
    assert output.count(hide) == output.count(show) == 1
    assert output.rstrip().endswith(show)
    assert "✓" in output


def test_calls_after_close_draw_nothing() -> None:
    for console in (terminal(), pipe()):
        display = open_progress_display(total_steps=2, console=console)
        display.close()
        before = written(console)
        display.phase("training")
        display.step(metrics(1))
        display.message("late")
        assert written(console) == before


def test_messages_stay_above_the_panel() -> None:
    console = terminal()
    display = LiveDisplay(console, total_steps=2, refresh=False)
    display.message("checkpoint saved")
    display.step(metrics(1))
    display.close()
    shown = console.export_text()
    assert shown.index("checkpoint saved") < shown.index("step 1/2")


def test_no_color_takes_colors_away_and_keeps_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    green = "\x1b[32m"
    colored = terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    colorless = terminal()
    for console in (colored, colorless):
        display = open_progress_display(total_steps=2, console=console)
        display.step(metrics(1))
        display.close()
        assert isinstance(display, LiveDisplay)
    assert green in written(colored)
    assert green not in written(colorless)


def test_color_false_is_like_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    display = open_progress_display(total_steps=2, color=False)
    assert isinstance(display, LiveDisplay)
    console = display._console
    display.close()
    assert console.no_color


def test_log_lines_go_through_the_panel_and_back_to_their_stream_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger()
    logger.addHandler(handler)
    console = Console(force_terminal=True, width=60)
    try:
        display = LiveDisplay(console, total_steps=None, refresh=False)
        assert handler.stream is sys.stdout is not stream
        display.close()
        assert handler.stream is sys.stdout is stream
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, 7.0], "▁█"),
        ([7.0, 3.5, math.nan, 0.0], "█▅ ▁"),
        ([math.nan, math.inf], "  "),
    ],
)
def test_sparkline_spans_least_to_greatest(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected

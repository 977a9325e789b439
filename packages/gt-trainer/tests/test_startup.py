import json
import time

import pytest

from gt_trainer.startup import StartupClock


def test_parts_are_of_the_clock_and_of_the_processor_and_add_up_to_their_totals(tmp_path):
    clock = StartupClock()
    with clock.part("capture"):
        time.sleep(0.05)
    with clock.part("capture"):
        pass
    file = tmp_path / "startup.json"
    parts = clock.finish(file)
    assert json.loads(file.read_text()) == parts
    names = ("imports", "capture", "execution", "total")
    assert list(parts) == [*names, *(f"cpu_{name}" for name in names)]
    assert parts["capture"] >= 0.05 > parts["cpu_capture"]  # a sleep needs no processor
    for prefix in ("", "cpu_"):
        *summands, total = [parts[prefix + name] for name in names]
        assert sum(summands) == pytest.approx(total)


def test_what_comes_after_the_first_update_is_no_part_of_the_start():
    clock = StartupClock()
    assert clock.finish(None) is not None
    with clock.part("passes"):
        pass
    assert clock.finish(None) is None
    assert clock.seconds("passes") == clock.cpu_seconds("passes") == 0

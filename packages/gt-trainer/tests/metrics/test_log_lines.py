"""What of torchtitan's log a user sees."""

import logging

import pytest

from gt_trainer.metrics.log_lines import start_logging


@pytest.fixture
def titans_logger():
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_lines_that_say_nothing_are_below_the_default_level(titans_logger, capsys):
    start_logging()
    titans_logger.info("Sleeping 2 seconds for other ranks to complete")
    titans_logger.info("Peak FLOPS used for computing MFU: inf")
    titans_logger.warning(
        "initial_load_model_only=True has no effect without an initial_load_path."
    )
    titans_logger.info("Training starts at step 1")
    titans_logger.info("Peak FLOPS used for computing MFU: 9.890e+14")
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(" - INFO - ")[2] for line in shown] == [
        "Training starts at step 1",
        "Peak FLOPS used for computing MFU: 9.890e+14",
    ]


def test_a_debugging_logger_shows_them(titans_logger, capsys):
    start_logging()
    titans_logger.setLevel(logging.DEBUG)
    titans_logger.handlers[0].setLevel(logging.DEBUG)
    titans_logger.info("Training completed")
    assert capsys.readouterr().out.endswith(" - DEBUG - Training completed\n")

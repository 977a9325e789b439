"""Every test of this package runs on the CPU, whatever the machine has."""

import signal
import sys
from pathlib import Path

from hypothesis import settings

from gt_trainer import device

# An example's time is no property of ours, and a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

device.install("cpu")

sys.path.insert(0, str(Path(__file__).parent))  # tests import what they share

# A shell that runs pytest in the background lets it ignore Ctrl-C, and so would every program that a
# test starts and interrupts. A handler here becomes the default disposition there.
signal.signal(signal.SIGINT, signal.default_int_handler)

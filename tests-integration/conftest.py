"""Every test of this folder runs on the CPU, whatever the machine has."""

from gt_trainer import device

device.install("cpu")

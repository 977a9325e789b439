"""The forward and backward of a training step: eager, captured, joint or in a pipeline."""

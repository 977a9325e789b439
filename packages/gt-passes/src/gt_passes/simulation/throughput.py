"""From the time of a step to what people compare: tokens per second, and model FLOPs utilization.

MFU is that of Chowdhery et al., *PaLM* (2022), appendix B: the FLOPs that the model needs, without
recomputation, over the peak of the hardware in bf16.
"""

from __future__ import annotations

from gt_passes.simulation.hardware import Hardware


def tokens_per_second_per_gpu(step_us: float, *, tokens: int, num_gpus: int) -> float:
    """Tokens of one step, over all ranks and microbatches, by step time and GPUs.

    Raises:
        ValueError: a step that takes no time, or no GPUs.
    """
    if step_us <= 0 or num_gpus <= 0:
        raise ValueError(
            f"step_us is {step_us!r} and num_gpus {num_gpus!r}; allowed: numbers above 0"
        )
    return 1e6 * tokens / step_us / num_gpus


def model_flops_utilization(
    tokens_per_second: float, *, flops_per_token: float, hardware: Hardware
) -> float:
    """The fraction of one GPU's bf16 peak that its share of the model's FLOPs is.

    Args:
        tokens_per_second: of one GPU.
        flops_per_token: forward and backward, as the trainer counts them for its own MFU.
        hardware: the machine.
    """
    return tokens_per_second * flops_per_token / hardware.peak_bf16_flops_per_s


def optimizer_step_us(
    num_parameters: int,
    hardware: Hardware,
    *,
    bytes_per_parameter: int = 4,
    num_states: int = 2,
    clips_gradients: bool = True,
) -> float:
    """A fused element-wise optimizer on this rank's shard: memory traffic alone.

    Reads parameter, gradient and states, writes parameter and states. Clipping reads the gradient
    once for the norm, and reads and writes it once more.

    Args:
        num_parameters: held by this rank.
        hardware: the machine.
        bytes_per_parameter: of each of parameter, gradient and state.
        num_states: 2 for Adam.
        clips_gradients: whether the norm of the gradients is bounded.
    """
    passes = 3 + 2 * num_states + (3 if clips_gradients else 0)
    rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    return 1e6 * passes * num_parameters * bytes_per_parameter / rate

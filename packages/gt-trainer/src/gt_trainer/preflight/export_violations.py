"""What stands in the way of weights in Hugging Face's form, told before they are trained.

torchtitan's adapters pass over names that they do not know, and the file that is left lacks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gt_config import Violation

_FLAG = "--checkpoint.last_save_in_hf"
_LEAVE_OUT = "leave the flag out"


def export_violations(config: Any) -> Iterator[Violation]:
    """Yield what the last save would lose, if it is to be in Hugging Face's form.

    Args:
        config: a ``GraphTrainer.Config``.
    """
    spec = config.model_spec
    if not config.checkpoint.last_save_in_hf or not config.checkpoint.enable or spec is None:
        return
    if spec.state_dict_adapter is None:
        yield Violation(
            flag=_FLAG,
            value=True,
            allowed=f"False for {spec.name}, which has no state_dict_adapter",
            fix=_LEAVE_OUT,
        )
        return
    with torch.device("meta"):
        model = spec.model.build()
    buffers = {name for name, _ in model.named_buffers()}
    state = {name: value for name, value in model.state_dict().items() if name not in buffers}
    adapter = spec.state_dict_adapter(spec.model, None)
    lost = sorted(state.keys() - adapter.from_hf(adapter.to_hf(state)).keys())
    if lost:
        yield Violation(
            flag=_FLAG,
            value=True,
            allowed=f"False for {spec.name} {spec.flavor}: torchtitan's "
            f"{type(adapter).__name__} leaves out {len(lost)} of its {len(state)} parameters, "
            f"{lost[0]} among them",
            fix=_LEAVE_OUT,
        )

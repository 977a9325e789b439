"""What a run says at its start of each linear layer and each mixture of experts: its precision.

In a line for each kind, precision and reason: which modules, and why they are not in 8 bits. No
product falls back to another precision unseen.
"""

from __future__ import annotations

from torchtitan.protocols.model import BaseModel

from gt_trainer.quantization.products import names_in_short, products_of
from gt_trainer.quantization.quantization_options import QuantizationConfig


def precision_lines(
    model: BaseModel.Config, options: QuantizationConfig, *, own_precision: str
) -> tuple[str, ...]:
    """The table, one line an element; nothing of a model in which nothing is quantized.

    Args:
        model: that is trained, quantized.
        options: of the run.
        own_precision: of what is not quantized, as "bfloat16".
    """
    rows: dict[tuple[str, str], list[str]] = {}
    is_quantized = False
    for product in products_of(model, options):
        what = "experts" if product.kind == "experts" else "linear"
        reason = f" ({product.why_not})" if product.precision is None else ""
        key = (f"{product.precision or own_precision}{reason}", what)
        rows.setdefault(key, []).append(product.name)
        is_quantized |= product.precision is not None
    if not is_quantized:
        return ()
    title = (
        "Precision of matrix products, emulated"
        if options.emulate
        else ("Precision of matrix products")
    )
    return (
        f"{title}:",
        *(
            f"  {len(names)} {what}: {precision}: {names_in_short(names)}"
            for (precision, what), names in rows.items()
        ),
    )

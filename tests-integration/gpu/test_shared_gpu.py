"""Several ranks that share one device, whose tensors travel through the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.sites import Site


@pytest.mark.slow  # each rank is a process of its own
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (2, 2)], ids=["fsdp2", "tp2", "fsdp2-tp2"])
def test_captured_ranks_are_eager_ranks_to_the_bit(
    site: Site, degrees: tuple[int, int], tmp_path: Path
) -> None:
    from gpu.shared_gpu_cases import differences

    assert differences(site.device.type, degrees, tmp_path) == []

"""How layers are captured in a run whose model a solver places: all of them."""

from __future__ import annotations

from gt_config import CaptureLayers, CompileConfig


def capture_layers_of(options: CompileConfig) -> CaptureLayers:
    """As asked for; of a placed model, every layer.

    A placed model runs its plan and does not call its layers, so that none can be traced in place
    of others.
    """
    return "full" if options.autoparallel else options.capture_layers

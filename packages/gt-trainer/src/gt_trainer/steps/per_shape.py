"""What a captured function does when it is called with inputs of other shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gt_config import ShapeChangePolicy
from gt_trace import InputMismatchError

Bound = Callable[..., Any]


class PerShape:
    """Captures on the first call, and again for other inputs if the policy says so.

    Args:
        capture: makes, of the (args, kwargs) of a call, what runs such calls. That raises
            ``InputMismatchError`` before it runs anything, if it does not fit a call.
        policy: "error" lets that error through; "recapture" captures for the new inputs and keeps
            what was captured before.
    """

    def __init__(
        self,
        capture: Callable[[tuple[Any, ...], dict[str, Any]], Bound],
        *,
        policy: ShapeChangePolicy,
    ) -> None:
        self._capture = capture
        self._policy = policy
        self._bound: list[Bound] = []
        """The one used last comes first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run what fits the call.

        Raises:
            InputMismatchError: nothing does, and the policy is "error".
        """
        if not self._bound:
            self._bound.append(self._capture(args, kwargs))
        if self._policy == "error":
            return self._bound[0](*args, **kwargs)
        for bound in self._bound:
            try:
                result = bound(*args, **kwargs)
            except InputMismatchError:
                continue
            self._bound.remove(bound)
            self._bound.insert(0, bound)
            return result
        self._bound.insert(0, self._capture(args, kwargs))
        return self._bound[0](*args, **kwargs)

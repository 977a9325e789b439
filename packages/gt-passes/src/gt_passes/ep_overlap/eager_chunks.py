"""Chunks made before tracing: a module's forward runs once for each chunk of its inputs.

The eager producer of chunk metadata. It wraps the forwards of some *instances* of one model for the
time of a capture; what the trace records then is two independent bodies between a cut and a join,
annotated with ``ChunkAnnotation``. Nothing of the model changes, and the handle takes the wrappers
off. After the capture, ``settle_chunk_annotations`` finishes what only the whole graph can tell.

Before (the forward of one module)::

    y = forward(x, mask)

After, with two chunks along the batch::

    x0, x1 = split(x)                       # split_boundary
    mask0, mask1 = split(mask)              # split_boundary
    y0 = forward(x0, mask0)                 # body, chunk 0
    y1 = forward(x1, mask1)                 # body, chunk 1
    y = cat([y0, y1])                       # materialization

Idea: torchtitan's pull request 3363 ("EP overlap eager chunking").
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from gt_config import EpChunkDim
from gt_config.node_keys import ChunkAnnotation
from gt_passes.ep_overlap.chunk_inputs import ForwardChunks
from gt_passes.ep_overlap.input_layout import InputLayout
from gt_passes.errors import ForwardChunkingError
from gt_trace.annotate import REPLACED, AnnotationHandle, annotate
from gt_trace.fsdp import gathered

_NUM_CHUNKS = 2
"""What the eager producer supports; the graph producer takes any number."""


class ChunkedForwards(AnnotationHandle):
    """Takes the wrappers of ``chunk_forwards`` off again. Also a context manager that does so."""

    def __init__(self, undo: list[Callable[[], None]], roots: tuple[str, ...]) -> None:
        super().__init__(undo)
        self.roots = roots
        """Fully qualified names of the wrapped modules, for ``settle_chunk_annotations``."""


def chunk_forwards(
    model: nn.Module,
    *,
    modules: str | Sequence[str],
    chunk_dim: EpChunkDim,
    num_chunks: int = _NUM_CHUNKS,
    layout: InputLayout | None = None,
    may_match_none: bool = False,
) -> ChunkedForwards:
    """Run the forwards of some modules chunk by chunk until the handle is undone.

    Parameters that ``gt_trace.fsdp`` sharded are gathered once for all chunks. Buffers that
    a forward updates in place are updated once by each chunk, in order.

    Args:
        model: whose instances are wrapped. Other instances of the same classes are not touched.
        modules: patterns of dotted names, as ``layers.*.moe``; an asterisk stands for one
            component. Modules that are None are skipped.
        chunk_dim: "batch" cuts samples, "seq" cuts the tokens of each sample. Only a module that
            treats tokens one by one can be cut along the sequence.
        num_chunks: 2.
        layout: where batch and sequence stand in the inputs; None: as ``InputLayout`` says. All
            wrapped modules must take the arguments that it names.
        may_match_none: whether ``model`` may be a part of one that holds none of the modules.

    Returns:
        The handle that takes the wrappers off again.

    Raises:
        ForwardChunkingError: no module matches, one lies within another, or a forward does not take
            what the layout names. A call of a wrapped forward raises it too, if its inputs cannot
            be cut or its outputs not be joined; the text says what was seen.
    """
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    if num_chunks == _NUM_CHUNKS:
        roots, problems = _find_roots(model, patterns, may_match_none=may_match_none)
    else:
        roots, problems = (
            [],
            [f"the eager producer makes {_NUM_CHUNKS} chunks; chunk the traced graph for others"],
        )
    if problems:
        raise ForwardChunkingError(
            region_root=" and ".join(patterns),
            what=f"{num_chunks} chunks along {chunk_dim}",
            problems=problems,
        )
    # All are judged before the first is wrapped, so that an error leaves the model as it was.
    chunked = [
        (
            root,
            module,
            ForwardChunks(
                region_root=root,
                signature=_signature_of(module),
                layout=layout,
                chunk_dim=chunk_dim,
                num_chunks=num_chunks,
            ),
        )
        for root, module in roots
    ]
    with ExitStack() as wrapped:  # takes them off again if a later one cannot be put on
        for root, module, chunks in chunked:
            wrapped.callback(_wrap(root, module, chunks))
        return ChunkedForwards([wrapped.pop_all().close], tuple(root for root, _ in roots))


def _find_roots(
    model: nn.Module, patterns: tuple[str, ...], *, may_match_none: bool
) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """The modules to wrap, by name, and what is wrong with the patterns."""
    names = [name for name, _ in model.named_modules() if name]
    problems = []
    for pattern in patterns:
        if may_match_none or any(_matches(pattern, name) for name in names):
            continue
        near = difflib.get_close_matches(pattern, names, n=3) or names[:3]
        problems.append(f"no module of the model matches {pattern!r}; it has {', '.join(near)}")
    roots = [
        (name, module)
        for name, module in model.named_modules()
        if name and any(_matches(pattern, name) for pattern in patterns)
    ]
    matched = {name for name, _ in roots}
    for name, _ in roots:
        components = name.split(".")
        outer = {".".join(components[:length]) for length in range(1, len(components))}
        problems.extend(f"{name} lies within {each}" for each in sorted(outer & matched))
    return roots, problems


def _matches(pattern: str, name: str) -> bool:
    patterns, components = pattern.split("."), name.split(".")
    return len(patterns) == len(components) and all(map(fnmatchcase, components, patterns))


def _signature_of(module: nn.Module) -> inspect.Signature:
    """The forward's, as its class declares it: wrappers of an instance often take anything."""
    signature = inspect.signature(type(module).forward)
    _, *parameters = signature.parameters.values()
    return signature.replace(parameters=parameters)


def _wrap(root: str, module: nn.Module, chunks: ForwardChunks) -> Callable[[], None]:
    original = module.forward

    @functools.wraps(original)
    def in_chunks(*args: Any, **kwargs: Any) -> Any:
        calls = chunks.split(args, kwargs)
        outputs = []
        with gathered(module):
            for chunk_id, call in enumerate(calls):
                body = ChunkAnnotation(
                    region_root=root,
                    role="body",
                    chunk_id=chunk_id,
                    direction="forward",
                    producer="eager",
                )
                with annotate(body):
                    outputs.append(chunks.run(original, call))
        return chunks.join(calls, outputs)

    had_own = "forward" in vars(module)
    vars(in_chunks)[REPLACED] = (original,) if had_own else ()
    object.__setattr__(module, "forward", in_chunks)

    def undo() -> None:
        if vars(module).get("forward") is not in_chunks:
            raise RuntimeError(
                f"the forward of {root} was wrapped again after it was chunked; undo the later "
                "wrapper first"
            )
        if had_own:
            object.__setattr__(module, "forward", original)
        else:
            object.__delattr__(module, "forward")

    return undo

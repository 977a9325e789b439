"""What a shape environment knows of sizes that only a run will tell, as JSON and back.

Ranges, which of them are sizes, what is asserted of them at run time, and what was concluded: a
compiler and the verifier ask for it as after a capture.
"""

from __future__ import annotations

from typing import Any

from gt_trace._torch_internals import (
    ShapeEnv,
    backed_sizes,
    forget_conclusions,
    known_of_sizes,
    runtime_assertion,
    value_range,
)
from gt_trace.artifacts.expressions import SizeReader, encoded_expression
from gt_trace.errors import ArtifactError

_PAIRS = ("axioms", "replacements")
_MAX_FACTS = 20_000
"""The most entries of each table; PyTorch makes some thousand symbols a second."""


def encoded_facts(shape_env: ShapeEnv) -> dict[str, Any]:
    """Everything that is known of sizes.

    Raises:
        ArtifactError: a size has a value as an example, as those of inputs marked dynamic have:
            what was assumed of them is known as code of the tracer alone.
    """
    known = known_of_sizes(shape_env)
    if known.guards or backed_sizes(known):
        raise ArtifactError(
            "a step with dynamic sizes of inputs cannot be stored: what the trace assumed of them "
            "are guards of the tracer. Capture with static sizes, one step for each"
        )
    encoded = encoded_expression
    return {
        "symbols": [
            [symbol.name, encoded(each.lower), encoded(each.upper), symbol in known.size_like]
            for symbol, each in known.var_to_range.items()
        ],
        "asserted": [
            [symbol.name if symbol is not None else None, encoded(each.expr), str(each.msg)]
            for symbol, assertions in known.deferred_runtime_asserts.items()
            for each in assertions
        ],
        "divisible": sorted((encoded(each) for each in known.divisible), key=repr),
        **{
            name: [[encoded(key), encoded(held)] for key, held in getattr(known, name).items()]
            for name in _PAIRS
        },
    }


def restored_facts(facts: Any, shape_env: ShapeEnv) -> SizeReader:
    """Let ``shape_env`` know what is stored, of new symbols; return a reader of their expressions.

    Raises:
        ArtifactError: The facts are too many, or an expression cannot be read.
    """
    if any(len(table) > _MAX_FACTS for table in facts.values()):
        raise ArtifactError(f"more than {_MAX_FACTS:,} facts of one kind are stored of sizes")
    known = known_of_sizes(shape_env)
    symbols: dict[str, Any] = {}
    with known.ignore_fresh_unbacked_symbols():
        for name, *_ in facts["symbols"]:
            symbols[name] = known.create_unbacked_symint().node.expr
    reader = SizeReader(symbols, {str(key): held for key, held in facts["replacements"]})
    decoded = reader.read
    if not {key for key, _ in facts["replacements"]} <= symbols.keys():
        raise ArtifactError("what is replaced is not among the symbols of the artifact")
    for name, lower, upper, is_size in facts["symbols"]:
        known.var_to_range[symbols[name]] = value_range(decoded(lower), decoded(upper))
        if is_size:
            known.size_like.add(symbols[name])
    for name, expression, message in facts["asserted"]:
        symbol = None if name is None else symbols[name]
        known.deferred_runtime_asserts.setdefault(symbol, []).append(
            runtime_assertion(decoded(expression), message)
        )
        known.num_deferred_runtime_asserts += 1
    known.divisible.update(map(decoded, facts["divisible"]))
    for table in _PAIRS:
        getattr(known, table).update((decoded(key), decoded(held)) for key, held in facts[table])
    forget_conclusions(shape_env)
    return reader

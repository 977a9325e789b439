"""``--compile.autoparallel``: a solver's plan in place of hand-written parallelism."""

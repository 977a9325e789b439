"""An independent second look at plans: everything is worked out again on the whole graph.

::

    plan_audit     the audit, and its report
    node_checks    options are offered, links and constraints kept
    cost_checks    times of nodes, steps and windows
    step_walk      where the data of each rank is after each step of a redistribution
    memory_checks, in_flight
                   bytes, and those of weights and gradients on their way
    layer_turns    at which moment of the backward most is there
    recomputation_checks
                   what runs again in the backward may, and what it takes
    parameter_ways what stands between parameters and their users, and before their gradients
    viewed_storage, shards, scopes
                   whose storage a result is in; shapes of shards; in which layer a node runs
"""

from gt_autoparallel.audit.plan_audit import audit_plan

__all__ = ["audit_plan"]

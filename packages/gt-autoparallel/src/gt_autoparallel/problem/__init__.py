"""From a graph and what is asked for to the solver's numbers, and its refusals back to words.

::

    constraints            what a user demands, resolved to single nodes
    clustering             alike layers share their choices
    redistribution_tables  prices of every way from one layout to another
    problem_of_graph       the whole problem
    axis_styles, tensor_parallel_names
                           plans that experts write by hand (DDP, FSDP, TP, EP), as constraints
    expert_rivals          the same as what the solver must not lose to
    infeasible_requests    why there is no plan, in terms of what was asked for
"""

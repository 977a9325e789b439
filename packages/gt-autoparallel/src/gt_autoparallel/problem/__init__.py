"""From a graph and what is asked for to the solver's numbers, and its refusals back to words.

::

    constraints            what a user demands, resolved to single nodes
    clustering             alike layers share their choices
    redistribution_tables  prices of every way from one layout to another
    problem_of_graph, problem_parts, memory_parts, choices
                           the whole problem; what of it does not depend on budget and constraints:
                           times and edges, bytes by moment, and what is chosen between
    requested_memory       bytes of a plan for a request
    axis_styles, tensor_parallel_names
                           plans that experts write by hand (DDP, FSDP, TP, EP), as constraints
    alike_layers           which layers may choose differently from each other
    recomputed_choices     where a search under a budget begins
    expert_rivals          the same as what the solver must not lose to
    infeasible_requests    why there is no plan, in terms of what was asked for
"""

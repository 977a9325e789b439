"""What placements cost: microseconds of nodes and redistributions, bytes of each rank.

::

    costs            time of nodes and steps: a roofline, and NCCL's alpha-beta model
    queued           the same where activations wait for parameters, for searches alone
    memory           bytes of a whole plan
    node_memory      bytes of a choice
    layer_memory     what layers keep and make again, and when in the backward most is there
    needed_storages  what the backward needs of what may be computed again
    saved_storages   what the forward keeps for the backward
    recomputability  what the backward may compute again instead
    microbatches     what a step of several microbatches does once, and what is there for each
    experts          what routed experts compute, exchange and keep
"""

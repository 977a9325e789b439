"""What placements cost: microseconds of nodes and redistributions, bytes of each rank.

::

    costs            time of nodes and steps: a roofline, and NCCL's alpha-beta model
    queued           the same where activations wait for parameters, for searches alone
    memory           bytes of a choice, and of a whole plan
    saved_storages   what the forward keeps for the backward
    recomputability  what the backward may compute again instead
    microbatches     what a step of several microbatches does once, and what is there for each
    experts          what routed experts compute, exchange and keep
"""

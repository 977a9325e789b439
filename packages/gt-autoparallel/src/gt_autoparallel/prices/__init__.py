"""What placements cost: microseconds of nodes and redistributions, bytes of each rank.

::

    costs            time of nodes and steps: a roofline, and NCCL's alpha-beta model
    memory           bytes of a choice, and of a whole plan
    saved_storages   what the forward keeps for the backward
    experts          what routed experts compute, exchange and keep
"""

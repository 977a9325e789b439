"""Stored graphs of a run: what identifies them, which ranks share one, how a start gets its own.

::

    plain_data      whatever shapes a graph, as data of which a fingerprint can be taken
    whole_values    what values hold that have no attributes to look into
    run_identity    the fingerprint of the graph that a rank is about to capture
    alike_ranks     which ranks can run one graph, as captures by some of them say
    rank_exchange   what ranks tell each other
    storable_graph  what a step must be able to do so that its graph can be stored
    graph_folder    where graphs lie, and what a compiler made of them
    shared_capture  one capture for all ranks that are alike
    run_artifacts   what the steps of a run ask for a graph
"""

"""The captured step as a graph of operators, and the layouts of its values.

::

    capture, functional_graph, decompositions, graph_conversion, draft_nodes, unsupported_nodes
                     from a model to its graph
    placement_graph  the graph that is planned
    function_graph   functions that an operator is given, as data: FlexAttention's
    graph_encoding   the graph as JSON, and its digest
    layer_names, layer_turns, parameter_chains
                     what else is read off a graph: layers, which of them take turns in the
                     backward, and the ways of parameters and gradients
    experts          the routed experts of one layer as one operator
    layouts, redistribution, redistribution_ways
                     meshes and layouts, and the steps from one layout to another
    options          one way to run a node: a layout for each operand and output
"""

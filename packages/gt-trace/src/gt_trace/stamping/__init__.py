"""Capture that hardly depends on depth: a few layers are traced, the others stamped.

==========================  ====================================================================
module                      what it is
==========================  ====================================================================
``trace_by_stamping``       the capture, from the model to the whole step
``report``                  what became of it
``layer_list``              the model's list of blocks; leaving blocks out for a while
``layer_plan``              which layers are traced: runs of like layers, with a period
``layer_difference``        gate 1: are two layers built alike?
``operator_stream``         what each layer computes, recorded without making a graph
``recorder``                what notes it
``recordings``              what is noted of them
``known_operators``         operators answered from what they gave before
``stream_difference``       gate 2: do layers compute alike, also in a shorter model?
``trace_marks``             where layers begin in the trace of the shortened model
``short_graph``             that trace, cut into parts
``references``              gate 3: what do two layers both mean by what they read?
``templates``               what two layers agree on, as a value for any layer
``node_templates``          the same of a whole node
``subgraphs``               graphs that operators of a layer take
``numbering``               names and autograd numbers
``unit_symbols``            sizes known at run time only, for each layer its own
``fake_values``             fake tensors, and the memory that they share
``stamped_graph``           the graph of the whole model
``stamped_step``            the captured step around it
``compare_steps``           are two captured steps the same?
``refusal``                 why not
==========================  ====================================================================
"""

from gt_trace.stamping.compare_steps import step_differences
from gt_trace.stamping.report import StampReport
from gt_trace.stamping.trace_by_stamping import trace_step_by_stamping

__all__ = ["StampReport", "step_differences", "trace_step_by_stamping"]

"""Differential fuzzing of graph passes: random steps x random passes, compared to the last bit.

``make fuzz`` draws small training steps with FSDP, tensor- and expert-parallel collectives, captures
each on gloo processes, runs random lists of registered passes on its graph (with the verifier on),
and executes the graph before and after on the same inputs. Whatever the step leaves behind must be
equal in every bit: outputs, buffers and parameters written in place, the state of the random number
generator, and what opaque custom operators saw, in order.

================  =======================================================================
file              what it is
================  =======================================================================
``case``          what is drawn, as data that JSON can hold
``draw``          drawing it from a seed
``pass_lists``    which passes take part, with which options
``parts``         the layers that steps are made of
``exchanges``     the collectives inside parts, differentiable
``custom_ops``    operators of which no pass knows anything
``tensor_program``  layers made of random views, writes, collectives and dead code
``training_step``   a case as a model, sharded and captured
``worker``        what each rank runs
``verdict``       what came of a case, and how bad that is
``campaign``      many cases, counted
``minimize``      the smallest case that still fails in the same way
================  =======================================================================

``make fuzz`` then draws random steps of one process, and compares captured steps to eager ones, call
by call. Their statements have layouts, in-place writes, custom operators, attributes, ``.data``, random
state and autocast. Everything readable must be equal in every bit, or the step is refused and the
model works as before.

===================  ====================================================================
file                 content
===================  ====================================================================
``step_statements``  the statements of random steps
``capture_case``     one step, run both ways and compared
``captures``         many cases, counted; failing ones are made small
===================  ====================================================================
"""

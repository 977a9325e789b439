"""Matrix products in float8 and MXFP8: which of a model's there are, by torchtitan's converters.

torchtitan converts a model's *configuration*: it puts other classes in the place of linear layers
and experts (``torchtitan/components/quantization``), whose products torchao quantizes. Options come
first here (``quantization_options``), which need neither; then what they make of a model
(``convert``), in a table (``precision_table``). What stands in their way is found before a run
starts (``gt_trainer.preflight.quantization_violations``).
"""

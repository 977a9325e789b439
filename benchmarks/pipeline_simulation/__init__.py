"""Support of `bench_pipeline_simulation`: a second simulation of schedules, by another method."""

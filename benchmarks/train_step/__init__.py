"""What ``bench_train_step.py`` starts and commands: ours, its peers, and the workloads."""

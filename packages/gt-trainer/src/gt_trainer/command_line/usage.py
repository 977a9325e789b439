"""What ``gt-train --help`` shows."""

from __future__ import annotations

USAGE = """\
usage: gt-train [precompile | plan] [--module NAME] [--config NAME] [OPTION ...]
                [--GROUP.FLAG VALUE ...]
       gt-train report FOLDER

Train one of torchtitan's models with its training step captured as one graph.
Without arguments: a small Llama 3, on the sources of Python's standard library, in
one process. Everything is written below --dump_folder (outputs/CONFIG): metrics.jsonl,
one object a step; checkpoints, from which the next run with that folder goes on.

examples:
  gt-train
  gt-train --steps 100 --lr 1e-3 --dump_folder runs/first
  gt-train --compile.mode none --dump_folder runs/eager    (the same losses, bit for bit)
  gt-train --nproc 4 --parallelism.data_parallel_shard_degree 2 \\
           --parallelism.tensor_parallel_degree 2 --dump_folder runs/fsdp_tp
  gt-train --module deepseek_v3 --config deepseek_v3_16b --dry-run --world-size 32
  gt-train precompile --world-size 4 --compile.artifacts graphs \\
           --parallelism.tensor_parallel_degree 2
  gt-train plan --config llama3_8b --cluster h100_sxm --gpus 8
  torchrun --nproc-per-node 8 -m gt_trainer --config llama3_8b
  srun gt-train --config llama3_70b

precompile: capture the graphs of a run whose ranks do not exist, and store them in
the folder of --compile.artifacts, from which its ranks then start

plan: search degrees, schedule, microbatch, memory policy and precision for a model on
a cluster by simulation, and say which recipe is fastest, what limits it and how to run
it. Flags of the configuration that are given hold for every recipe
  --cluster NAME     h100_sxm, h100_hbm2e_500w, h200, gb200_nvl72, or a TOML file
                     (default: h100_sxm)
  --gpus N           GPUs of the run (default: what the configuration is meant for)
  --global-batch-tokens N
                     tokens of one step (default: a sequence on each GPU)
  --minutes M        how long to search (default: 10)
  --what-if nic=800,memory=141
                     look at the same cluster with other NICs (Gb/s), and with other
                     memory (GB), too
  --scaling M        for M minutes more, look at 64 to 16,384 GPUs with the same batch and
                     with one that grows: bounds, and the first guess of each, simulated
  --beside FLAGS     simulate the run with these flags, too, however long it takes, and
                     compare it: --beside '--parallelism.tensor_parallel_degree 8 ...'
  --page FILE        write the plan as an HTML page

report: draw the run in a --dump_folder as one page, FOLDER/report.html: loss, throughput
and memory with restarts marked, what was captured, what passes did and refused

flags that are changed most:
  --steps N          updates of the parameters (--training.steps)
  --lr LR            learning rate, after --lr_scheduler.warmup_steps
                     (--optimizer.param_groups.0.optimizer_kwargs.lr)
  --batch N          sequences of each data-parallel rank (--training.local_batch_size)
  --seq-len N        tokens of a sequence (--training.seq_len)

options:
  --module NAME      model family, another of torchtitan's decoders, or a Python module of
                     yours with functions that return a configuration, ours or
                     torchtitan's (default: llama3); hf:FOLDER trains the model of a local
                     Hugging Face folder (needs gt-trainer[hf])
  --config NAME      configuration (default: the module's debug model)
  --published NAME   in place of both: repeat a run whose throughput was published, on as
                     many GPUs; with --dry-run on its machine (names: --list)
  --nproc N          start N processes on this machine (default: 1, this one)
  --restarts N       with --nproc: after a process died, start all again from the newest
                     intact checkpoint, at most N times (default: 0)
  --log-rank RANKS   with --nproc: ranks whose output is shown: 0,2 or all (default: 0);
                     the others write to logs/rank_N.log in the dump folder
  --dry-run          check everything, build the model without memory, place and capture
                     it, print its size and collectives, and stop
  --world-size N     with --dry-run and precompile: number of ranks to pretend (default:
                     what the configuration is meant for)
  --trace FILE       with --dry-run: write the simulated step to FILE, for ui.perfetto.dev
  --timeline FILE    with --dry-run of a pipeline: draw all of its ranks as an HTML page
  --hardware FILE    with --dry-run, --parallelism.pipeline_parallel_balance simulated or
                     --compile.autoparallel: the machine to simulate and plan for, as
                     benchmarks/calibrate_simulation.py writes it (default: H100 SXM)
  --list             list modules and configurations
  --help, -h         show this text
  --help-all         show every flag of the chosen configuration
  --version          show the versions of the six packages, torch and torchtitan

flags of the configuration (all of them: --help-all):
  --training.*       steps, seq_len, local_batch_size, global_batch_size, ...
  --parallelism.*    data_parallel_shard_degree, data_parallel_replicate_degree,
                     tensor_parallel_degree, expert_parallel_degree, ...
  --compile.*        mode (none, aot_fx_trace, aot_joint), passes, disable_passes, ...
  --optimizer.param_groups.0.optimizer_kwargs.weight_decay W
                     weight decay (betas, eps: likewise)
  --optimizer.*  --lr_scheduler.*  --checkpoint.*  --validator.*  --metrics.*
  --dataloader.*  --debug.*  --profiler.*  --comm.*  --dump_folder  --hf_assets_path
  An item of a list is named by its number, as in param_groups.0.
  A switch is set by --debug.deterministic and unset by --debug.no-deterministic.

environment:
  GT_DEVICE          cpu, cuda or auto (default: auto, a GPU if there is one)
  OMP_NUM_THREADS    threads of each process (default with --nproc: CPUs / N)

modules and configurations:
{listing}

exit status: 0 done; 1 the run failed; 2 the command line or configuration is wrong, and
nothing was started; 128 + n ended by signal n (Ctrl-C: 130).
"""
"""The text, with a place for ``{listing}``: modules and configurations, a line each."""

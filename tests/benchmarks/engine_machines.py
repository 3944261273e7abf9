"""Weights to engines on other machines, and tokens per second of many: `python -m tests.benchmarks.engine_machines`.

Three network namespaces with an SSH server each stand for machines; all share this one's cores.

    sync      seconds to bring weights, and of paused generation: to servers here, and to a server on another machine;
              beside rsync of the same bytes over the same SSH server
    replicas  tokens per second of 1, 2, 4 and 30 replicas of the embedded engine on three machines
"""

"""The commands about machines: ls, check, add, gc, drain."""

import argparse
import getpass
import json
import socket
from contextlib import closing
from dataclasses import asdict
from typing import Any

from flows.housekeeping import checked_keep_last, print_removals
from flows.preflight import store_named
from infra.inventory import add_host, find_host, inventory_file, load_inventory
from rollouts_core.errors import BadInput

REACH_SECONDS = 20.0
MARKS = {"ok": "ok", "warning": "warning", "failed": "FAILED"}


def ls_command(options: argparse.Namespace) -> int:
    from infra.machines.doing import doing

    inventory = load_inventory()
    found = doing(inventory)
    if options.json:
        data = {name: {**asdict(host), "doing": asdict(found[name])} for name, host in inventory.items()}
        print(json.dumps(data, default=str))
        return 0
    if not inventory:
        print(f"{inventory_file()} lists no machine: `rollouts machines add NAME --host ...`")
    for name, host in inventory.items():
        place = f"{host.user + '@' if host.user else ''}{host.host}{f':{host.port}' if host.port != 22 else ''}"
        gpus = f"{host.gpus} x {host.gpu_memory_gb:g} GB" if host.gpu_memory_gb else f"{host.gpus}"
        through = f"  through {host.jump}" if host.jump else ""
        print(f"{name:<16} {place:<32} GPUs {gpus:<12} {' '.join(host.labels)}{through}")
        for line in found[name].lines():
            print(f"{'':<16} {line}")
    return 0


def drain_command(options: argparse.Namespace) -> int:
    """Drain a machine: nobody leases it any more, and servers for other machines leave it."""
    from infra.connection.remote import Remote

    with closing(Remote(options.name, find_host(options.name), REACH_SECONDS)) as remote:
        who = f"{getpass.getuser()}@{socket.gethostname()}"
        leases = remote.open().call("drain", who=who, undo=options.undo)
    if options.json:
        print(json.dumps({"name": options.name, "drained": not options.undo, "leases": leases}))
    elif options.undo:
        print(f"{options.name} may be leased again")
    else:
        print(f"{options.name} is drained: servers leave it within a minute, and nothing new is leased there")
        if leases:
            print("what runs there in other jobs goes on; `rollouts machines ls` says what that is")
    return 0


def check_command(options: argparse.Namespace) -> int:
    """Exit status 1 when something would make a run fail there."""
    from infra.machines.check import check_machine

    findings = []
    for finding in check_machine(options.name, find_host(options.name)):
        findings.append(finding)
        if not options.json:
            print(f"{finding.what:<12} {MARKS[finding.state]:<8} {finding.found}")
            if finding.advice:
                print(f"{'':<12} {'':<8} {finding.advice}")
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def add_command(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in FIELDS}
    values = {name: value for name, value in given.items() if value not in (None, [])}
    nested = {name: value for name in SLURM if (value := getattr(options, name)) not in (None, [], False)}
    if nested and not options.slurm:
        raise BadInput([f"--{name.replace('_', '-')} needs --slurm" for name in nested])
    path = add_host(options.name, values | ({"slurm": nested} if options.slurm else {}))
    if options.json:
        print(json.dumps({"name": options.name, "file": str(path)}))
    else:
        print(f"{options.name} is in {path}; `rollouts machines check {options.name}` says whether it is fit")
    return 0


def gc_command(options: argparse.Namespace) -> int:
    from infra.machines.collect import collect_on_machine

    keep_last = checked_keep_last(options)
    store = store_named(options.store)
    removals = collect_on_machine(options.name, find_host(options.name), store, keep_last, options.dry_run)
    print_removals(removals, options)
    return 0


FIELDS: dict[str, dict[str, Any]] = {
    "host": {"required": True},
    "port": {"type": int},
    "user": {},
    "key": {"help": "a private key"},
    "known_hosts": {},
    "jump": {"help": "another machine, as a jump host"},
    "work": {"help": "the work directory on the machine"},
    "python": {"help": "Python 3.11 or later on the machine"},
    "environment": {"choices": ("built", "own")},
    "wheels": {"help": "a directory of wheels on this machine"},
    "requirements": {"help": "pins of the environment's packages"},
    "gpus": {"type": int},
    "gpu_memory_gb": {"type": float},
    "labels": {"action": "append", "metavar": "LABEL"},
    "address": {"help": "address by which other machines reach it"},
}


SLURM: dict[str, dict[str, Any]] = {
    "partition": {},
    "account": {"help": "account that pays"},
    "qos": {},
    "reservation": {},
    "constraint": {"help": "features that nodes must have"},
    "gpu_type": {"help": "Slurm's name of the GPU, for example h100"},
    "cpus": {"type": int, "help": "processors on each node"},
    "memory_gb": {"type": float, "help": "memory on each node"},
    "exclusive": {"action": "store_true", "help": "share no node with others"},
    "hours": {"type": float, "help": "length of an allocation"},
    "signal_seconds": {"type": int, "help": "seconds before the end at which jobs save a checkpoint"},
    "cpu_partition": {"help": "partition for jobs without GPUs"},
    "container": {"help": "the command that runs jobs: 'apptainer exec --nv --bind /scratch /images/torch.sif'"},
    "sshfs": {"action": "store_true", "help": "compute nodes do not see the work directory, and mount it by sshfs"},
    "local_disk": {"help": "a directory on each node's own disk"},
    "modules": {"action": "append", "metavar": "MODULE", "help": "a module to load first"},
    "options": {"action": "append", "metavar": "OPTION", "help": "a further option of sbatch, as --options=--nice=100"},
}


def add_fields(parser: argparse.ArgumentParser) -> None:
    """The fields of a machine as options."""
    for name, settings in FIELDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, **settings)
    parser.add_argument("--slurm", action="store_true", help="it is the login node of a Slurm cluster")
    cluster = parser.add_argument_group("with --slurm")
    for name, settings in SLURM.items():
        cluster.add_argument(f"--{name.replace('_', '-')}", dest=name, **settings)

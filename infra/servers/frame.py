"""A model without its weights: what servers on other machines start with, since the trainer gives them its weights."""

from pathlib import Path

from infra.jobs.session import MachineSession
from infra.machines.ssh_machine import SSHMachine
from infra.transfer.inputs import tree_of_files
from infra.transfer.sync import send_tree
from rollouts_core.stages.stage import Stage

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".safetensors.index.json")


def send_frame(segment: Stage, session: MachineSession, machine: SSHMachine) -> str:
    """See to it that a machine has the policy's config and tokenizer. Returns where, or a name of the hub."""
    root = _frame_here(segment, session)
    if root is None:
        return segment.external["model"].location
    tree = tree_of_files(root, [path for path in root.rglob("*") if path.is_file() and not is_weights(path.name)])
    send_tree(machine.remote, "inputs", tree.name, tree.root, tree.entries)
    return tree.path(f"{machine.remote.work}/inputs")


def is_weights(name: str) -> bool:
    return name.endswith(WEIGHTS)


def _frame_here(segment: Stage, session: MachineSession) -> Path | None:
    """A directory here that has these files; None where the model is the hub's."""
    policy = segment.inputs.get("policy")
    if policy is None:
        place = Path(segment.external["model"].location)
        return place if place.is_dir() else None
    if session.store.has(policy):
        return session.store.open(policy) / "policy"
    place = session.store.home / "frames" / policy.directory
    for entry in session.machine.manifest(policy).files:
        if entry.path.startswith("policy/") and not is_weights(entry.path) and not (place / entry.path).exists():
            session.machine.fetch(policy, place, entry.path)
    return place / "policy"

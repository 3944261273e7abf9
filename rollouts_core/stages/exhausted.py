"""The message when a stage's device has no memory left: what uses it, and what to change.

Decision: the use of memory is counted, as `rollouts plan --estimate` counts it, because a process that ran out of
memory can't be asked any more.
"""

import sys

from rollouts_core.errors import RolloutsError
from rollouts_core.memory import GIB
from rollouts_core.stages.peaks import Part, parts_of
from rollouts_core.stages.sizes import size_in, size_of
from rollouts_core.stages.specs import DPOSpec, EvaluateSpec, RLSpec, SFTSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.store.store import Store

ON_THE_CPU = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
LARGEST = 4


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_out_of_memory, error.exceptions))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, MemoryError) or any(words in str(error) for words in ON_THE_CPU)


def out_of_memory_message(stage: Stage, store: Store, device: str, error: BaseException) -> str:
    """The message of a stage out of memory: the largest parts first, and the fields that make them smaller."""
    told, spec = _told(device, error), stage.spec
    if not isinstance(spec, SFTSpec | DPOSpec | RLSpec | EvaluateSpec):
        return told
    try:
        parts = sorted(_parts(spec, stage, store, device != "cpu"), key=lambda part: part.bytes, reverse=True)[:LARGEST]
    except (RolloutsError, LookupError, OSError, ValueError) as missing:
        return f"{told} (what holds it is not known: {missing})"
    largest = ", ".join(f"{part.name} {part.bytes / GIB:.2f} GiB" for part in parts)
    fields = list(dict.fromkeys(part.field for part in parts if part.field))
    if not isinstance(spec, EvaluateSpec) and not spec.backend.activation_checkpointing:
        fields.append("backend.activation_checkpointing")
    return f"{told}. Largest, as counted: {largest}. These fields determine it: {', '.join(fields)}"


def message_of_a_rank(device: str, error: BaseException) -> str:
    """The message of a rank other than 0, which knows neither the stage's rows nor its files."""
    return (
        f"{_told(device, error)}. A rank holds its share of weights, gradients and optimizer, and a pass. These fields "
        "determine it: tokens_per_pass, backend.activation_checkpointing, backend.processes, model"
    )


def _told(device: str, error: BaseException) -> str:
    said = str(error).partition("\n")[0].partition(". GPU")[0]
    return f"out of memory on {device}: {said}"


def _parts(spec: SFTSpec | DPOSpec | RLSpec | EvaluateSpec, stage: Stage, store: Store, on_gpu: bool) -> list[Part]:
    rows = {name: int(n) for name, n in store.manifest(stage.inputs["data"]).provenance.summary.items()}
    if spec.model is not None:
        return parts_of(stage, size_of(spec.model, stage.external.get("model"), rows.get("vocab_size")), rows, on_gpu)
    return parts_of(stage, size_in(store.open(stage.inputs["policy"]) / "policy", spec.dtype), rows, on_gpu)

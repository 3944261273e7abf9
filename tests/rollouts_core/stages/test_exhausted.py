"""A device without memory left is one message with numbers and fields."""

import json
from pathlib import Path

import pytest
import torch

from rollouts_core.config import PipelineConfig
from rollouts_core.metrics.loggers import JSONLLogger
from rollouts_core.stages import job
from rollouts_core.stages.exhausted import is_out_of_memory
from rollouts_core.stages.plan import plan
from rollouts_core.store.local import LocalStore
from rollouts_core.store.manifest import ArtifactId, Manifest, Provenance
from rollouts_core.training.exporting import save_policy
from tests.rollouts_core.models import character_tokenizer, tiny_model

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which\n1.2 is free"
ROWS = {"demonstrations/rows": 10.0, "demonstrations/tokens": 300.0, "vocab_size": 24.0}


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (torch.OutOfMemoryError(SAID), True),
        (ExceptionGroup("tasks", [ValueError("x"), torch.OutOfMemoryError(SAID)]), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
    ids=["cuda", "in a group", "cpu", "python", "another"],
)
def test_what_is_out_of_memory(error: BaseException, exhausted: bool) -> None:
    assert is_out_of_memory(error) == exhausted


@pytest.mark.parametrize("stage", ["sft", "rl-1", "evaluate-base"])
def test_the_job_ends_with_what_holds_memory_and_is_not_tried_again(
    stage: str, pipeline_config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError(SAID)

    made = Provenance(1, {}, {}, {}, {}, None, {}, {}, "", 0.0, ROWS, {})
    data = Manifest(ArtifactId("tokenize", "0" * 64), (), made)
    model = tiny_model()
    save_policy(model, character_tokenizer(), tmp_path / "policy", dict(model.named_parameters()))
    monkeypatch.setattr(LocalStore, "open", lambda self, artifact: tmp_path)
    monkeypatch.setattr(job, "make_stage", fail)
    monkeypatch.setattr(LocalStore, "manifest", lambda self, artifact: data)
    wanted = next(entry for entry in plan(pipeline_config).stages if entry.name == stage)
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    status = job._attempt(wanted, LocalStore(tmp_path / "store"), logger, "cpu", None, tmp_path)  # type: ignore[arg-type]
    told = json.loads((tmp_path / "failure.json").read_text())["message"]
    assert status == job.EXIT_BAD_INPUT
    assert told.startswith(
        "out of memory on cpu: CUDA out of memory. Tried to allocate 2.00 GiB. Largest, as counted: "
    )
    assert ("tokens_per_pass" in told) == (stage != "evaluate-base")
    assert ("backend.activation_checkpointing" in told) == (stage != "evaluate-base")
    assert "\n" not in told

"""Two gloo processes against one device: losses, gradients, checkpoints, deaths. Real ranks, started by torchrun."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from rollouts_core.config import LoRAConfig, ScratchModel
from rollouts_core.errors import BadInput
from rollouts_core.memory import GIB
from rollouts_core.training.collate import pack_batch
from rollouts_core.training.models import create_model
from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.optimizers import OptimizerName
from rollouts_core.training.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.training.ranks import check_alike
from rollouts_core.training.shard_files import stored_state
from tests.rollouts_core.models import CONTEXT, character_tokenizer, tiny_model
from tests.rollouts_core.on_ranks import STEPS, optimization, train
from tests.rollouts_core.training.test_packed import sequences

SECONDS = 120


def on_ranks(what: str, directory: Path, processes: int = 2) -> tuple[Any, dict[str, torch.Tensor]]:
    """What rank 0 told, and the weights it ended with."""
    done = launched(what, directory, processes)
    assert done.returncode == 0, done.stderr
    return json.loads((directory / "told.json").read_text()), load_file(directory / "weights.safetensors")


def launched(what: str, directory: Path, processes: int = 2) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["--log-dir=/dev/null", "-m", "tests.rollouts_core.on_ranks", what, str(directory)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # then it ends its ranks, which a kill would leave
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def alone(optimizer: OptimizerName = "adamw") -> PyTorchTrainingBackend:
    return create_pytorch_backend(tiny_model(), create_cross_entropy_loss(), optimization(optimizer))


def assert_same(told: Any, expected: Any, weights: dict[str, torch.Tensor], backend: PyTorchTrainingBackend) -> None:
    for one, other in zip(told, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for name, value in backend.get_weights().result().items():
        torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["train", "checkpointing"])
def test_two_ranks_are_one_device(what: str, tmp_path: Path) -> None:
    """The gradients' norm is compared before clipping, the weights after four steps."""
    told, weights = on_ranks(what, tmp_path)
    backend = alone()
    assert_same(told, train(backend, range(STEPS), tokens_per_pass=1000), weights, backend)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["read-lora", "read", "read-by_first"])
def test_each_rank_reads_its_part_of_the_files(how: str, tmp_path: Path) -> None:
    """Of two files, with tied embeddings."""
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    told, weights = on_ranks(how, tmp_path)
    lora = LoRAConfig(rank=4) if how.endswith("lora") else None
    backend = create_pytorch_backend(model, create_cross_entropy_loss(), optimization(), lora=lora)
    assert_same(told, train(backend, range(STEPS), tokens_per_pass=1000), weights, backend)


@pytest.mark.slow
def test_weights_from_scratch_are_those_of_one_device(tmp_path: Path) -> None:
    made = ScratchModel(hidden_size=32, intermediate_size=64, kv_heads=2)
    model = create_model(made, character_tokenizer("abcdefghijklmnopqrstuvwxyz"), CONTEXT, 5, "cpu")
    model.config.save_pretrained(tmp_path / "model")
    told, weights = on_ranks("drawn", tmp_path)
    backend = create_pytorch_backend(model, create_cross_entropy_loss(), optimization())
    assert_same(told, train(backend, range(STEPS), tokens_per_pass=1000), weights, backend)


@pytest.mark.slow
def test_adapters_in_shards_are_adapters(tmp_path: Path) -> None:
    told, weights = on_ranks("lora", tmp_path)
    backend = create_pytorch_backend(tiny_model(), create_cross_entropy_loss(), optimization(), lora=LoRAConfig(rank=4))
    assert_same(told, train(backend, range(STEPS), tokens_per_pass=1000), weights, backend)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_muon_in_shards_is_muon(tmp_path: Path) -> None:
    told, _ = on_ranks("muon", tmp_path)
    backend = alone("muon")
    expected = train(backend, range(STEPS))
    for one, other in zip(told, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-2)


@pytest.mark.slow
def test_bfloat16_computes_in_bfloat16_and_steps_in_float32(tmp_path: Path) -> None:
    told, weights = on_ranks("bfloat16", tmp_path)
    expected = train(alone(), range(STEPS))
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert told[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "resuming"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_takes_up_a_checkpoint(saving: int, resuming: int, tmp_path: Path) -> None:
    on_ranks("save", tmp_path, saving)
    told, weights = on_ranks("resume", tmp_path, resuming)
    backend = alone()
    assert_same(told, train(backend, range(STEPS))[2:], weights, backend)


@pytest.mark.slow
def test_ranks_on_several_hosts_take_up_what_ranks_of_one_left(tmp_path: Path) -> None:
    on_ranks("save", tmp_path)
    told, weights = on_ranks("resume-apart", tmp_path)
    backend = alone()
    assert_same(told, train(backend, range(STEPS))[2:], weights, backend)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["save", "save-apart"])
def test_one_device_takes_up_what_ranks_left(what: str, tmp_path: Path) -> None:
    on_ranks(what, tmp_path)
    resumed, straight = alone(), alone()
    resumed.load(tmp_path / "checkpoint")
    expected = train(straight, range(STEPS))[2:]
    weights = resumed.get_weights().result()
    assert_same(train(resumed, range(2, STEPS)), expected, weights, straight)
    assert {path.suffix for path in (tmp_path / "checkpoint").rglob("*.*")} == {".safetensors", ".json"}


@pytest.mark.slow
def test_torch_reads_what_ranks_left(tmp_path: Path) -> None:
    """By torch.distributed.checkpoint, whose format it is."""
    on_ranks("save", tmp_path)
    state = tmp_path / "checkpoint" / "state"
    kept = stored_state(state)
    read = {name: torch.zeros(shape) for name, (shape, _) in kept.items()}
    load(read, storage_reader=HuggingFaceStorageReader(str(state)), no_dist=True)
    for name, (shape, stored) in kept.items():
        assert torch.equal(read[name], stored[tuple(slice(0, size) for size in shape)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("cut", "is cut off or damaged"),
        ("first gone", "a file with a part of .* is missing; remove this checkpoint's directory"),
        ("last gone", "is of another model, or a file of it is missing"),
    ],
)
def test_a_damaged_checkpoint_is_told(damage: str, problem: str, tmp_path: Path) -> None:
    on_ranks("save", tmp_path)
    first, last = sorted((tmp_path / "checkpoint" / "state").iterdir())
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-100])
    else:
        (first if damage == "first gone" else last).unlink()
    with pytest.raises(BadInput, match=problem):
        alone().load(tmp_path / "checkpoint")


@pytest.mark.slow
def test_scores_come_back_in_the_order_they_were_asked_for(tmp_path: Path) -> None:
    told, _ = on_ranks("score", tmp_path)
    backend = alone()
    for seed, logprobs in enumerate(told):
        expected = backend.score(pack_batch(sequences([4, 7], seed=seed), 1.0)).result().logprobs_M
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_weights_can_be_replaced_on_all_ranks(tmp_path: Path) -> None:
    _, weights = on_ranks("load", tmp_path)
    assert all(torch.equal(weights[name], value) for name, value in tiny_model(seed=7).named_parameters())


@pytest.mark.slow
def test_a_step_that_is_not_finite_keeps_the_passes_of_all_ranks(tmp_path: Path) -> None:
    told, _ = on_ranks("nonfinite", tmp_path)
    assert told == [pack_batch(sequences([4, 7], seed=seed), 1.0).targets_M.tolist() for seed in range(3)]


def test_a_killed_rank_ends_the_group_with_its_name(tmp_path: Path) -> None:
    done = launched("killed", tmp_path)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert "rank      : 1" in done.stderr


def test_ranks_of_unlike_memory_are_told() -> None:
    check_alike([80 * GIB, 79 * GIB, 78 * GIB])
    with pytest.raises(
        BadInput, match=r"rank 1 has 40.0 GiB of memory, rank 0 has 80.0 GiB: take machines of one kind"
    ):
        check_alike([80 * GIB, 40 * GIB, 79 * GIB])

"""Model directories as they arrive: whole ones pass, and each fault is one message with what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollouts_core.inference.published import problems_with
from rollouts_core.training.exporting import save_policy
from tests.conftest import Done
from tests.rollouts_core.models import VOCABULARY, character_tokenizer, tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model = tiny_model()
    save_policy(model, character_tokenizer(), tmp_path / "model", dict(model.named_parameters()))
    return tmp_path / "model"


def cut(directory: Path) -> None:
    whole = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(whole[:-100])


def cut_in_the_header(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:50])


def damage(directory: Path) -> None:
    whole = bytearray((directory / WEIGHTS).read_bytes())
    whole[9:12] = b"\xff\xff\xff"
    (directory / WEIGHTS).write_bytes(bytes(whole))


def quantise(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (directory / "config.json").write_text(json.dumps(config))


def shrink_embeddings(directory: Path) -> None:
    weights = load_file(directory / WEIGHTS)
    weights["model.embed_tokens.weight"] = torch.zeros(VOCABULARY - 10, 32)
    save_file(weights, directory / WEIGHTS)


def take_the_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()


def take_the_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()


def lose_a_shard(directory: Path) -> None:
    index = {"weight_map": {"a": WEIGHTS, "b": "model-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def break_the_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def leave_gguf(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "tiny.Q4_1.gguf").write_bytes(b"GGUF")


def test_a_whole_model_passes(directory: Path) -> None:
    assert problems_with(str(directory)) == []


def test_a_name_of_the_hub_is_not_looked_at() -> None:
    assert problems_with("Qwen/Qwen3-0.6B") == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "is cut off or damaged: it has"),
        (cut_in_the_header, "is cut off: it has 50 bytes, fewer than its header"),
        (damage, "is damaged: its header can't be read"),
        (quantise, "its weights are quantised (awq), which can't be trained"),
        (shrink_embeddings, f"and the model embeddings for {VOCABULARY - 10}: is the tokenizer another model's?"),
        (take_the_template, "its tokenizer has no chat template"),
        (take_the_weights, "holds no weights"),
        (lose_a_shard, "names files that are not there: model-00002.safetensors"),
        (break_the_config, "config.json is not valid JSON"),
        (leave_gguf, "is quantised for inference (GGUF) and can't be trained"),
    ],
)
def test_each_fault_is_one_message(directory: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(directory)
    (problem,) = problems_with(str(directory))
    assert words in problem
    assert str(directory) in problem


@pytest.mark.slow
def test_a_plan_is_refused_with_all_that_is_wrong(
    rollouts: Callable[..., Done], config_file: Callable[..., Path], directory: Path
) -> None:
    quantise(directory)
    take_the_template(directory)
    config = json.loads(config_file().read_text())
    config["model"] = {"kind": "pretrained", "name": str(directory)}
    path = config_file(model=None)
    path.write_text(json.dumps(config))
    done = rollouts("plan", path)
    assert done.status == 1
    assert "quantised (awq)" in done.err and "no chat template" in done.err
    assert "Traceback" not in done.err


def test_a_gguf_file_is_told_as_one(tmp_path: Path) -> None:
    (problem,) = problems_with(str(tmp_path / "SmolLM2.Q4_1.gguf"))
    assert "unpack_gguf" in problem

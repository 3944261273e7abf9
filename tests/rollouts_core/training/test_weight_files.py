"""Blocks of weights, read from files and drawn: of every family, against the whole model."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rollouts_core.config import ScratchModel
from rollouts_core.errors import BadInput
from rollouts_core.inference.weights import stored
from rollouts_core.training.blank import blank_model, drawn_weights
from rollouts_core.training.exporting import save_policy
from rollouts_core.training.models import DTYPES, create_model
from rollouts_core.training.weight_files import WeightFiles
from tests.rollouts_core.models import CONTEXT, character_tokenizer, tiny_model
from tests.rollouts_core.training.test_families import FAMILIES, family


@pytest.mark.parametrize("name", FAMILIES)
def test_any_block_is_read_as_it_is_in_the_model(name: str, tmp_path: Path) -> None:
    model = family(name)
    model.save_pretrained(tmp_path)
    files = WeightFiles(blank_model(model.config, torch.float32), tmp_path)
    assert set(files) == set(stored(model))
    for weight, value in stored(model).items():
        for dim, size in enumerate(value.shape):
            for begin, end in ((0, size), (0, size // 2), (size // 3, size - 1)):
                block = tuple(slice(begin, end) if d == dim else slice(0, n) for d, n in enumerate(value.shape))
                assert torch.equal(files[weight][block], value[block]), f"{weight} {block}"


@given(data=st.data())
def test_a_block_in_all_dimensions_is_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of joined experts, each of which has files of its own."""
    model = family("qwen3_moe")
    directory = tmp_path_factory.mktemp("experts")
    model.save_pretrained(directory)
    files = WeightFiles(model, directory)
    name = data.draw(st.sampled_from(sorted(name for name in files if ".experts." in name)))
    value = stored(model)[name]
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in value.shape]
    block = tuple(slice(begin, end) for begin, end in ends)
    assert torch.equal(files[name][block], value[block])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_drawn_one_by_one_are_those_of_the_whole_model(architecture: str, dtype: str) -> None:
    made = ScratchModel(architecture=architecture, dtype=dtype, hidden_size=32, kv_heads=2)  # type: ignore[arg-type]
    model = create_model(made, character_tokenizer(), CONTEXT, 3, "cpu")
    before = torch.get_rng_state()
    drawn = {name: value.clone() for name, value in drawn_weights(model.config, DTYPES[made.dtype], 3)}
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(drawn[name], value) for name, value in model.named_parameters())


def test_a_blank_model_has_its_buffers_and_ties() -> None:
    model = tiny_model(tie_word_embeddings=True)
    blank = blank_model(model.config, torch.float32)
    assert blank.lm_head.weight is blank.model.embed_tokens.weight
    own = dict(blank.named_buffers())
    assert all(torch.equal(own[name], value) for name, value in model.named_buffers())


def test_what_is_missing_or_of_another_shape_is_told(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = torch.zeros(3, 3)
    save_file(weights, file)
    with pytest.raises(BadInput) as caught:
        WeightFiles(model, tmp_path)
    assert "model.norm.weight is in no file" in str(caught.value)
    assert "lm_head.weight is (3, 3), and the model's lm_head.weight needs (24, 32)" in str(caught.value)


def test_a_large_model_is_written_as_several_files(tmp_path: Path) -> None:
    model = tiny_model()
    weights = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
    save_policy(model, character_tokenizer(), tmp_path, weights, file_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    again = type(model).from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(value, weights[name]) for name, value in again.named_parameters())

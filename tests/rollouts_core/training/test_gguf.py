from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollouts_core.errors import BadInput
from rollouts_core.inference.published import problems_with
from rollouts_core.training.gguf import unpack_gguf
from tests.rollouts_core.models import CONTEXT, tiny_model

gguf = pytest.importorskip("gguf")

TOKENS = ["<|endoftext|>", *"abcdefghij", "ab", "cd", "<|im_start|>", "<|im_end|>"]
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output."}


def written(model: Any, file: Path) -> Path:
    """A Qwen2 as llama.cpp writes it, not quantised."""
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS + [f"<unused{number}>" for number in range(config.vocab_size - len(TOKENS))])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, value in model.state_dict().items():
        if not (config.tie_word_embeddings and name.startswith("lm_head")):
            writer.add_tensor(_name(name), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _name(name: str) -> str:
    for own, theirs in OUTSIDE.items():
        if name.startswith(own):
            return name.replace(own, theirs)
    _, _, number, rest = name.split(".", 3)
    inner, _, kind = rest.rpartition(".")
    return f"blk.{number}.{NAMES[inner]}.{kind}"


def test_a_gguf_file_becomes_a_model_directory_that_may_be_trained(tmp_path: Path) -> None:
    model = tiny_model()
    made = unpack_gguf(written(model, tmp_path / "tiny.F32.gguf"), tmp_path / "models")
    assert made == tmp_path / "models" / "tiny.F32"
    assert not problems_with(str(made))
    assert list(made.parent.iterdir()) == [made]
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        read = AutoModelForCausalLM.from_pretrained(made)(tokens).logits
        assert torch.allclose(read, model(tokens).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(made)("abce")["input_ids"] == [TOKENS.index(text) for text in ("ab", "c", "e")]


def test_what_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    file, there = tmp_path / "tiny.gguf", tmp_path / "tiny"
    file.write_bytes(b"GGUF")
    there.mkdir()
    assert unpack_gguf(file, tmp_path) == there


def test_what_is_no_gguf_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"no such thing")
    with pytest.raises(BadInput, match=r"tiny\.gguf can't be read"):
        unpack_gguf(file, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []
    with pytest.raises(BadInput, match="no such file"):
        unpack_gguf(tmp_path / "nowhere.gguf", tmp_path)

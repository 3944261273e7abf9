"""Every family that docs/models.md names, tiny and random, against transformers: loss, gradients, decoding, files."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from rollouts_core.errors import BadInput
from rollouts_core.inference.engine import GenerationRequest
from rollouts_core.inference.families import REFUSED, problems_of
from rollouts_core.inference.routing import Routing, let_go, routers_of
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.training.collate import pack_batch
from rollouts_core.training.exporting import save_policy
from rollouts_core.training.policy import Policy
from tests.rollouts_core.models import SHAPE, VOCABULARY, character_tokenizer
from tests.rollouts_core.training.test_packed import alone, sequences

CONTEXT = 64
WINDOW = 6
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
LOCAL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama, SmolLM2", {}),
    "qwen2": ("Qwen2, Qwen2.5", {}),
    "qwen3": ("Qwen3", HEAD),
    "qwen3_moe": ("Qwen3-MoE", HEAD | EXPERTS),
    "mistral": ("Mistral, with its window", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", HEAD),
    "gemma2": ("Gemma 2: soft caps, windows", HEAD | LOCAL | {"query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma 3: windows", HEAD | LOCAL | {"query_pre_attn_scalar": 8}),
    "phi": ("Phi: a head with bias", {}),
    "phi3": ("Phi-3, Phi-4", {}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3: windows", LOCAL),
    "olmoe": ("OLMoE", {"num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3: layers without rotation", {"no_rope_layers": [1, 0]}),
    "glm4": ("GLM-4", HEAD),
    "glm4_moe": ("GLM-4.5", HEAD | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepSeek-V3: latent attention, experts", LATENT),
    "gpt_oss": ("gpt-oss: sinks, windows, experts", HEAD | LOCAL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("Granite: scaled logits", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "cohere2": ("Command R7B: scaled logits, windows", LOCAL | {"logit_scale": 0.25}),
    "starcoder2": ("StarCoder2", {}),
    "exaone4": ("EXAONE 4", LOCAL),
    "gpt2": ("GPT-2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPT-NeoX, Pythia", {}),
}
"""By model_type: what is known by that name, and its tiny config."""
TRIED_REFUSALS = ("stablelm", "nemotron", "falcon", "gptj", "bloom")
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"


def family(name: str, **more: Any) -> Any:
    """Attention is transformers' plain one; no dropout, since GPT-2's config has it."""
    torch.manual_seed(0)
    settings = SHAPE | {"max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0}
    config = AutoConfig.for_model(name, **settings | (FAMILIES[name][1] if name in FAMILIES else {}) | more)
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def tells_choices(model: Any) -> Any:
    """The model; the test is left out where its routers do not tell what they choose, as in older transformers."""
    routers = routers_of(model)
    routing = Routing(routers) if routers else None
    if routing is not None:
        with torch.no_grad():
            model(torch.ones((1, 2), dtype=torch.long))
        let_go(model)
    if routing is None or not routing.is_known:
        pytest.skip(f"routers of {model.config.model_type} in transformers {transformers.__version__} tell no choices")
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_each_sequence_alone(name: str) -> None:
    """Longer than the windows, and one behind a prompt that they share."""
    examples = sequences([3, 12, 5, 17], shared=7) + sequences([9], seed=1)
    model = family(name)
    expected = torch.cat([alone(model, example, 0.8)[0] for example in examples])
    expected.sum().backward()
    gradients = {key: value.grad for key, value in model.named_parameters()}
    packed = Policy(copy.deepcopy(model), 0.8)
    packed.zero_grad()
    scores = packed(pack_batch(examples, 1.0))
    scores.logprobs_M.double().sum().backward()
    torch.testing.assert_close(scores.logprobs_M.double(), expected, atol=2e-5, rtol=1e-5)
    for key, value in packed.model.named_parameters():
        wanted = gradients[key]
        assert (value.grad is None) == (wanted is None), key
        if wanted is not None:
            torch.testing.assert_close(value.grad, wanted, atol=5e-4, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_is_that_of_transformers(name: str) -> None:
    """Prompts and answers longer than the windows; more requests than rows."""
    model = family(name)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, VOCABULARY, (2 + 5 * index % 17,), generator=draw).tolist() for index in range(7)]
    requests = [GenerationRequest(f"r{n}", tuple(prompt), 12, (0,), 0.0) for n, prompt in enumerate(prompts)]
    made = TorchEngine(copy_of(model), CONTEXT, 4).generate(requests)
    for prompt, completion in zip(prompts, made, strict=True):
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert list(completion.tokens) == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_policy_comes_back_from_its_files(name: str, tmp_path: Path) -> None:
    """By transformers, and as new weights of an engine; what is no parameter as well, a router's correction."""
    model = family(name)
    for buffer in model.state_dict(keep_vars=True).values():
        if not isinstance(buffer, torch.nn.Parameter):
            torch.nn.init.normal_(buffer)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    weights = {key: value.detach().clone() for key, value in model.named_parameters()}
    save_policy(model, character_tokenizer(), tmp_path, weights)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[key], value) for key, value in kept.items())
    for value in model.parameters():
        torch.nn.init.zeros_(value)
    engine = TorchEngine(model, CONTEXT, 1)
    engine.update_weights_from_checkpoint(tmp_path, 1)
    assert all(torch.equal(engine._decoder.weights[key], value) for key, value in weights.items())


@pytest.mark.parametrize("name", TRIED_REFUSALS)
def test_what_is_not_computed_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} is not supported: {REFUSED[name]}"):
        Policy(family(name))
    with pytest.raises(BadInput, match=f"{name} is not supported: {REFUSED[name]}"):
        TorchEngine(family(name), CONTEXT, 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "layers of linear_attention",
        ),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is not a causal language model"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, None),
    ],
)
def test_a_config_alone_says_what_is_refused(config: dict[str, Any], words: str | None) -> None:
    problems = problems_of(config)
    assert bool(problems) == (words is not None)
    assert words is None or re.search(words, problems[0])


def test_the_document_names_every_family_and_every_refusal() -> None:
    text = DOCUMENT.read_text()
    for name, (known_as, _) in FAMILIES.items():
        assert f"| `{name}` | {known_as} |" in text
    assert all(f"`{name}`" in text for name in REFUSED)

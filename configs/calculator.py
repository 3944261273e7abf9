"""Products that a small model cannot compute: RL teaches it to call the calculator, and to use its answer."""

from pathlib import Path

from rollouts_core.config import (
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    Jsonl,
    PipelineConfig,
    RLConfig,
    ScratchModel,
    SFTConfig,
)

DATA = Path(__file__).parent / "data" / "calculator"

config = PipelineConfig(
    name="calculator",
    seed=0,
    model=ScratchModel(
        hidden_size=128,
        layers=2,
        heads=4,
        kv_heads=4,
        intermediate_size=256,
        tokenizer="byte_bpe",
        vocab_size=320,
    ),
    data=DataConfig(
        demonstrations=Jsonl(path=DATA / "demonstrations.jsonl"),
        prompts=Jsonl(path=DATA / "prompts.jsonl"),
        heldout=Jsonl(path=DATA / "heldout.jsonl"),
        max_length=96,
    ),
    environment=EnvironmentConfig(name="calculator", max_turns=3),
    sft=SFTConfig(steps=300, batch_size=64, learning_rate=3e-3, warmup_steps=50, schedule="linear"),
    rl=RLConfig(
        steps=60,
        steps_per_segment=30,
        batch_size=32,
        n_samples_per_prompt=8,
        learning_rate=3e-4,
        max_new_tokens=56,
    ),
    evaluation=EvaluationConfig(max_new_tokens=56, samples_per_prompt=4, temperature=1.0, pass_at=(1, 4)),
)

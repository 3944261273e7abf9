"""Two-digit addition on a laptop: imperfect demonstrations teach the form, a verifier teaches the rest."""

from pathlib import Path

from rollouts_core.config import DataConfig, EvaluationConfig, Jsonl, PipelineConfig, RLConfig, ScratchModel, SFTConfig

DATA = Path(__file__).parent / "data" / "arithmetic"

config = PipelineConfig(
    name="arithmetic",
    seed=0,
    model=ScratchModel(hidden_size=128, layers=2, heads=4, kv_heads=4, intermediate_size=256),
    data=DataConfig(
        demonstrations=Jsonl(path=DATA / "demonstrations.jsonl"),
        prompts=Jsonl(path=DATA / "prompts.jsonl"),
        heldout=Jsonl(path=DATA / "heldout.jsonl"),
        max_length=16,
    ),
    sft=SFTConfig(steps=500, batch_size=128, learning_rate=3e-3, warmup_steps=50, schedule="linear"),
    rl=RLConfig(
        steps=150,
        steps_per_segment=50,
        batch_size=64,
        n_samples_per_prompt=4,
        learning_rate=2e-4,
        max_new_tokens=4,
    ),
    evaluation=EvaluationConfig(max_new_tokens=4),
)

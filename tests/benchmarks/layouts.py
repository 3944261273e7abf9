"""Which layouts fit GPUs of 80 GB, by the estimate that `plan --estimate` uses: `python -m tests.benchmarks.layouts`.

SFT with AdamW in bfloat16, activations computed again, passes of 16,384 tokens of which half are learnt. Of every
number of GPUs the layout whose ranks share least is told, for sharing costs time: `8 x 1 x 2` is 8 groups with passes
of their own, one stretch of each row, 2 parts of each layer.
"""

from rollouts_core.config import BackendConfig
from rollouts_core.config.training import ParallelConfig
from rollouts_core.stages.peaks import training_parts
from rollouts_core.stages.sizes import ModelSize

GIB = 2**30
HELD = 74 * GIB
"""Of 80 GB: 74.5 GiB, less what CUDA and NCCL take."""
TOKENS = 16_384
GPUS = (1, 8, 16, 64)
SHARED = (1, 2, 4, 8)
MODELS = {
    "Qwen3-0.6B": ModelSize(596_049_920, 151_936, 1024, 28, 3072, 2048, 1024, 2),
    "Qwen3-8B": ModelSize(8_190_735_360, 151_936, 4096, 36, 12_288, 4096, 1024, 2),
    "Qwen3-32B": ModelSize(32_762_123_264, 151_936, 5120, 64, 25_600, 8192, 1024, 2),
    "Llama-3.3-70B": ModelSize(70_553_706_496, 128_256, 8192, 80, 28_672, 8192, 1024, 2),
    "Qwen3-30B-A3B": ModelSize(30_532_122_624, 151_936, 2048, 48, 8 * 768, 4096, 512, 2, experts=128, chosen=8),
}
"""From their published configs; parameters as their files' headers count them."""
KEY_HEADS = {"Qwen3-30B-A3B": 4}


def main() -> None:
    print(f"{'model':<16}" + "".join(f"{count:>5} GPU{'s' if count > 1 else ' '}      " for count in GPUS))
    for name, size in MODELS.items():
        print(f"{name:<16}" + "".join(f"{_best(size, count, KEY_HEADS.get(name, 8)):<16}" for count in GPUS))


def _best(size: ModelSize, gpus: int, heads: int) -> str:
    layouts = [(context, tensor) for context in SHARED for tensor in SHARED if _divides(gpus, heads, context * tensor)]
    for context, tensor in sorted(layouts, key=lambda layout: (layout[0] * layout[1], layout)):
        parallel = ParallelConfig(context=context, tensor=tensor)
        backend = BackendConfig(processes=gpus, parallel=parallel, activation_checkpointing=True)
        parts = training_parts(backend, "adamw", "sft", size, TOKENS, TOKENS // 2, on_gpu=True)
        if (held := sum(part.bytes for part in parts)) <= HELD:
            return f"{gpus // context // tensor} x {context} x {tensor}: {held / GIB:.0f} GiB"
    return "no"


def _divides(gpus: int, heads: int, together: int) -> bool:
    return gpus % together == 0 and heads % together == 0


if __name__ == "__main__":
    main()

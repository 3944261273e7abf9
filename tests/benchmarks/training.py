"""Training beside TRL, in one run: `python -m tests.benchmarks.training [--rounds 3]`, or `make training`.

The same Qwen2 of 3.2M parameters in float32, AdamW, clipping at 1. SFT: the same ragged conversations, batches of 32.
GRPO: 64 completions of 32 tokens to prompts of 16, in groups of 8, seconds per step and time to one mean reward. Each
side runs in a process of its own, in turn; medians are told, and with them the ceiling that follows from the machine's
matrix products alone (6 FLOPs per parameter and token).

Another model by the environment: BENCHMARK_MODEL names its directory, BENCHMARK_GRPO has groups, their size, and the
tokens of prompts and answers, BENCHMARK_STEPS the most steps. `--only grpo` leaves SFT out.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

EXAMPLES, BATCH, LONGEST = 640, 32, 160
GROUPS, GROUP, PROMPT, ANSWER = (int(n) for n in os.environ.get("BENCHMARK_GRPO", "8 8 16 32").split())
STEPS, TARGET, MOST_STEPS = 12, 0.8, int(os.environ.get("BENCHMARK_STEPS", "60"))
RATE = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("sft", "grpo"))
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "WHAT"), help="run one side in this process")
    options = parser.parse_args()
    if options.one:
        side, what = options.one
        print("RESULT " + json.dumps(SIDES[side, what]() | {"peak_mb": _peak_mb()}))
        return 0
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    flops: list[float] = []
    for _ in range(options.rounds):
        from tests.benchmarks.generation import matrix_flops

        flops.append(matrix_flops("cpu"))
        for side, what in (entry for entry in SIDES if options.only in (None, entry[1])):
            results.setdefault((side, what), []).append(_elsewhere(side, what))
    tell(results, statistics.median(flops))
    return 0


def conversations() -> list[tuple[list[int], list[int]]]:
    """Token ids and loss masks; the answer is the last half or more."""
    random = np.random.default_rng(0)
    made = []
    for length in random.lognormal(3.9, 0.6, EXAMPLES).astype(int).clip(12, LONGEST):
        asked = int(length * random.uniform(0.2, 0.5))
        made.append((random.integers(2, 512, length).tolist(), [0] * asked + [1] * int(length - asked)))
    return made


def prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    return random.integers(2, 512, (512, PROMPT)).tolist()


def reward_of(tokens: Sequence[int]) -> float:
    """The share of even tokens: easy to learn, and smooth."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def our_sft() -> dict[str, float]:
    from rollouts_core.data.tokenized import Example
    from rollouts_core.training.objectives import create_cross_entropy_loss
    from rollouts_core.training.pytorch import Optimization, create_pytorch_backend
    from rollouts_core.training.sft import SFTTrainingConfig, run_sft_training
    from tests.benchmarks.generation import model

    examples = [Example(np.array(ids, np.int32), np.array(mask, np.int32)) for ids, mask in conversations()]
    backend = create_pytorch_backend(model(), create_cross_entropy_loss(), Optimization(RATE))
    steps = EXAMPLES // BATCH
    for _ in run_sft_training(backend, examples, SFTTrainingConfig(3, BATCH, seed=0)):
        pass
    began = time.perf_counter()
    *_, last = run_sft_training(backend, examples, SFTTrainingConfig(steps, BATCH, seed=0))
    return _sft_result(time.perf_counter() - began, last.metrics["loss"])


def trl_sft(grouped: bool = False, packing: bool = False) -> dict[str, float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.benchmarks.generation import model

    rows = [
        {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}
        for ids, mask in conversations()
    ]
    with tempfile.TemporaryDirectory() as directory:
        settings = SFTConfig(
            directory, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=RATE, use_cpu=True,
            bf16=False, gradient_checkpointing=False, lr_scheduler_type="constant", logging_strategy="no",
            save_strategy="no", report_to=[], max_length=LONGEST, disable_tqdm=True,
            packing=packing, train_sampling_strategy="group_by_length" if grouped else "random",
            dataset_kwargs={"skip_prepare_dataset": not packing},
        )  # fmt: skip
        trainer = SFTTrainer(
            model(), settings, train_dataset=Dataset.from_list(rows), processing_class=_tokenizer(),
            callbacks=[_timer()],
        )  # fmt: skip
        trainer.train()
        return _sft_result(_Times.end - _Times.begin, 0.0)


def our_grpo() -> dict[str, float]:

    from rollouts_core.config.algorithms import GRPO
    from rollouts_core.data.prompts import DataBuffer
    from rollouts_core.inference.embedded import EmbeddedEngine
    from rollouts_core.inference.torch_engine import TorchEngine, copy_of
    from rollouts_core.rollout.manager import AsyncRolloutManager
    from rollouts_core.rollout.settings import RolloutConfig
    from rollouts_core.rollout.source import generating
    from rollouts_core.training.algorithms import recipe_of
    from rollouts_core.training.objectives import Extras, create_rl_loss
    from rollouts_core.training.pytorch import Optimization, create_pytorch_backend
    from rollouts_core.training.rl import RLTrainingConfig, run_rl_training
    from rollouts_core.types import Message, Prompt, Sample
    from tests.benchmarks.generation import model

    def reward(sample: Sample) -> float:
        return reward_of(sample.tokens[PROMPT:])

    policy, recipe = model(), recipe_of(GRPO(), ANSWER)
    buffer = DataBuffer([Prompt((Message("user", ""),), tuple(ids), {}, i) for i, ids in enumerate(prompts())], 0)
    config = RolloutConfig(GROUPS, GROUP, ANSWER, 1.0, 0)
    engine = TorchEngine(copy_of(policy), PROMPT + ANSWER, GROUPS * GROUP)
    tokenizer = _tokenizer(ends=False)
    make_manager = partial(AsyncRolloutManager, tokenizer=tokenizer, data_buffer=buffer, reward=reward, config=config)
    backend = create_pytorch_backend(policy, create_rl_loss(recipe, Extras()), Optimization(RATE))
    times, rewards = [time.perf_counter()], []
    with generating(lambda: EmbeddedEngine(engine), make_manager, same_thread=True) as rollouts:
        for step in run_rl_training(backend, rollouts, RLTrainingConfig(MOST_STEPS, recipe, max_new_tokens=ANSWER)):
            times.append(time.perf_counter())
            rewards.append(step.metrics["reward"])
            if _reached(rewards):
                break
    return _grpo_result(times, rewards)


def trl_grpo() -> dict[str, float]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tests.benchmarks.generation import model

    tokenizer = _tokenizer()
    texts = [tokenizer.decode(ids) for ids in prompts()]
    times, rewards = [], list[float]()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        found = [reward_of(ids) for ids in completion_ids]
        rewards.append(statistics.fmean(found))
        return found

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(time.perf_counter())
            control.should_training_stop |= _reached(rewards)

    with tempfile.TemporaryDirectory() as directory:
        settings = GRPOConfig(
            directory, per_device_train_batch_size=GROUPS * GROUP, num_generations=GROUP, max_completion_length=ANSWER,
            learning_rate=RATE, lr_scheduler_type="constant", max_steps=MOST_STEPS, use_cpu=True, bf16=False,
            gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
            generation_kwargs={"min_new_tokens": ANSWER}, beta=0.0,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model(), reward, settings, train_dataset=Dataset.from_dict({"prompt": texts}), processing_class=tokenizer,
            callbacks=[Watch()],
        )  # fmt: skip
        trainer.train()
    return _grpo_result(times, rewards)


SIDES: dict[tuple[str, str], Callable[[], dict[str, float]]] = {
    ("rollouts", "sft"): our_sft,
    ("TRL", "sft"): trl_sft,
    ("TRL, by length", "sft"): partial(trl_sft, grouped=True),
    ("TRL, packed", "sft"): partial(trl_sft, packing=True),
    ("rollouts", "grpo"): our_grpo,
    ("TRL", "grpo"): trl_grpo,
}


def tell(results: dict[tuple[str, str], list[dict[str, float]]], flops: float) -> None:
    from tests.benchmarks.generation import model

    ceiling = flops / (6 * sum(value.numel() for value in model().parameters()))
    print(f"\nmatrix products {flops / 1e9:.0f} GFLOP/s: at most {ceiling:,.0f} trained tokens/s")
    for what, unit in (("sft", "tokens/s"), ("grpo", "s/step")):
        if not any(kind == what for _, kind in results):
            continue
        best = [statistics.median(r["value"] for r in found) for (s, w), found in results.items() if w == what]
        others = best[1:]
        rival = max(others) if what == "sft" else min(others)
        print(f"\n{what.upper():<18}{unit:>10}{'peak MB':>10}{'s to reward':>13}")
        for (side, kind), found in results.items():
            if kind == what:
                value, peak = (statistics.median(r[name] for r in found) for name in ("value", "peak_mb"))
                reached = statistics.median(r.get("to_reward", float("nan")) for r in found)
                number = f"{value:,.0f}" if what == "sft" else f"{value:.3f}"
                print(f"{side:<18}{number:>10}{peak:>10.0f}{reached:>13.1f}")
        print(f"rollouts / best other: {best[0] / rival if what == 'sft' else rival / best[0]:.2f}")


def _elsewhere(side: str, what: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.training", "--one", side, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(f"{side} {what}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(found[0].removeprefix("RESULT "))
    print(f"{what} {side}: {result}", flush=True)
    return result


def _sft_result(seconds: float, loss: float) -> dict[str, float]:
    return {"value": sum(len(ids) for ids, _ in conversations()) / seconds, "loss": loss}


def _grpo_result(times: Sequence[float], rewards: Sequence[float]) -> dict[str, float]:
    seconds = [after - before for before, after in pairwise(times)]
    reached = times[-1] - times[0] if _reached(rewards) else float("inf")
    return {
        "value": statistics.median(seconds[min(2, len(seconds) - 1) :]),
        "to_reward": reached,
        "steps": len(seconds),
    }


def _reached(rewards: Sequence[float]) -> bool:
    return len(rewards) >= STEPS and statistics.fmean(rewards[-3:]) >= TARGET


class _Times:
    begin = end = 0.0


def _timer() -> Any:
    """Times the steps, without what comes before and after."""
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _Times.begin = time.perf_counter()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _Times.end = time.perf_counter()

    return Timer()


def _tokenizer(ends: bool = True) -> Any:
    """A word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": 1, **{f"w{index}": index for index in range(2, 512)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>" if ends else None)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())

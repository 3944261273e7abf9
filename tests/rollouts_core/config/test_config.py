import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core import config as config_module
from rollouts_core.config import PipelineConfig, RLConfig, ScratchModel, SFTConfig, algorithms
from rollouts_core.config.loading import from_data, load_config, save_config, to_data
from rollouts_core.config.schema import UNION_TAGS, identity_fields
from rollouts_core.errors import BadInput
from tests.rollouts_core.references import ALGORITHMS

OPERATIONAL = {
    "Jsonl": {"path", "sha256"},
    "Parquet": {"path", "sha256"},
    "Arrow": {"path", "sha256"},
    "HubDataset": {"revision", "data_files", "streaming"},
    "TokenizationConfig": {"parts", "task_runner", "cluster", "at_once"},
    "Distillation": {"teacher", "revision"},
    "PretrainedModel": {"name", "revision"},
    "SFTConfig": {"log_every", "checkpoint_every"},
    "DPOConfig": {"log_every", "checkpoint_every"},
    "RLConfig": {"steps", "steps_per_segment", "log_samples", "checkpoint_every"},
    "BackendConfig": {"activation_checkpointing", "parallel", "processes"},
    "ParallelConfig": {"context", "expert", "tensor"},
    "RolloutsConfig": {
        "max_concurrent_samples",
        "sample_seconds",
        "reward_seconds",
        "batch_seconds",
        "keep_batches",
    },
    "EngineMachines": {
        "names",
        "labels",
        "gpus",
        "gpu_memory_gb",
        "rented",
        "accelerator",
        "nodes",
        "options",
        "keep_minutes",
    },
    "EngineConfig": {
        "cache_gib",
        "machines",
        "min_replicas",
        "replicas",
        "tensor_parallel",
        "data_parallel",
        "weight_sync",
        "python",
        "start_minutes",
        "hang_seconds",
    },
    "MachineConfig": {
        "kind",
        "name",
        "peers",
        "nodes",
        "gpus",
        "gpu_memory_gb",
        "labels",
        "accelerator",
        "device",
        "environment",
        "wait_hours",
        "time_limit_hours",
        "unattended_limit_hours",
        "unreachable_limit_hours",
    },
    "ResultsConfig": {"policy", "artifacts", "hub"},
    "TrackingConfig": {"tensorboard", "wandb", "wandb_mode"},
    "EnvironmentConfig": {"name", "tool_seconds"},
    "EvaluationConfig": {"during_rl", "reward_seconds"},
    "StoreConfig": {"path", "url", "outputs"},
}


def test_round_trip_keeps_nested_parts(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    save_config(pipeline_config, tmp_path / "saved.json")
    assert load_config(tmp_path / "saved.json") == pipeline_config


@given(
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(1e-9, 1.0),
    algorithm=st.sampled_from(list(ALGORITHMS.values())),
    heads=st.sampled_from([1, 2, 4]),
    rl=st.booleans(),
)
def test_data_round_trip(seed: int, rate: float, algorithm: Any, heads: int, rl: bool) -> None:
    config = PipelineConfig(
        name="any",
        seed=seed,
        model=ScratchModel(heads=heads, kv_heads=1),
        data=config_module.DataConfig(
            demonstrations=config_module.Jsonl(path=Path("d")), prompts=config_module.Jsonl(path=Path("p"))
        ),
        sft=SFTConfig(learning_rate=rate),
        rl=RLConfig(algorithm=algorithm) if rl else None,
    )
    assert from_data(to_data(config)) == config


def test_python_file_and_overrides() -> None:
    config = load_config(
        Path("configs/arithmetic.py"), ["rl.steps=20", "sft=null", "model.kind=pretrained", "name=x"][:1]
    )
    assert config.rl is not None
    assert config.rl.steps == 20
    with pytest.raises(BadInput, match="needs sft first"):
        load_config(Path("configs/arithmetic.py"), ["sft=null"])


def test_another_kind_on_the_command_line_drops_the_fields_of_the_old_one() -> None:
    changes = ["rl.algorithm.clip_high=0.5", "rl.algorithm.kind=gspo", "rl.algorithm.clip_low=0.001"]
    config = load_config(Path("configs/arithmetic.py"), changes)
    assert config.rl is not None
    assert config.rl.algorithm == algorithms.GSPO(clip_low=0.001)


def test_another_kind_of_machine_keeps_what_machines_share() -> None:
    config = load_config(Path("configs/arithmetic.py"), ["machine.wait_hours=3", "machine.kind=ssh"])
    assert (config.machine.kind, config.machine.wait_hours) == ("ssh", 3)


def test_a_problem_of_an_algorithm_is_told_under_the_name_that_was_written() -> None:
    """Of every kind of every union: a person wrote none of the tags that pydantic puts into a path."""
    with pytest.raises(BadInput) as caught:
        load_config(Path("configs/arithmetic.py"), ["rl.algorithm.kind=distillation"])
    assert caught.value.problems == ("rl.algorithm.teacher: is required",)
    unions = (config_module.Model, config_module.SourceOrMixture, algorithms.Algorithm)
    kinds = {part.kind for union in unions for part in get_args(get_args(union)[0])}
    assert kinds == set(UNION_TAGS)


def test_a_group_of_one_is_refused_by_algorithms_that_compare() -> None:
    with pytest.raises(BadInput, match="n_samples_per_prompt 1: grpo compares the answers of a group"):
        load_config(Path("configs/arithmetic.py"), ["rl.n_samples_per_prompt=1"])
    load_config(Path("configs/arithmetic.py"), ["rl.n_samples_per_prompt=1", "rl.algorithm.kind=ppo"])


def test_json_problems_are_listed_together(small_config: dict[str, Any]) -> None:
    small_config["sft"] |= {"stepz": 3, "learning_rate": "fast"}
    small_config["model"] |= {"heads": 3}
    small_config["rl"] |= {"n_samples_per_prompt": 0, "max_new_tokens": 12}
    small_config["surprise"] = 1
    with pytest.raises(BadInput) as caught:
        from_data(small_config)
    paths = {problem.split(":")[0] for problem in caught.value.problems}
    expected = {"sft.stepz", "sft.learning_rate", "model", "rl.n_samples_per_prompt", "surprise", "rl.max_new_tokens"}
    assert paths == expected


def test_python_problems_are_listed_together(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from rollouts_core.config import *\n"
        "config = PipelineConfig(name='a b', model=ScratchModel(heads=3), sft=SFTConfig(stepz=3, learning_rate='x'),\n"
        "    rl=RLConfig(max_new_tokens=2000), data=DataConfig(demonstrations=Jsonl(path='x')))\n"
    )
    with pytest.raises(BadInput) as caught:
        load_config(tmp_path / "bad.py")
    text = str(caught.value)
    for part in ("stepz", "learning_rate", "heads 3", "PipelineConfig.name", "data.prompts: is required by rl", "2000"):
        assert part in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nonsense_module", "line 1: ModuleNotFoundError"),
        ("x = 1", "defines no `config"),
        ("config = 3", "defines no `config"),
        ("x = (", "SyntaxError"),
    ],
)
def test_python_file_that_is_no_config(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(BadInput, match=message):
        load_config(tmp_path / "bad.py")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.steps", "write it as part.field=value"),
        ("rl.steps=many", "rl.steps"),
        ("name.first=x", "name has no fields"),
        ("rl.nonsense=1", "rl.nonsense: no such field"),
        ("sft.learning_rate=NaN", "finite"),
    ],
)
def test_bad_overrides(config_file: Any, override: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_config(config_file(), [override])


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such config file"):
        load_config(tmp_path / "absent.py")
    (tmp_path / "broken.json").write_text('{\n"name": }')
    with pytest.raises(BadInput, match=r"broken\.json:2: not valid JSON"):
        load_config(tmp_path / "broken.json")
    for content in (b'{"name": "\xff"}', b"[" * 10**5, b'{"seed": ' + b"9" * 5000 + b"}"):
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(BadInput, match=r"broken\.json: not valid JSON"):
            load_config(tmp_path / "broken.json")


def test_configs_are_frozen(pipeline_config: PipelineConfig) -> None:
    with pytest.raises(AttributeError):
        pipeline_config.seed = 1  # type: ignore[misc]


def test_every_field_is_described_and_on_its_side() -> None:
    """Adding a field means saying here whether it can change a result."""
    parts = [value for value in vars(config_module).values() if hasattr(value, "__pydantic_fields__")]
    assert len(parts) == 38
    for part in parts:
        names = {field.name for field in fields(part)}
        assert names - set(identity_fields(part)) == OPERATIONAL.get(part.__name__, set()), part.__name__
        described = part.__pydantic_fields__
        assert all(described[name].description for name in names - {"kind"}), part.__name__


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["backend.processes=4", "backend.parallel.expert=3"], "parallel.expert 3 does not divide the 4 ranks"),
        (["backend.processes=2", "backend.parallel.expert=2"], "2 ranks can't share experts: the model has none"),
        (["backend.balance_experts=true"], "backend.balance_experts: a model from scratch has no experts"),
        (["engine.replay_experts=true"], "engine.replay_experts: a model from scratch has no experts"),
    ],
)
def test_what_is_of_mixtures_is_refused_without_one(settings: list[str], problem: str) -> None:
    with pytest.raises(BadInput, match=re.escape(problem)):
        load_config(Path("configs/arithmetic.py"), settings)


@pytest.mark.parametrize(
    ("served", "problem"),
    [
        ([{"name": "a"}, {"name": "a"}], "served: two models have the name a"),
        ([{"name": "a", "asked_by": []}], "asked_by"),
        ([{"name": "A b"}], "name"),
        ([{"name": "a"}], "rl.algorithm.teacher: served a needs task score, and rl in asked_by"),
        ([{"name": "b", "task": "score"}], "served://a is not in `served`, which has ['b']"),
        ([{"name": "a", "task": "score", "engine": {"replay_experts": True}}], "replay_experts"),
        ([{"name": "a", "task": "score", "engine": {"kind": "vllm"}}], "task score needs embedded or sglang"),
    ],
)
def test_what_is_wrong_with_models_beside_the_policy(
    small_config: dict[str, Any], served: list[dict[str, Any]], problem: str
) -> None:
    model = {"kind": "pretrained", "name": "some/model"}
    small_config["rl"]["algorithm"] = {"kind": "distillation", "teacher": "served://a"}
    with pytest.raises(BadInput, match=re.escape(problem)):
        from_data(small_config | {"served": [{"model": model, **one} for one in served]})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["engine.machines={}"], "names: give machines, or what they must have: labels, gpus or gpu_memory_gb"),
        (['engine.machines={"names": ["a", "a"]}'], "names a, a: a machine is named twice"),
        (['engine.machines={"names": ["a"]}', "engine.min_replicas=2"], "min_replicas 2 is more than replicas 1"),
        (
            ["engine.kind=sglang", "engine.replicas=2", "engine.min_replicas=2"],
            "min_replicas: only for servers on other",
        ),
        (
            ["engine.kind=sglang", 'engine.machines={"names": ["a"]}', "engine.weight_sync=tensor"],
            "weight_sync tensor needs servers on the trainer's machine; for other machines use disk",
        ),
        (['engine.machines={"names": ["a"]}', "engine.tensor_parallel=2"], "tensor_parallel: only for servers"),
        (['engine.machines={"names": ["a"], "rented": 1}'], "rented: names, labels and gpu_memory_gb choose machines"),
        (['engine.machines={"rented": 2}'], "rented: set accelerator, for example H100, or set gpus to 0"),
        (['engine.machines={"gpus": 1, "accelerator": "H100"}'], "accelerator: only for rented machines; set rented"),
        (
            ['engine.machines={"nodes": 1, "labels": ["a"]}'],
            "nodes: these belong to the trainer's allocation; set only",
        ),
        (
            ['engine.machines={"gpus": 1, "options": ["-p", "a"]}'],
            "options: these are for sbatch and nodes of the trainer's",
        ),
        (
            ['engine.machines={"nodes": 1}'],
            "engine.machines.nodes: only for machine.kind slurm, and it is local",
        ),
        (
            ["machine.kind=slurm", "machine.name=cluster", 'engine.machines={"names": ["a"]}'],
            "engine.machines: with machine.kind slurm, servers run on nodes of the trainer's allocation; set nodes",
        ),
        (["machine.kind=slurm"], "name: is required by kind slurm: which cluster of the inventory"),
        (["machine.nodes=2"], "nodes: 2 need kind slurm; elsewhere name further machines in peers"),
    ],
)
def test_what_can_t_be_on_other_machines_is_refused(settings: list[str], problem: str) -> None:
    with pytest.raises(BadInput, match=re.escape(problem)):
        load_config(Path("configs/arithmetic.py"), settings)


def test_the_embedded_engine_may_have_replicas_on_other_machines() -> None:
    config = load_config(Path("configs/arithmetic.py"), ['engine.machines={"labels": ["h100"]}', "engine.replicas=3"])
    assert config.engine.has_servers and config.engine.replicas == 3


def test_no_problem_is_invented_for_a_part_whose_fields_do_not_fit_together() -> None:
    """Its defaults, which nobody wrote, are not held against the rest."""
    with pytest.raises(BadInput) as caught:
        load_config(Path("configs/arithmetic.py"), ["rl.minibatches=7"])
    assert caught.value.problems == ("rl: batch_size 64 is not a multiple of minibatches 7",)
    with pytest.raises(BadInput) as caught:
        load_config(Path("configs/arithmetic.py"), ['engine.machines={"rented": 2}'])
    assert caught.value.problems == ("engine.machines: rented: set accelerator, for example H100, or set gpus to 0",)


def test_a_part_that_stays_wrong_beside_another_wrong_value_is_told_once() -> None:
    """Found by `tests.fuzz`: both were looked at again and again, for ever."""
    machines = {"names": ["a", "a"], "gpus": 2}
    prompts = {"kind": "jsonl", "path": False}
    with pytest.raises(BadInput) as told:
        from_data({"engine": {"kind": "sglang", "machines": machines}, "data": {"prompts": prompts}})
    assert sum("a machine is named twice" in problem for problem in told.value.problems) == 1
    assert any("data.prompts" in problem for problem in told.value.problems)

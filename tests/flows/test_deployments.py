"""What `rollouts deploy` tells Prefect, and the forms that come of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.utilities.schema_tools.validation import ValidationError, validate
from pydantic import TypeAdapter

from flows.deployments import deployments_of, read_configs, write_prefect_yaml
from flows.forms import filled_in
from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import from_data, to_data
from rollouts_core.errors import BadInput
from tests.conftest import Done
from tests.flows.test_run_results import post

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEMA = TypeAdapter(PipelineConfig).json_schema(ref_template="#/definitions/{model}")


def form() -> dict[str, Any]:
    schema = {name: part for name, part in SCHEMA.items() if name != "$defs"}
    return {"type": "object", "properties": {"config": schema}, "required": ["config"], "definitions": SCHEMA["$defs"]}


def defaults(field: dict[str, Any]) -> Any:
    """What a form begins with that knows nothing but the schema: the defaults of the innermost fields."""
    default = field.get("default")
    if "anyOf" in field:
        chosen = next(
            (other for other in field["anyOf"] if default is not None and other.get("default") == default), {}
        )
        return defaults(chosen) if "properties" in chosen or "anyOf" in chosen else default
    if "properties" not in field or not isinstance(default, dict):
        return default
    return {name: defaults(field["properties"][name]) for name in default}


def nulls(field: Any) -> int:
    """Fields that begin with a null."""
    if isinstance(field, dict):
        inside = sum(nulls(of) for name, of in field.items() if name != "default")
        return inside + ("default" in field and field["default"] is None)
    return sum(map(nulls, field)) if isinstance(field, list) else 0


def test_each_config_has_a_deployment_and_evaluation_and_gc_have_one(tmp_path: Path) -> None:
    configs = read_configs(CONFIGS, str(tmp_path))
    deployments = deployments_of(configs, tmp_path)
    assert [entry["name"] for entry in deployments] == ["arithmetic", "calculator", "smollm2", "evaluate", "gc"]
    written = yaml.safe_load(write_prefect_yaml(deployments, tmp_path).read_text())
    first = written["deployments"][0]
    assert from_data(first["parameters"]["config"]) == configs["arithmetic"]
    assert (first["entrypoint"], first["work_pool"]["name"]) == ("flows.post_train:post_train", "rollouts")


def test_a_machine_of_the_inventory_has_its_queue(tmp_path: Path) -> None:
    (tmp_path / "far.json").write_text(
        '{"name": "far", "sft": null, "rl": null, "model": {"kind": "pretrained", "name": "some/model"},'
        ' "data": {"heldout": {"kind": "jsonl", "path": "x"}}, "machine": {"kind": "ssh", "name": "gpu1"}}'
    )
    (deployment, *_) = deployments_of(read_configs(tmp_path, None), tmp_path)
    assert deployment["work_pool"]["work_queue_name"] == "gpu1"
    assert deployment["tags"] == ["rollouts", "post-train", "ssh"]


def test_every_config_that_is_wrong_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"seed": -1}')
    (tmp_path / "other.json").write_text("{")
    with pytest.raises(BadInput) as told:
        read_configs(tmp_path, None)
    assert any("one.json" in problem and "seed" in problem for problem in told.value.problems)
    assert any("other.json" in problem for problem in told.value.problems)
    with pytest.raises(BadInput, match="there is no config"):
        read_configs(tmp_path / "nothing", None)


@pytest.mark.parametrize("name", ["arithmetic", "calculator"])
def test_a_form_begins_with_the_deployments_own_values(name: str, tmp_path: Path) -> None:
    config = to_data(read_configs(CONFIGS, str(tmp_path))[name])
    schema = filled_in(form(), {"config": config})
    assert defaults(schema["properties"]["config"]) == config
    assert not nulls(schema)
    jsonschema.Draft202012Validator(schema).validate({"config": config})


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["grpo", "gspo", "dapo", "ppo", "rloo", "cispo", "maxrl"]), st.booleans())
def test_a_form_begins_with_the_chosen_alternative(kind: str, dpo: bool) -> None:
    data = {"kind": "jsonl", "path": "x"}
    config = to_data(
        from_data(
            {
                "model": {"kind": "pretrained", "name": "some/model"},
                "data": {"demonstrations": data, "preferences": data, "prompts": {**data, "kind": "parquet"}},
                "dpo": {} if dpo else None,
                "rl": {"algorithm": {"kind": kind}},
            }
        )
    )
    schema = filled_in(form(), {"config": config})
    assert defaults(schema["properties"]["config"]) == config
    jsonschema.Draft202012Validator(schema).validate({"config": config})


def test_a_wrong_value_is_refused_by_the_forms_schema(tmp_path: Path) -> None:
    config = to_data(read_configs(CONFIGS, str(tmp_path))["arithmetic"])
    schema = filled_in(form(), {"config": config})
    with pytest.raises(jsonschema.ValidationError, match="-1 is less than the minimum"):
        jsonschema.Draft202012Validator(schema).validate({"config": {**config, "seed": -1}})


def test_a_part_that_lacks_a_field_is_told_so_and_not_that_it_is_of_another_kind(tmp_path: Path) -> None:
    """In the words that a Prefect server refuses it with."""
    config = to_data(read_configs(CONFIGS, str(tmp_path))["arithmetic"]) | {"model": {"kind": "pretrained"}}
    with pytest.raises(ValidationError, match=r"field 'config.model'\. Failure reason: 'name' is a required property"):
        validate({"config": config}, form(), raise_on_error=True)


def test_deploy_registers_with_the_server_there_is(
    rollouts: Callable[..., Done], small_config: dict[str, Any], tmp_path: Path, prefect_server: str
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "first.json").write_text(json.dumps({**small_config, "name": "first"}))
    (tmp_path / "machines.toml").write_text('[gpu1]\nhost = "10.0.0.5"\ngpus = 4\n')
    done = rollouts("deploy", "--json", ROLLOUTS_MACHINES=str(tmp_path / "machines.toml"))
    assert done.status == 0, done.err
    assert done.json()["deployments"] == ["first", "evaluate", "gc"]
    assert (tmp_path / "prefect.yaml").is_file()
    deployment = post(prefect_server, "/deployments/filter", {"deployments": {"name": {"any_": ["first"]}}})[0]
    assert deployment["description"].startswith("SFT, DPO, then RL")
    assert deployment["parameter_openapi_schema"]["properties"]["config"]["properties"]["name"]["default"] == "first"
    queues = {queue["name"]: queue for queue in post(prefect_server, "/work_pools/rollouts/queues/filter", {})}
    assert queues["gpu1"]["concurrency_limit"] == 4
    refused = rollouts("deploy", tmp_path / "nowhere")
    assert (refused.status, "there is no config" in refused.err) == (1, True)
    alone = rollouts("deploy", PREFECT_API_URL="")
    assert (alone.status, "PREFECT_API_URL is not set" in alone.err) == (1, True)

"""The model card of a policy, made from its run: what it was made of, how, and how good it is."""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rollouts_core.observe.evaluations import name_of
from rollouts_core.observe.provenance import Made
from rollouts_core.observe.run_records import RunRecord

LEFT_OUT = ("store", "results", "tracking", "machine")
"""Parts of a config that say where something ran, and not what it was."""
ROLES = ("demonstrations", "preferences", "prompts", "heldout")


def model_card(repository: str, record: RunRecord, config: Mapping[str, Any], made: Sequence[Made]) -> str:
    """Markdown with the front matter that the hub reads. Of paths only their last parts are told."""
    lines = [
        *_front_matter(config),
        f"# {repository.rpartition('/')[2]}",
        "",
        f"{_sentence(config)} It was trained by run `{record.run_id}` of rollouts.",
        "",
        *_accuracies(record, config),
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{repository}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{repository}")',
        "```",
        "",
        *_data(config, made),
        *_lineage(made),
        "## Config",
        "",
        "```json",
        json.dumps(_tellable(config), indent=1),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _front_matter(config: Mapping[str, Any]) -> list[str]:
    trained = [part for part in ("sft", "dpo") if config.get(part)]
    trained += [config["rl"]["algorithm"]["kind"]] if config.get("rl") else []
    base = _base(config)
    return [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if base and "/" in base else []),
        "tags:",
        *(f"- {tag}" for tag in ("rollouts", *trained)),
        "---",
        "",
    ]


def _base(config: Mapping[str, Any]) -> str:
    """The hub's name of the model that training began with; a directory's last part."""
    if config["model"]["kind"] != "pretrained":
        return ""
    name = str(config["model"]["name"])
    return PurePath(name).name if PurePath(name).is_absolute() or name.startswith(".") else name


def _sentence(config: Mapping[str, Any]) -> str:
    base = f"`{_base(config)}`" if _base(config) else "a model from scratch"
    steps = [part.upper() for part in ("sft", "dpo") if config.get(part)]
    steps += [f"RL ({config['rl']['algorithm']['kind']})"] if config.get("rl") else []
    return f"A policy made from {base} by {', then '.join(steps)}." if steps else f"A policy: {base}."


def _accuracies(record: RunRecord, config: Mapping[str, Any]) -> list[str]:
    if not record.accuracies:
        return ["No held-out accuracy was measured.", ""]
    evaluation = config["evaluation"]
    how = "greedy" if not evaluation["temperature"] else f"temperature {evaluation['temperature']:g}"
    rows = [
        f"| {name_of(entry.point)} | {100 * entry.accuracy:.1f} % | {100 * entry.low:.1f} to {100 * entry.high:.1f} % "
        f"| {entry.total:,} |"
        for entry in record.accuracies
    ]
    scored = PurePath(str(evaluation["reward"])).name
    return [
        "## Held-out accuracy",
        "",
        "| policy | accuracy | 95 % interval | prompts |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Answers of at most {evaluation['max_new_tokens']} tokens, {how}, scored by `{scored}`.",
        "",
    ]


def _data(config: Mapping[str, Any], made: Sequence[Made]) -> list[str]:
    identified = {role: value for entry in made for role, value in entry.external.items()}
    lines = ["## Data", ""]
    for role in ROLES:
        source = config["data"].get(role)
        if source:
            place = PurePath(str(source.get("name") or source.get("path") or source["kind"])).name
            content = identified.get(role, "")
            lines.append(f"- {role}: `{place}`" + (f", content {content}" if content else ""))
    return [*lines, ""]


def _lineage(made: Sequence[Made]) -> list[str]:
    rows = [
        f"| `{entry.artifact}` | {', '.join(f'`{name}`' for name in entry.inputs.values())} | {entry.seconds:.0f} s |"
        for entry in made
    ]
    commits = sorted({entry.git_commit for entry in made if entry.git_commit})
    libraries = made[-1].libraries if made else {}
    told = ", ".join(f"{name} {version}" for name, version in libraries.items() if name in ("torch", "transformers"))
    commit = [f"Code: commit {', '.join(commits)}; {told}.", ""] if commits else [f"Libraries: {told}.", ""]
    return ["## Lineage", "", "| artifact | made from | took |", "|---|---|---|", *rows, "", *commit]


def _tellable(value: Any, name: str = "") -> Any:
    """A config's data without the parts that say where it ran, and without the directories of files."""
    if isinstance(value, Mapping):
        return {key: _tellable(entry, key) for key, entry in value.items() if name or key not in LEFT_OUT}
    if isinstance(value, list | tuple):
        return [_tellable(entry, name) for entry in value]
    if isinstance(value, str) and PurePath(value).is_absolute():
        return PurePath(value).name
    return value

"""Checks of a published model's directory before anything is loaded: is it complete, and can it be trained?

Decision: only files are read, and only the headers of weights. So this takes milliseconds and needs no torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts_core.inference.families import problems_of

LENGTH_BYTES = 8
"""Before the header of a safetensors file: its length, little-endian."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""In config.json, by family."""
MIXTURES_ON_VLLM = (
    "vLLM gives wrong log-probabilities after a mixture gets new weights (seen with vLLM 0.32 on a CPU); use sglang or "
    "embedded"
)
GGUF = (
    "is quantised for inference (GGUF) and can't be trained; give the model it was made from, or make a model "
    "directory of it with rollouts_core.training.gguf.unpack_gguf"
)


def problems_with(name: str) -> list[str]:
    """Reasons why a model on this machine can't be trained, each with what to do; empty for a model of the hub."""
    place = Path(name)
    if place.suffix == ".gguf":
        return [f"{place} {GGUF}"]
    return problems_in(place) if place.is_dir() else []


def heads_of(name: str) -> tuple[int, int] | None:
    """Heads and key-value heads of the model of a name, where it lies here and its config tells them."""
    file = Path(name) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    heads = config.get("num_attention_heads")
    return (heads, config.get("num_key_value_heads") or heads) if heads else None


def experts_of(name: str) -> int | None:
    """Experts of a layer of the model of a name, 0 where it is no mixture; None where that is not known here."""
    file = Path(name) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    return next((int(config[field]) for field in EXPERTS if config.get(field)), 0)


def problems_in(directory: Path) -> list[str]:
    """Reasons why a model directory can't be trained; empty if it can."""
    config_file = directory / "config.json"
    if not config_file.is_file():
        return [_no_model(directory)]
    try:
        config = json.loads(config_file.read_text())
    except ValueError as error:
        return [f"{config_file} is not valid JSON: {error}"]
    problems = [f"{directory}: {problem}" for problem in problems_of(config)]
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(directory.glob("*.safetensors"))
    for file in files:
        found = header_of(file)
        if isinstance(found, str):
            problems.append(found)
        else:
            shapes |= found
    problems += list(_missing_files(directory))
    if not files and not list(directory.glob("*.bin")):
        problems.append(f"{directory} holds no weights: no *.safetensors")
    return problems + _tokenizer_problems(directory, shapes)


def header_of(file: Path) -> dict[str, tuple[int, ...]] | str:
    """The shapes in a safetensors file by name, or what is wrong with it."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
            return f"{file} is cut off: it has {size:,} bytes, fewer than its header"
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, IndexError):
            return f"{file} is damaged: its header can't be read"
    if (whole := LENGTH_BYTES + length + max(ends, default=0)) != size:
        return f"{file} is cut off or damaged: it has {size:,} bytes, and its header says {whole:,}; fetch it again"
    return shapes


def _no_model(directory: Path) -> str:
    if any(directory.glob("*.gguf")):
        return f"{directory} {GGUF}"
    if (adapter := directory / "adapter_config.json").is_file():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path")
        return f"{directory} is an adapter of {base}, not a model: merge it into its base first"
    return f"{directory} holds no config.json: not a Hugging Face model directory"


def _missing_files(directory: Path) -> Iterator[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if missing := [name for name in named if not (directory / name).is_file()]:
            yield f"{index} names files that are not there: {', '.join(missing[:3])}; fetch them"


def _tokenizer_problems(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems = []
    settings = directory / "tokenizer_config.json"
    template = (directory / "chat_template.jinja").is_file() or (directory / "additional_chat_templates").is_dir()
    if settings.is_file() and not template and not json.loads(settings.read_text()).get("chat_template"):
        problems.append(
            f"{directory}: its tokenizer has no chat template, so conversations can't be written for it; use the "
            "model's instruct version, or put a chat_template.jinja beside its tokenizer"
        )
    rows = next((shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDINGS)), None)
    tokens = _tokens(directory / "tokenizer.json")
    if rows is not None and tokens > rows:
        problems.append(
            f"{directory}: its tokenizer has {tokens:,} tokens and the model embeddings for {rows:,}: is the tokenizer "
            "another model's? If tokens were added, the model's embeddings must be resized for them"
        )
    return problems


def _tokens(file: Path) -> int:
    """The size of a tokenizer's vocabulary: its largest id plus one; 0 if the file does not tell."""
    try:
        data = json.loads(file.read_text())
        vocabulary = data["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + max(map(int, [*ids, *(token["id"] for token in data.get("added_tokens", ()))]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0

"""The config of data: files, data sets and mixtures of them, and how they are tokenized."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from rollouts_core.config.schema import Added, Operational, one_of, part


def _text(value: object) -> str:
    if not isinstance(value, Path | str) or not str(value).strip():
        raise ValueError("is neither a path nor a URL")
    return str(value)


FileOrUrl = Annotated[Path | str, PlainValidator(_text, json_schema_input_type=str)]
"""Read as text, so that a URL keeps its slashes."""
Overlong = Literal["refuse", "drop", "cut_left", "cut_right"]
DataPath = Annotated[
    FileOrUrl,
    Field(
        description="A file or an fsspec URL. The cache knows it by its content or its store's checksum, not by this "
        "name."
    ),
]
Pin = Annotated[
    Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None,
    Field(description="Pins the content, for URLs whose store has no checksums."),
]
Layout = Annotated[
    Literal["rows", "gsm8k", "math", "hh"],
    Field(description="Layout of the rows: ours, or that of GSM8K, MATH or Anthropic's HH."),
]
Columns = Annotated[
    dict[str, str],
    Field(
        description="Columns that have other names in the file: our name, then the file's, for example {'messages': "
        "'dialog'}."
    ),
]
Annotations = Annotated[
    bool, Field(description="For gsm8k: keep calculator annotations such as <<48/2=24>> in the solutions.")
]


@part
class Jsonl:
    """Chat rows from a JSONL file: `{"messages": [{"role": ..., "content": ...}, ...], "answer": ...}`."""

    kind: Literal["jsonl"] = "jsonl"
    path: Operational[DataPath]
    layout: Layout = "rows"
    columns: Added[Columns] = Field(default_factory=dict)
    annotations: Added[Annotations] = True
    sha256: Operational[Pin] = None


@part
class Parquet:
    """The same rows from a Parquet file."""

    kind: Literal["parquet"] = "parquet"
    path: Operational[DataPath]
    layout: Layout = "rows"
    columns: Added[Columns] = Field(default_factory=dict)
    annotations: Added[Annotations] = True
    sha256: Operational[Pin] = None


@part
class Arrow:
    """The same rows from an Arrow IPC file or stream, as `datasets` saves."""

    kind: Literal["arrow"] = "arrow"
    path: Operational[DataPath]
    layout: Layout = "rows"
    columns: Added[Columns] = Field(default_factory=dict)
    annotations: Added[Annotations] = True
    sha256: Operational[Pin] = None


@part
class HubDataset:
    """Rows from anything `datasets.load_dataset` loads; its columns must hold messages and, for RL, an answer."""

    kind: Literal["dataset"] = "dataset"
    name: str = Field(description="Repository name, or a builder such as 'json' or 'parquet' together with data_files.")
    config: str | None = Field(default=None, description="Configuration (subset) of the data set.")
    split: str = Field(default="train", description="Split, slices allowed: 'train[:1000]'.")
    revision: Operational[str | None] = Field(default=None, description="Branch, tag or commit; resolved to a commit.")
    data_files: Operational[tuple[str, ...]] = Field(
        default=(), description="Local files, for builders that read files."
    )
    layout: Layout = "rows"
    columns: Added[Columns] = Field(default_factory=dict)
    annotations: Added[Annotations] = True
    messages_column: str = Field(default="messages", description="Column with the list of messages.")
    answer_column: str = Field(default="answer", description="Column with the answer that rewards compare with.")
    streaming: Operational[bool] = Field(
        default=False, description="Read the data set while it is downloaded, if it does not fit on the disk."
    )


Source = Annotated[
    Jsonl | Parquet | Arrow | HubDataset, Field(discriminator="kind", title="source", json_schema_extra=one_of)
]


@part
class Weighted:
    """A source of a mixture, with its weight."""

    source: Source = Field(description="The source of the rows.")
    weight: float = Field(default=1.0, gt=0, description="How often its rows are used, relative to the other weights.")


@part
class Mixture:
    """Rows from several sources, each as often as its weight says, however many it has; each in its own epochs."""

    kind: Literal["mixture"] = "mixture"
    sources: tuple[Weighted, ...] = Field(min_length=1, description="The sources and their weights.")


SourceOrMixture = Annotated[
    Jsonl | Parquet | Arrow | HubDataset | Mixture,
    Field(discriminator="kind", title="source", json_schema_extra=one_of),
]
Role = Literal["system", "developer", "user", "assistant", "tool"]


@part
class TokenizationConfig:
    """How data is tokenized; nothing here can change a result."""

    parts: Operational[int] = Field(
        default=1, ge=1, description="Tasks that tokenize at once, each a process of its own."
    )
    task_runner: Operational[Literal["threads", "dask", "ray", "slurm"]] = Field(
        default="threads",
        description="Where the parts run: on this machine (threads), on a Dask or Ray cluster, or as a job array of the"
        " run's Slurm cluster (machine.kind slurm).",
    )
    at_once: Operational[int | None] = Field(
        default=None, ge=1, description="For slurm: how many run at once; null: as many as Slurm allows."
    )
    cluster: Operational[str | None] = Field(
        default=None, description="Address of the Dask scheduler or Ray head; null: one is started here."
    )


@part
class DataConfig:
    """The data to train on, and the held-out prompts to measure with."""

    demonstrations: SourceOrMixture | None = Field(default=None, description="Conversations for SFT.")
    preferences: SourceOrMixture | None = Field(
        default=None, description="Prompts with a chosen and a rejected answer, for DPO."
    )
    prompts: SourceOrMixture | None = Field(default=None, description="Prompts, with what the reward needs, for RL.")
    heldout: Source | None = Field(default=None, description="Prompts never trained on; accuracy is measured here.")
    max_length: int = Field(default=1024, ge=2, description="Context: the longest example allowed, in tokens.")
    overlong: Overlong = Field(
        default="refuse",
        description="What to do with longer demonstrations. Prompts and preferences are dropped, never cut.",
    )
    learnt_roles: tuple[Role, ...] = Field(
        default=("assistant",), min_length=1, description="Roles whose turns of a demonstration are learnt."
    )
    tokenization: TokenizationConfig = Field(default_factory=TokenizationConfig, description="How data is tokenized.")

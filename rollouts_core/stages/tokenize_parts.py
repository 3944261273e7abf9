"""How tokenization is cut into parts: stages beside the plan's own, which nobody but the tokenize stage asks for."""

from rollouts_core.stages.specs import TokenizePartSpec, TokenizeSpec
from rollouts_core.stages.stage import VERSIONS, Stage


def parts_of(stage: Stage) -> tuple[Stage, tuple[Stage, ...]]:
    """The stage that makes the tokenizer, and those that make the shards, which may run at once."""
    spec = stage.spec
    assert isinstance(spec, TokenizeSpec), "only this stage is made in parts"
    tokenizer = Stage("tokenizer", "tokenizer", VERSIONS["tokenizer"], spec, {}, stage.external)
    parts = spec.tokenization.parts
    if parts == 1:
        return tokenizer, ()
    return tokenizer, tuple(
        Stage(
            f"tokenize-{part + 1}",
            "tokenize_part",
            VERSIONS["tokenize_part"],
            TokenizePartSpec(whole=spec, part=part, parts=parts),
            {"tokenizer": tokenizer.artifact},
            stage.external,
        )
        for part in range(parts)
    )

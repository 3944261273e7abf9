"""A part of a tokenization, made beside other parts: `demonstrations/00003.parquet`, ..."""

import shutil

from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.stages.specs import TokenizePartSpec
from rollouts_core.stages.tokenize import make_shards
from rollouts_core.stages.workspace import Work


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, TokenizePartSpec), "whoever cuts a stage into parts pairs them with their spec"
    trusted = spec.whole.tokenizer.trust_remote_code
    tokenizer = load_tokenizer(str(work.inputs["tokenizer"] / "tokenizer"), None, trusted)
    make_shards(work, spec.whole, tokenizer, lambda shard: shard % spec.parts == spec.part)
    shards = 0
    for role in spec.whole.sources:
        (work.out / role).mkdir()
        for shard in (work.scratch / role).glob("*.parquet"):
            shutil.copyfile(shard, work.out / role / shard.name)
            shards += 1
    return {"shards": float(shards)}

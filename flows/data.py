"""The command `data`: what a config would train on, in the terminal and as a page."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from flows.preflight import outputs_of, store_of
from rollouts_core.config import PipelineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.data_page import write_data_page
from rollouts_core.stages.plan import plan
from rollouts_core.stages.preview import Shown, SourcePreview, preview

BAR = 40
"""Characters of the longest bar of a histogram."""


def print_data(config: PipelineConfig, options: argparse.Namespace) -> int:
    """Exit status 1 when some row cannot be used."""
    if options.rows < 1 or options.examples < 0:
        raise BadInput("--rows: read at least one; --examples: 0 or more")
    sources = preview(plan(config).tokenize, store_of(config), options.rows, options.examples)
    page = write_data_page(config.name, sources, outputs_of(config) / "data" / f"{config.name}.html")
    if options.json:
        print(json.dumps({"page": str(page), "sources": [asdict(source) for source in sources]}))
    else:
        console = Console(highlight=False)
        for source in sources:
            _print_source(source, console)
        console.print(f"page    {page}", soft_wrap=True)
    if faulty := [source.role for source in sources if source.problems]:
        print(f"error: nothing can be trained: {', '.join(faulty)} have rows that cannot be used", file=sys.stderr)
        return 1
    return 0


def _print_source(source: SourcePreview, console: Console) -> None:
    more = " read, and there are more" if source.more else ""
    learnt = f", {100 * source.learnt / source.tokens:.1f} % of them learnt" if source.learnt else ""
    console.print(
        f"[bold]{source.role}[/]  {source.rows:,} rows{more}, {source.sequences:,} sequences, {source.tokens:,} tokens"
        f"{learnt}; {source.dropped:,} rows dropped, {source.cut:,} cut",
        soft_wrap=True,
    )
    for problem in source.problems:
        console.print(Text(f"  {problem}", "red"), soft_wrap=True)
    most = max((count for _, _, count in source.lengths), default=1)
    for begin, end, count in source.lengths:
        tokens = f"{begin} to {end - 1}" if end - 1 > begin else f"{begin}"
        console.print(f"  {tokens:>14} tokens  {'█' * round(BAR * count / most):<{BAR}} {count:,}", soft_wrap=True)
    _print_examples(source.examples, console)


def _print_examples(examples: Sequence[Shown], console: Console) -> None:
    """Learnt tokens are green, special ones yellow."""
    for example in examples:
        console.print(f"  [dim]{example.name}[/]")
        line = Text("  ")
        for piece in example.pieces:
            style = " ".join(["green"] * piece.learnt + ["bold yellow"] * (piece.special and not piece.learnt))
            line.append(piece.text, style)
        console.print(line, soft_wrap=True)

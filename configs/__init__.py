"""Experiments: one Python file each, `config = PipelineConfig(...)`."""

"""The library: data, training, generation, rewards, evaluation, stages, store. Knows neither Prefect nor SSH."""
